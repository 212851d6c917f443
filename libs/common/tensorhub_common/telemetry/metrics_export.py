"""Shows a process's metrics to Prometheus, pushes them by OTLP, and writes their table for docs/metrics.md.

    python -m tensorhub_common.telemetry.metrics_export < docs/metrics.md

Always true: a page that can't be served is one warning, since a hub that moves weights unwatched is better than none.
Where nobody asks for metrics this is not even imported, and what records one does nothing.
"""

import logging
import sys
from collections.abc import Callable
from http.server import HTTPServer
from typing import Final, NamedTuple

from opentelemetry import metrics as api
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, start_http_server

from tensorhub_common.config.parsers import Listen
from tensorhub_common.observability.metrics import METER, METRICS, Metric, by, observe, one, recorder
from tensorhub_common.observability.span_cost import SPANS
from tensorhub_common.runtime.supervision import fault_counts
from tensorhub_common.telemetry.span_store import SpanKeeper

TABLE_BEGIN: Final = "<!-- metrics: begin (written by `make docs`) -->"
TABLE_END: Final = "<!-- metrics: end -->"

_log: Final = logging.getLogger(__name__)


def start(resource: Resource, listen: Listen | None, keeper: SpanKeeper, *, push: bool) -> Callable[[], object]:
    """Serve this process's metrics, and push them to where OpenTelemetry's variables say. Returns what ends that."""
    readers: list[MetricReader] = []
    page = None if listen is None else serve(listen)
    if page is not None:
        readers.append(page.reader)
    if push:
        # Imported here since most processes never push.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    # Its own handler at exit would wait for the collector without a bound: `telemetry.shutdown` has one.
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    api.set_meter_provider(provider)
    meter = provider.get_meter(METER)
    observe(meter, "tensorhub.spans.dropped", one(lambda: keeper.dropped))
    observe(meter, "tensorhub.spans.cpu", one(lambda: SPANS.spent_s))
    observe(meter, "tensorhub.faults", by("owner", fault_counts))

    def end() -> None:
        if page is not None:
            page.close()
        provider.shutdown()

    return end


class Page(NamedTuple):
    """A page that is being served, and what fills it."""

    reader: MetricReader
    server: HTTPServer

    def close(self) -> None:
        """Serve it no more."""
        self.server.shutdown()
        self.server.server_close()


def serve(listen: Listen) -> Page | None:
    """Serve a page, each look at it in a thread of its own; None where that is not possible."""
    registry = CollectorRegistry()
    try:
        server, _ = start_http_server(listen.port, listen.host, registry)
    except OSError as why:
        _log.warning(
            "metrics can't be served at %s:%d (%s): TENSORHUB_METRICS=0 takes a free port", *listen, why.strerror or why
        )
        return None
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    _log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    return Page(_reader(registry), server)


def _reader(registry: CollectorRegistry) -> MetricReader:
    return PrometheusMetricReader(registry=registry, scope_info_enabled=False)


# ---------------------------------------------------------------------------------------------------- documentation


def prometheus_name(metric: Metric) -> str:
    """Return what Prometheus calls a metric, by asking the exporter."""
    registry = CollectorRegistry()
    provider = MeterProvider([_reader(registry)], Resource.get_empty(), shutdown_on_exit=False)
    meter = provider.get_meter(METER)
    if metric.kind == "histogram":
        recorder(meter, metric.name)(1.0)
    else:
        observe(meter, metric.name, one(lambda: 1.0))
    (family,) = [family for family in registry.collect() if family.name != "target"]
    provider.shutdown()
    return f"{family.name}_total" if metric.kind == "counter" else family.name


def table_markdown() -> str:
    """Return the table as Markdown, without a newline at its end."""
    rows = ["| metric | kind | of | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{prometheus_name(metric)}` | {metric.kind} | {metric.role} | {labels} | {metric.meaning} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return a page of documentation with the table, as it is now, between the page's markers."""
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers of the metrics: put {TABLE_BEGIN} and {TABLE_END} into it")
    return f"{before}{begin}\n\n{table_markdown()}\n\n{end}{after}"


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
