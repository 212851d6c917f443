"""Logs and traces of a process: where the lines go, and where the spans go.

What keeps spans for `tensorhub trace` is `telemetry/span_store.py`, what shows metrics `metrics_page.py`; `start`
starts both. What makes spans is `telemetry/span_maker.py`, and how a trace crosses processes
`observability/trace_context.py`.

The SDK runs in processes of others, so two things are apart. *Using* telemetry (`logger`) configures nothing: in a
trainer our lines go wherever its own `logging` sends them, and our spans to its own provider, if it has one. *Starting*
it (`start`, `shutdown`) is for a program's `main` alone.

Always true: without an OTLP endpoint no exporter is even imported; with `OTEL_SDK_DISABLED` nothing is made, kept or
served; and `shutdown` ends within its bound, whatever the collector does.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.trace_context import ENDPOINTS, is_disabled
from tensorhub_common.telemetry.log_output import start_logs
from tensorhub_common.telemetry.process_spans import _keepers, _makers
from tensorhub_common.telemetry.span_files import SpanFiles
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_common.telemetry.span_store import SpanStore

SHUTDOWN_S_MAX: Final = 3.0
"""What a process that ends waits for the exporter; the spans that it still holds then are lost."""

METRICS_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
"""Only this one: a collector of traces alone, which the general variable may well name, would refuse metrics."""


def make_provider(
    service: str, instance: str, environ: Mapping[str, str]
) -> tuple[TracerProvider, SpanProcessor | None]:
    """Return a provider of spans, and what exports them if `environ` names an OTLP endpoint."""
    attributes = {"service.instance.id": instance}
    if not environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = service
    # Its own handler at exit would wait for the collector without a bound: `shutdown` is called by `main` instead.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    if not any(environ.get(name) for name in ENDPOINTS):
        return provider, None
    # Imported here since most processes never export, and these two bring an HTTP client and protobuf along.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    exporting = BatchSpanProcessor(OTLPSpanExporter())
    provider.add_span_processor(exporting)
    return provider, exporting


# ----------------------------------------------------------------------------------------------------------- process


_ends: Final[list[Callable[[], object]]] = []
"""What `shutdown` calls."""


def start(service: str, instance: str, settings: Settings, state_dir: Path) -> None:
    """Send this process's logs, spans and metrics where its settings and OpenTelemetry's own variables say.

    For `main` alone. Spans are kept below `state_dir`.
    """
    start_logs(service, instance, settings)
    if isinstance(trace.get_tracer_provider(), TracerProvider) or is_disabled(os.environ):
        return
    provider, exporting = make_provider(service, instance, os.environ)
    name = str(provider.resource.attributes["service.name"])
    keeper = SpanStore(SpanFiles(state_dir / "spans", settings.spans_bytes_max), name, instance)
    maker = SpanMaker.own(provider, exporting, keeper.take)
    _makers.extend([maker] if maker is not None else [])
    _keepers.append(keeper)
    # Our own spans go to the keeper as records; this is for those that a library makes.
    provider.add_span_processor(keeper)
    trace.set_tracer_provider(provider)
    # The keeper by itself too: an exporter that hangs must not keep it from writing what it has.
    _ends.extend([keeper.shutdown, provider.shutdown])
    if settings.metrics is not None or os.environ.get(METRICS_ENDPOINT):
        # Imported here since most processes have no page, and it brings an HTTP server along.
        from tensorhub_common.telemetry import metrics_export  # noqa: PLC0415

        push = bool(os.environ.get(METRICS_ENDPOINT))
        _ends.append(metrics_export.start(provider.resource, settings.metrics, keeper, push=push))


def shutdown(timeout_s: float = SHUTDOWN_S_MAX) -> bool:
    """Export what is left, for at most `timeout_s`; tell whether all of it went in time."""
    # Threads, since an exporter may be in the middle of an HTTP request that nothing interrupts.
    ending = [threading.Thread(target=end, name="telemetry-shutdown", daemon=True) for end in _ends]
    deadline = time.monotonic() + timeout_s
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join(max(deadline - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in ending)
