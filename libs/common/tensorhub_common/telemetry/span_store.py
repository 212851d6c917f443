"""Keeps a process's finished spans, without ever holding up the code that finishes one.

`take` only appends to a queue. A thread of the keeper's own turns what is queued into lines and writes them, batch
after batch. Always true: the queue has a bound, and what finds it full is dropped and counted; a full disk or a
directory that can't be written costs spans and one warning, and never an error of the service.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from tensorhub_common.observability.span_cost import SPAN_CPU
from tensorhub_common.observability.span_lines import TEXT_CHARS_MAX, AnySpan, SpanLines, attribute
from tensorhub_common.protocol.spans import FinishedSpan, SpanLink
from tensorhub_common.telemetry.span_files import SpanFiles

QUEUE_SPANS_MAX: Final = 8_192
"""Limit of finished spans that wait to be written; what comes on top is dropped."""

BATCH_SPANS_MAX: Final = 512
LOOK_EVERY_S: Final = 1.0
"""A finished span is written this much later, or when a question asks for it."""

WRITE_EVERY_S: Final = 5.0
"""Where spans end all the time they are written so seldom: most of what a write costs is its beginning."""

CLOSE_S_MAX: Final = 1.0

_log: Final = logging.getLogger(__name__)


class SpanStore(SpanProcessor):
    """The keeper of one process, from its construction to `shutdown`."""

    def __init__(self, files: SpanFiles, service: str = "", instance: str = "") -> None:
        """Begin to keep spans in these files; records are of this service."""
        self.files = files
        self._lines = SpanLines(service, instance)
        self.dropped = 0
        """How many spans were not kept, for whatever reason."""
        self._queue: deque[AnySpan | ReadableSpan] = deque()
        self._warned = False
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write_always, name="span-keeper", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a finished span that somebody made by OpenTelemetry's own means."""
        self.take(span)

    def take(self, span: AnySpan | ReadableSpan) -> None:
        """Take a finished span: of this process, as a record, or of another one, in the hub's own form."""
        if len(self._queue) >= QUEUE_SPANS_MAX:
            self.dropped += 1
        else:
            self._queue.append(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write what is queued now. Returns whether all of it is in the files."""
        deadline = time.monotonic() + timeout_millis / 1e3
        if not self._writing.acquire(timeout=max(timeout_millis / 1e3, 0)):
            return False
        try:
            with SPAN_CPU.counted():
                while self._queue and time.monotonic() < deadline:
                    if not self._write_batch():
                        break
            return not self._queue
        finally:
            self._writing.release()

    def newest(
        self, about: bytes, wanted: Callable[[FinishedSpan], bool], count_max: int
    ) -> tuple[list[FinishedSpan], int]:
        """Look through the files, and what was still queued; see `SpanFiles.newest`."""
        self.force_flush(round(LOOK_EVERY_S * 1e3))
        return self.files.newest(about, wanted, count_max)

    def shutdown(self) -> None:
        """Write what is left, within a bound, and take no more."""
        self._closed.set()
        self._thread.join(CLOSE_S_MAX)

    def _write_always(self) -> None:
        written_at = -math.inf
        while not self._closed.wait(LOOK_EVERY_S):
            if self._queue and time.monotonic() >= written_at + WRITE_EVERY_S:
                self.force_flush()
                written_at = time.monotonic()
        self.force_flush()

    def _write_batch(self) -> bool:
        """Write some of the queue; False when another process is writing just now, and it should be tried again."""
        batch = [self._queue[index] for index in range(min(len(self._queue), BATCH_SPANS_MAX))]
        lines = self._lines_of(batch)
        try:
            too_long = self.files.append(lines)
        except Exception as why:  # noqa: BLE001 (whatever a disk does, the service goes on)
            too_long = len(lines)
            self._warn(why)
        if too_long is None:
            return False
        self.dropped += too_long + len(batch) - len(lines)
        for _ in batch:
            self._queue.popleft()
        return True

    def _lines_of(self, batch: list[AnySpan | ReadableSpan]) -> list[bytes]:
        """Return the lines of those that can be written: one that holds what is no text costs itself alone."""
        lines = []
        for span in batch:
            try:
                lines.append(self._lines.line(span_of(span) if isinstance(span, ReadableSpan) else span))
            except Exception as why:  # noqa: BLE001 (whatever a span holds, the service and the others go on)
                self._warn(why)
        return lines

    def _warn(self, why: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("finished spans can't be kept in %s, so they are dropped: %s", self.files.directory, why)


def span_of(span: ReadableSpan) -> FinishedSpan:
    """Return a finished span of OpenTelemetry's in the hub's own form."""
    context = span.get_span_context()
    assert context is not None, "a finished span has ids"
    resource = span.resource.attributes
    failed = span.status.status_code is StatusCode.ERROR
    return FinishedSpan(
        trace=format_trace_id(context.trace_id),
        span=format_span_id(context.span_id),
        parent=None if span.parent is None else format_span_id(span.parent.span_id),
        name=span.name[:TEXT_CHARS_MAX],
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error=(span.status.description or "failed")[:TEXT_CHARS_MAX] if failed else None,
        attributes={str(key): attribute(value) for key, value in (span.attributes or {}).items()},
        links=tuple(
            SpanLink(trace=format_trace_id(link.context.trace_id), span=format_span_id(link.context.span_id))
            for link in span.links
        ),
    )
