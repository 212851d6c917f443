"""Makes OpenTelemetry's spans of what is over: from records with times and ids, a little after the fact.

A span that is opened and ended by `start_span` takes about 23 µs; one that is made of a record takes 4 µs, can have an
id that was given out before (docs/adr/0004-one-trace-per-version.md), and need not be made at all where nobody but the
hub's own store takes it, which takes records. And nothing here is called while anybody waits: `SpansLater` makes the
spans of finished stories some at a time, between the turns of the event loop.

Always true: with telemetry off (`OTEL_SDK_DISABLED`, or no provider) there is no `SpanMaker`, and who has none notes
nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import getrandbits
from typing import Final, Self
from weakref import WeakSet

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, Tracer
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from tensorhub_common.observability.span_cost import SPANS
from tensorhub_common.observability.trace_context import HEX, SpanRecord, TraceContext
from tensorhub_common.runtime.supervision import Supervisor, handled

NAME: Final = "tensorhub"
"""The name of our tracer."""

TRACE_ID_BITS: Final = 128
SPAN_ID_BITS: Final = 64

SOON_S: Final = 0.5
"""So long after a story's end its spans are made, with those of all that have ended since."""

LATER_S: Final = 2.0
"""Where stories end all the time, their spans are made so seldom: waking up would cost more than the spans. Who asks a
process for its spans gets them all the same (`flush_waiting`)."""

_TURN: Final = "making spans"

TURN_STORIES_MAX: Final = 4
"""In one turn of the event loop the spans of so many stories are made, which takes some tenths of a millisecond."""

STORIES_MAX: Final = 1024
"""So many finished stories wait for their spans; the oldest are dropped."""

Keep = Callable[[SpanRecord], None]

Story = Callable[[], None]
"""Makes the spans of what is over."""


def new_span_id() -> str:
    """Return an id that no other span has."""
    return f"{getrandbits(SPAN_ID_BITS) or 1:016x}"


class SpanMaker:
    """Hands finished spans to the processors of one provider, or to what takes records, or to both."""

    def __init__(self, tracer: Tracer, processor: SpanProcessor | None, keep: Keep | None = None) -> None:
        """Hand spans to `processor`, if there is one, and records to `keep`."""
        self._tracer, self._processor, self._keep = tracer, processor, keep
        self._scope = InstrumentationScope(NAME)

    @classmethod
    def of(cls, provider: trace.TracerProvider) -> Self | None:
        """Make it for all processors of a provider; None where that makes no spans."""
        tracer = provider.get_tracer(NAME)
        return cls(tracer, tracer.span_processor) if isinstance(tracer, Tracer) else None

    @classmethod
    def own(
        cls, provider: trace.TracerProvider, processor: SpanProcessor | None, keep: Keep | None = None
    ) -> Self | None:
        """Make it for a provider of our own, of which we know who takes spans; None where that makes no spans."""
        tracer = provider.get_tracer(NAME)
        return cls(tracer, processor, keep) if isinstance(tracer, Tracer) else None

    def new_trace(self, name: str) -> TraceContext:
        """Give out the place of a root span with this name; the provider's sampler decides about its trace."""
        trace_id = getrandbits(TRACE_ID_BITS) or 1
        decision = self._tracer.sampler.should_sample(None, trace_id, name).decision
        return TraceContext(f"{trace_id:032x}", new_span_id(), decision is Decision.RECORD_AND_SAMPLE)

    def make_all(self, records: Iterable[SpanRecord]) -> None:
        """Make several."""
        for record in records:
            self.make(record)

    def make(self, record: SpanRecord) -> None:
        """Make the span, which is over, and hand it over. Of a trace that is not sampled nobody records anything."""
        if self._keep is not None:
            self._keep(record)
        if self._processor is not None:
            self._processor.on_end(self._readable(record))

    def _readable(self, record: SpanRecord) -> ReadableSpan:
        return ReadableSpan(
            record.name,
            context=_context(record.trace, record.span, is_remote=False),
            parent=None if record.parent is None else _context(record.trace, record.parent, is_remote=True),
            resource=self._tracer.resource,
            attributes=record.attributes,
            links=[Link(_context(link.trace_id, link.span_id, is_remote=True)) for link in record.links],
            instrumentation_scope=self._scope,
            status=_UNSET if record.error is None else Status(StatusCode.ERROR, record.error),
            start_time=record.start_ns,
            end_time=record.end_ns,
        )


_waiting: Final[WeakSet["SpansLater"]] = WeakSet()


def flush_waiting() -> None:
    """Make the spans of all stories of the running event loop that have ended."""
    loop = asyncio.get_running_loop()
    for each in list(_waiting):
        if each.is_of(loop):
            each.flush()


class SpansLater:
    """Finished stories that wait for their spans. It belongs to the event loop that made it."""

    def __init__(self, after_all: Callable[[], None] | None = None) -> None:
        """Begin with none. `after_all` is called when the spans of all stories up to now have been made."""
        self._loop = asyncio.get_running_loop()
        self._work = Supervisor("the spans of finished stories", on_fault=handled)
        self._after_all = after_all
        _waiting.add(self)
        self._stories: deque[Story] = deque(maxlen=STORIES_MAX)
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = -LATER_S

    def add(self, story: Story) -> None:
        """Make the spans of a story a little later."""
        self._stories.append(story)
        if self._timer is None:
            at = max(self._loop.time() + SOON_S, self._told_at + LATER_S)
            self._timer = self._work.call_at(at, self._next_turn, what=_TURN)

    def flush(self) -> None:
        """Make all of them now: the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._stories:
            self._turn()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether it belongs to this event loop."""
        return self._loop is loop

    def _next_turn(self) -> None:
        self._timer = None
        self._turn()
        if self._stories:
            self._timer = self._work.call_later(0, self._next_turn, what=_TURN)
        else:
            self._told_at = self._loop.time()

    def _turn(self) -> None:
        with SPANS.counted():
            for _ in range(min(TURN_STORIES_MAX, len(self._stories))):
                self._tell(self._stories.popleft())
            if self._after_all is not None and not self._stories:
                self._after_all()

    def _tell(self, story: Story) -> None:
        try:
            story()
        except Exception as error:  # noqa: BLE001 (whatever a story or somebody's processor does, the process goes on)
            self._work.fault(_TURN, error)


_UNSET: Final = Status(StatusCode.UNSET)


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, HEX), int(span_id, HEX), is_remote, TraceFlags(TraceFlags.SAMPLED))
