"""Makes OpenTelemetry's spans of what is over: from records with times and ids, a little after the fact.

A span that is opened and ended by `start_span` takes about 23 µs; one that is made of a record takes 4 µs, can have an
id that was given out before (docs/design/adr/0004-one-trace-per-version.md), and need not be made at all where only the
hub's own store takes it, which takes records. Nothing here is called while a caller waits: `SpansLater` makes the
spans of finished stories some at a time, between the turns of the event loop.

Always true: with telemetry off (`OTEL_SDK_DISABLED`, or no provider) there is no `SpanMaker`, and who has none notes
nothing.
"""

from collections.abc import Callable, Iterable
from typing import Final, Self

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, Tracer
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from tensorhub_common.observability.deferred_spans import new_span_id, random_bits
from tensorhub_common.observability.trace_context import HEX, SpanRecord, TraceContext

NAME: Final = "tensorhub"
"""The name of our tracer."""

TRACE_ID_BITS: Final = 128


Keep = Callable[[SpanRecord], None]


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
        trace_id = random_bits(TRACE_ID_BITS) or 1
        decision = self._tracer.sampler.should_sample(None, trace_id, name).decision
        return TraceContext(f"{trace_id:032x}", new_span_id(), decision is Decision.RECORD_AND_SAMPLE)

    def make_all(self, records: Iterable[SpanRecord]) -> None:
        """Make several."""
        for record in records:
            self.make(record)

    def make(self, record: SpanRecord) -> None:
        """Make the span, which is over, and hand it over. Nothing of a trace that is not sampled is recorded."""
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


_UNSET: Final = Status(StatusCode.UNSET)


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, HEX), int(span_id, HEX), is_remote, TraceFlags(TraceFlags.SAMPLED))
