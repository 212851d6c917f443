"""The metrics: what can be shown, what the page says of it, and that the documentation says the same."""

import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tools.docs import metrics_page

from tensorhub_common.config.parsers import Listen
from tensorhub_common.observability.metrics import METER, METRICS, Metric, labelled, observe, recorder, unlabelled
from tensorhub_common.telemetry import metrics_export

PAGE = (Path(__file__).parents[4] / "docs" / "operate" / "metrics.md").read_text()
NAME = re.compile(r"\btensorhub_\w+")


class Shown:
    """A page of metrics that is not served."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self.registry, scope_info_enabled=False)
        self.provider = MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False)
        self.meter: Meter = self.provider.get_meter(METER)

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = generate_latest(self.registry).decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    yield made
    made.provider.shutdown()


def test_the_documentation_is_as_the_code_is_and_speaks_of_what_exists() -> None:
    """After a change of a metric: `make docs`."""
    assert metrics_page.with_table(PAGE) == PAGE
    known = {metrics_page.prometheus_name(metric) for metric in METRICS.values()}
    assert set(NAME.findall(PAGE)) <= known | {f"{name}_bucket" for name in known}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_name_begins_with_its_service_s_ends_with_its_unit_and_is_one_for_prometheus(metric: Metric) -> None:
    name = metrics_page.prometheus_name(metric)
    assert re.fullmatch(r"tensorhub_[a-z_]+", name)
    assert metric.role == "every" or metric.name.startswith(f"tensorhub.{metric.role}.")
    assert name.removesuffix("_total").endswith({"By": "_bytes", "s": "_seconds"}.get(metric.unit, ""))
    assert name.endswith("_total") == (metric.kind == "counter")


def test_a_figure_is_read_when_somebody_looks(shown: Shown) -> None:
    figures = {"local": 5}
    observe(shown.meter, "tensorhub.agent.read", labelled("transport", lambda: figures))
    observe(shown.meter, "tensorhub.agent.workers", unlabelled(lambda: len(figures)))
    key = ("tensorhub_agent_read_bytes_total", frozenset({("transport", "local")}))
    assert shown.samples()[key] == 5
    figures.update(local=7, ucxx=1)
    found = shown.samples()
    assert found[key] == 7
    assert found["tensorhub_agent_workers", frozenset()] == 2


def test_a_figure_that_can_t_be_read_just_now_costs_itself_alone(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> float:
        raise RuntimeError("dictionary changed size during iteration")

    observe(shown.meter, "tensorhub.agent.workers", unlabelled(fail))
    observe(shown.meter, "tensorhub.agent.segments.used", unlabelled(lambda: 3))
    assert [name for name, _ in shown.samples()] == ["target_info", "tensorhub_agent_segments_used_bytes"]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_a_duration_is_recorded_and_what_is_not_in_the_table_can_t_be_shown(shown: Shown) -> None:
    recorder(shown.meter, "tensorhub.agent.read.duration")(0.3)
    found, name = shown.samples(), "tensorhub_agent_read_duration_seconds"
    assert found[f"{name}_sum", frozenset()] == 0.3
    assert [found[f"{name}_bucket", frozenset({("le", le)})] for le in ("0.25", "0.5")] == [0, 1]
    for unknown in ("tensorhub.agent.flights", ""):
        with pytest.raises(KeyError):
            observe(shown.meter, unknown, unlabelled(lambda: 1))


def test_the_page_is_served_where_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        page = metrics_export.serve(Listen("127.0.0.1", 0))
    assert page is not None
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", caplog.text)
    provider = MeterProvider([page.reader], shutdown_on_exit=False)
    observe(provider.get_meter(METER), "tensorhub.agent.workers", unlabelled(lambda: 4))
    with urllib.request.urlopen(url, timeout=120) as answer:  # noqa: S310 (a page of our own)
        assert b"tensorhub_agent_workers 4.0" in answer.read()
    page.close()
    provider.shutdown()


def test_a_port_that_is_taken_is_a_warning_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        assert metrics_export.serve(Listen("127.0.0.1", taken.getsockname()[1])) is None
    assert "Address already in use" in caplog.text
    assert "TENSORHUB_METRICS=0" in caplog.text
