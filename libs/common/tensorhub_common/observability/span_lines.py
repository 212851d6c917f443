"""From a finished span, in whichever form somebody has it, to the line of JSON that is kept. Pure.

A span of our own is a `SpanRecord`, which is encoded as it is: nothing is made between it and its line. What arrives
from another process is a `FinishedSpan`, and so is what a library made by OpenTelemetry itself, once `span_of` has read
it.
"""

from typing import Final

import msgspec

from tensorhub_common.observability.trace_context import SpanRecord
from tensorhub_common.protocol.spans import Attribute, FinishedSpan, SpanLink

TEXT_CHARS_MAX: Final = 1_000
"""An attribute's text is cut to this."""

AnySpan = SpanRecord | FinishedSpan

_encode: Final = msgspec.json.Encoder().encode


class SpanLines:
    """Writes the lines of one process."""

    def __init__(self, service: str, instance: str) -> None:
        """Records are of this service, and this one of its processes."""
        self._service, self._instance = service, instance
        self._beginning = _encode({"service": service, "instance": instance})[:-1] + b","

    def line(self, span: AnySpan) -> bytes:
        """Return a finished span as one line, without its end."""
        if isinstance(span, SpanRecord):
            line = self._beginning + _encode(span)[1:]
            # A text that is too long makes a line that is longer; of those that are, few hold one.
            if len(line) <= TEXT_CHARS_MAX or not _is_to_be_cut(span):
                return line
            return _encode(_cut(of_record(span, self._service, self._instance)))
        return _encode(_cut(span))


def of_record(record: SpanRecord, service: str, instance: str) -> FinishedSpan:
    """Return the finished span of a record as other processes take it."""
    return FinishedSpan(
        trace=record.trace,
        span=record.span,
        parent=record.parent,
        name=record.name,
        service=service,
        instance=instance,
        start_ns=record.start_ns,
        end_ns=record.end_ns,
        error=record.error,
        attributes=dict(record.attributes),
        links=tuple(SpanLink(trace=link.trace_id, span=link.span_id) for link in record.links),
    )


def _is_to_be_cut(span: SpanRecord) -> bool:
    texts = (span.error or "", *span.attributes.values())
    return any(len(each) > TEXT_CHARS_MAX for each in texts if isinstance(each, str))


def _cut(span: FinishedSpan) -> FinishedSpan:
    """Return a span with its texts cut to their bound."""
    return msgspec.structs.replace(
        span,
        name=span.name[:TEXT_CHARS_MAX],
        error=None if span.error is None else span.error[:TEXT_CHARS_MAX],
        attributes={key: attribute(value) for key, value in span.attributes.items()},
    )


def attribute(value: object) -> Attribute:
    """Return a value as spans may carry it, its text cut to the bound."""
    match value:
        case str():
            return value[:TEXT_CHARS_MAX]
        case bool() | int() | float():
            return value
        case list() | tuple():
            return tuple(each if isinstance(each, bool | int | float) else str(each)[:TEXT_CHARS_MAX] for each in value)
        case _:
            return str(value)[:TEXT_CHARS_MAX]
