"""Keeps a process's finished spans, without ever holding up whoever finishes one.

`take` only appends to a queue. A thread of the keeper's own turns what is queued into lines and writes them, batch
after batch. Always true: the queue has a bound, and what finds it full is dropped and counted; a full disk or a
directory that can't be written costs spans and one warning, and never an error of the service.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, cast

import msgspec
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from tensorhub_common.span_cost import SPANS
from tensorhub_common.span_files import SpanFiles
from tensorhub_common.tracecontext import SpanRecord, Value
from tensorhub_common.wire.traces import Attribute, Link, MadeSpan, Span

QUEUE_SPANS_MAX: Final = 8_192
"""So many finished spans wait to be written; what comes on top is dropped."""

BATCH_SPANS_MAX: Final = 512
WRITE_EVERY_S: Final = 1.0
"""A finished span stands in the files this much later, or when somebody asks for it."""

CLOSE_S_MAX: Final = 1.0
TEXT_CHARS_MAX: Final = 1_000
"""An attribute's text is cut to this."""

_log: Final = logging.getLogger(__name__)


class SpanKeeper(SpanProcessor):
    """The keeper of one process, from its construction to `shutdown`."""

    def __init__(self, files: SpanFiles, service: str = "", instance: str = "") -> None:
        """Begin to keep spans in these files; records are of this service."""
        self.files = files
        self._service, self._instance = service, instance
        self.dropped = 0
        """How many spans were not kept, for whatever reason."""
        self._queue: deque[ReadableSpan | SpanRecord | Span] = deque()
        self._warned = False
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write_always, name="span-keeper", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a finished span that somebody made by OpenTelemetry's own means."""
        self.take(span)

    def take(self, span: ReadableSpan | SpanRecord | Span) -> None:
        """Take a finished span: of this process, as a record, or of another one, in the hub's own form."""
        if len(self._queue) >= QUEUE_SPANS_MAX:
            self.dropped += 1
        else:
            self._queue.append(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write what is queued now. Tells whether all of it stands in the files."""
        deadline = time.monotonic() + timeout_millis / 1e3
        if not self._writing.acquire(timeout=max(timeout_millis / 1e3, 0)):
            return False
        try:
            with SPANS.counted():
                while self._queue and time.monotonic() < deadline:
                    if not self._write_batch():
                        break
            return not self._queue
        finally:
            self._writing.release()

    def newest(self, about: bytes, wanted: Callable[[Span], bool], count_max: int) -> tuple[list[Span], int]:
        """Look through the files, and what was still queued; see `SpanFiles.newest`."""
        self.force_flush(round(WRITE_EVERY_S * 1e3))
        return self.files.newest(about, wanted, count_max)

    def shutdown(self) -> None:
        """Write what is left, within a bound, and take no more."""
        self._closed.set()
        self._thread.join(CLOSE_S_MAX)

    def _write_always(self) -> None:
        while not self._closed.wait(WRITE_EVERY_S):
            self.force_flush()
        self.force_flush()

    def _write_batch(self) -> bool:
        """Write some of the queue; False when another process is writing just now, and it should be tried again."""
        batch = [self._queue[index] for index in range(min(len(self._queue), BATCH_SPANS_MAX))]
        try:
            spans = [self._in_form(span) for span in batch]
            too_long = self.files.append(spans)
        except Exception as why:  # noqa: BLE001 (whatever a span holds or a disk does, the service goes on)
            too_long = len(batch)
            if not self._warned:
                self._warned = True
                _log.warning("finished spans can't be kept in %s, so they are dropped: %s", self.files.directory, why)
        if too_long is None:
            return False
        self.dropped += too_long
        for _ in batch:
            self._queue.popleft()
        return True

    def _in_form(self, span: ReadableSpan | SpanRecord | Span) -> MadeSpan:
        if isinstance(span, SpanRecord):
            return of_record(span, self._service, self._instance, MadeSpan)
        return _cut(span) if isinstance(span, Span) else span_of(span)


Form = TypeVar("Form", bound=MadeSpan)


def of_record(record: SpanRecord, service: str, instance: str, form: type[Form]) -> Form:
    """Return the finished span of a record in the hub's own form: `MadeSpan`, or `Span` for another process."""
    place, parent, error = record.context, record.parent, record.error
    return form(
        trace=f"{place.trace_id:032x}",
        span=f"{place.span_id:016x}",
        parent=None if parent is None else f"{parent.span_id:016x}",
        name=record.name,
        service=service,
        instance=instance,
        start_ns=record.start_ns,
        end_ns=max(record.end_ns, record.start_ns),
        error=None if error is None else error[:TEXT_CHARS_MAX],
        attributes=_short(record.attributes),
        links=tuple(Link(trace=f"{link.trace_id:032x}", span=f"{link.span_id:016x}") for link in record.links),
    )


def _short(attributes: Mapping[str, Value]) -> dict[str, Attribute]:
    for value in attributes.values():
        if type(value) is str and len(value) > TEXT_CHARS_MAX:
            return {key: _attribute(each) for key, each in attributes.items()}
    # As they are, which is nearly always so: nobody changes them any more.
    return cast("dict[str, Attribute]", attributes)


def _cut(span: Span) -> Span:
    """Return a span as it was handed over, with its texts cut to their bound."""
    return msgspec.structs.replace(
        span,
        name=span.name[:TEXT_CHARS_MAX],
        error=None if span.error is None else span.error[:TEXT_CHARS_MAX],
        attributes={key: _attribute(value) for key, value in span.attributes.items()},
    )


def span_of(span: ReadableSpan) -> Span:
    """Return a finished span of OpenTelemetry's in the hub's own form."""
    context = span.get_span_context()
    assert context is not None, "a finished span has ids"
    resource = span.resource.attributes
    failed = span.status.status_code is StatusCode.ERROR
    return Span(
        trace=format_trace_id(context.trace_id),
        span=format_span_id(context.span_id),
        parent=None if span.parent is None else format_span_id(span.parent.span_id),
        name=span.name[:TEXT_CHARS_MAX],
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error=(span.status.description or "failed")[:TEXT_CHARS_MAX] if failed else None,
        attributes={str(key): _attribute(value) for key, value in (span.attributes or {}).items()},
        links=tuple(
            Link(trace=format_trace_id(link.context.trace_id), span=format_span_id(link.context.span_id))
            for link in span.links
        ),
    )


def _attribute(value: object) -> Attribute:
    match value:
        case str():
            return value[:TEXT_CHARS_MAX]
        case bool() | int() | float():
            return value
        case list() | tuple():
            return tuple(each if isinstance(each, bool | int | float) else str(each)[:TEXT_CHARS_MAX] for each in value)
        case _:
            return str(value)[:TEXT_CHARS_MAX]
