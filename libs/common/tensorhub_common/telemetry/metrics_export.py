"""Shows a process's metrics to Prometheus, pushes them by OTLP, and writes their table for docs/operate/metrics.md.

    python -m tensorhub_common.telemetry.metrics_export < docs/operate/metrics.md

Invariant: a page that can't be served is one warning, since a hub that moves weights unwatched is better than none.
Where metrics are off this module is not imported, and recording one does nothing.
"""

import logging
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
from tensorhub_common.observability.metrics import METER, labelled, observe, unlabelled
from tensorhub_common.observability.span_cost import SPAN_CPU
from tensorhub_common.runtime.supervision import fault_counts
from tensorhub_common.telemetry.span_store import SpanStore

_log: Final = logging.getLogger(__name__)


def start(resource: Resource, listen: Listen | None, keeper: SpanStore, *, push: bool) -> Callable[[], object]:
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
    observe(meter, "tensorhub.spans.dropped", unlabelled(lambda: keeper.dropped))
    observe(meter, "tensorhub.spans.cpu", unlabelled(lambda: SPAN_CPU.spent_s))
    observe(meter, "tensorhub.faults", labelled("owner", fault_counts))

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
    return Page(metric_reader(registry), server)


def metric_reader(registry: CollectorRegistry) -> MetricReader:
    """Return what writes the metrics of a process into a registry of Prometheus."""
    return PrometheusMetricReader(registry=registry, scope_info_enabled=False)
