"""Logs and traces of a process: where the lines go, and where the spans go.

What keeps spans for `tensorhub trace` is `span_keeper.py`, what shows metrics `metrics_page.py`; `start` starts both.
What makes spans is `spanmaker.py`, and how a trace crosses processes `tracecontext.py`.

The SDK runs in processes of others, so two things are apart. *Using* telemetry (`logger`) configures nothing: in a
trainer our lines go wherever its own `logging` sends them, and our spans to its own provider, if it has one. *Starting*
it (`start`, `shutdown`) is for a program's `main` alone.

Always true: without an OTLP endpoint no exporter is even imported; with `OTEL_SDK_DISABLED` nothing is made, kept or
served; and `shutdown` ends within its bound, whatever the collector does.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.span_cost import SPANS
from tensorhub_common.observability.trace_context import context_in
from tensorhub_common.protocol.spans import Span
from tensorhub_common.telemetry.span_files import SpanFiles
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_common.telemetry.span_store import SpanKeeper

SHUTDOWN_S_MAX: Final = 3.0
"""What a process that ends waits for the exporter; the spans that it still holds then are lost."""

METRICS_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
"""Only this one: a collector of traces alone, which the general variable may well name, would refuse metrics."""

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_OURS: Final = "tensorhub"


# -------------------------------------------------------------------------------------------------------------- logs


class _Line:
    """A log message with its fields. A formatter that doesn't know it writes it as `event key=value …`."""

    __slots__ = ("fields",)

    def __init__(self, fields: MutableMapping[str, Any]) -> None:
        self.fields = fields

    def __str__(self) -> str:
        rest = (f"{key}={value!r}" for key, value in self.fields.items() if key != "event")
        return " ".join((str(self.fields.get("event", "")), *rest))


def _hand_over(_: object, __: str, fields: MutableMapping[str, Any]) -> tuple[tuple[_Line], dict[str, Any]]:
    """End a chain of processors: pass the fields on to `logging` as one message."""
    passed = {key: fields.pop(key) for key in ("exc_info", "stack_info") if key in fields}
    return (_Line(fields),), passed


_PROCESSORS: Final[Iterable[structlog.types.Processor]] = (
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _hand_over,
)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a module's logger (`logger(__name__)`), which binds fields and writes by way of `logging`."""
    wrapped = structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger, context_class=dict
    )
    return cast("structlog.stdlib.BoundLogger", wrapped)


class _Formatter(logging.Formatter):
    """Writes our lines and those of other libraries alike, with time, level, process and trace."""

    def __init__(self, process: Mapping[str, str], *, as_json: bool, colors: bool) -> None:
        super().__init__()
        self._process = process
        self._render: structlog.types.Processor = (
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        )

    def format(self, record: logging.LogRecord) -> str:
        said = record.msg.fields if isinstance(record.msg, _Line) else {"event": record.getMessage()}
        fields: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            **trace_ids(),
            **said,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return cast("str", self._render(None, record.levelname.lower(), fields))


class _Handler(logging.StreamHandler[TextIO]):
    """The one handler that `start` puts on the root logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let pass what is ours; of other libraries we only want to hear what is wrong."""
        return (record.name.startswith(_OURS) or record.levelno >= logging.WARNING) and bool(super().filter(record))


ANSWERING: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("answering", default=None)
"""The headers of the question that is being answered; read only where a line is logged meanwhile."""


def trace_ids() -> dict[str, str]:
    """Return the ids of the active span, or of whoever asked, as log fields; nothing when there is none."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
    headers = ANSWERING.get()
    cause = None if headers is None else context_in(headers)
    return {} if cause is None else {"trace_id": cause.trace_id, "span_id": cause.span_id}


def start_logs(service: str, instance: str, settings: Settings, stream: TextIO | None = None) -> None:
    """Send this process's log lines to `stream` (stderr by default), instead of where an earlier call sent them."""
    handler = _Handler(stream)
    colors = handler.stream.isatty() and "NO_COLOR" not in os.environ
    process = {"service": service, "instance": instance}
    handler.setFormatter(_Formatter(process, as_json=settings.log_format == "json", colors=colors))
    root = logging.getLogger()
    for each in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(each)
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())


# ------------------------------------------------------------------------------------------------------------ traces


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

_keepers: Final[list[SpanKeeper]] = []
"""The keeper of this process's spans; none before `start`, and none with telemetry off."""

_makers: Final[list[SpanMaker]] = []
"""The maker of this process's spans; none before `start`, and none with telemetry off."""

_ends: Final[list[Callable[[], object]]] = []
"""What `shutdown` calls."""


def keeper() -> SpanKeeper | None:
    """Return what keeps this process's spans, if anything does."""
    return _keepers[0] if _keepers else None


def span_maker() -> SpanMaker | None:
    """Return what makes this process's spans, if anything does."""
    return _makers[0] if _makers else None


def keep_foreign(spans: Iterable[Span]) -> None:
    """Keep finished spans of a process that has no store of its own: a worker's, which it hands to its agent."""
    with SPANS.counted():
        for each in _keepers:
            for span in spans:
                each.take(span)


def start(service: str, instance: str, settings: Settings, state_dir: Path) -> None:
    """Send this process's logs, spans and metrics where its settings and OpenTelemetry's own variables say.

    For `main` alone. Spans are kept below `state_dir`.
    """
    start_logs(service, instance, settings)
    if isinstance(trace.get_tracer_provider(), TracerProvider) or is_disabled(os.environ):
        return
    provider, exporting = make_provider(service, instance, os.environ)
    name = str(provider.resource.attributes["service.name"])
    keeper = SpanKeeper(SpanFiles(state_dir / "spans", settings.spans_bytes_max), name, instance)
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


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Tell whether OpenTelemetry's own switch turns all telemetry but the logs off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


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
