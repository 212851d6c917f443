"""Where the log lines of a program go: one format for all processes, with the ids of the current trace."""

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

import structlog
from opentelemetry import trace

from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.logs import REQUEST_HEADERS, FieldsMessage
from tensorhub_common.observability.trace_context import context_in

_OURS: Final = "tensorhub"


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
        said = record.msg.fields if isinstance(record.msg, FieldsMessage) else {"event": record.getMessage()}
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
