"""Logging of every process: one format, with the ids of the current trace."""

import logging
import os
from collections.abc import Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

import structlog
from opentelemetry import trace

from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.trace_context import context_in

_OURS: Final = "tensorhub"


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
        """Let pass what is ours, and warnings and errors of other libraries."""
        return (record.name.startswith(_OURS) or record.levelno >= logging.WARNING) and bool(super().filter(record))


REQUEST_HEADERS: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("answering", default=None)
"""The headers of the question that is being answered; read only where a line is logged meanwhile."""


def trace_ids() -> dict[str, str]:
    """Return the ids of the active span, or of the request in hand, as log fields; nothing when there is none."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
    headers = REQUEST_HEADERS.get()
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
