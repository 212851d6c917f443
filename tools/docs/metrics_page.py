"""Writes the table of metrics into docs/operate/metrics.md: a filter from standard input to standard output."""

import sys
from typing import Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from tensorhub_common.observability.metrics import METER, METRICS, Metric, observe, recorder, unlabelled
from tensorhub_common.telemetry.metrics_export import metric_reader

TABLE_BEGIN: Final = "<!-- metrics: begin (written by `make docs`) -->"


TABLE_END: Final = "<!-- metrics: end -->"


def prometheus_name(metric: Metric) -> str:
    """Return what Prometheus calls a metric, by asking the exporter."""
    registry = CollectorRegistry()
    provider = MeterProvider([metric_reader(registry)], Resource.get_empty(), shutdown_on_exit=False)
    meter = provider.get_meter(METER)
    if metric.kind == "histogram":
        recorder(meter, metric.name)(1.0)
    else:
        observe(meter, metric.name, unlabelled(lambda: 1.0))
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
