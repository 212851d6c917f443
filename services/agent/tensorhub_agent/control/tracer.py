"""Drives a `CallRecorder`: takes the time, hands out headers, and has spans made of the stories that are over.

With telemetry off there is no chronicle: nothing is noted, and messages carry no trace.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from tensorhub_agent.core.effects import AnyCall, AnyEffect, EffectOutcome, RequestLease
from tensorhub_agent.core.operations.read import read_of
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.observability.recorder import NOTED, NOTED_EVENTS, CallRecorder
from tensorhub_agent.observability.records import CallRecord
from tensorhub_agent.observability.span_builder import SpanBuilder
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.source import Source
from tensorhub_common.observability.deferred_spans import DeferredSpans, new_span_id
from tensorhub_common.observability.trace_context import TraceContext, context_in, finished_span, parse_traceparent
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.telemetry.span_maker import SpanMaker

NO_HEADERS: Final[Mapping[str, str]] = {}


class Tracer:
    """The traces of one agent in one job."""

    def __init__(self, job: str, agent: str, *, digests: bool, maker: SpanMaker | None) -> None:
        """Begin; without a maker of spans nothing is ever noted."""
        self._job, self._agent, self._maker = job, agent, maker
        self._chronicle = None if maker is None else CallRecorder(maker.new_trace, new_span_id)
        self._later = None if maker is None else DeferredSpans()
        self._teller = SpanBuilder(job, agent, digests, new_span_id)

    def called(self, key: ShardKey, call: AnyCall, traceparent: str | None) -> None:
        """Note a worker's call before the core takes it."""
        if self._chronicle is not None:
            self._chronicle.called(key, call, parse_traceparent(traceparent), time.time_ns())

    def effect(self, effect: AnyEffect, shards: Mapping[ShardKey, ShardCore]) -> TraceContext | None:
        """Note an effect that is about to be carried out; returns what its message names as its cause."""
        chronicle = self._chronicle
        if chronicle is None or type(effect) not in NOTED:
            return None
        reading = _reading_of(effect, shards) if isinstance(effect, RequestLease) else None
        context = chronicle.effect(effect, reading, time.time_ns())
        if chronicle.finished:
            self._finished(chronicle)
        return context

    def outcome(self, outcome: EffectOutcome) -> None:
        """Note what came of an effect before the core takes it."""
        if self._chronicle is not None:
            self._chronicle.outcome(outcome, time.time_ns())

    def event(self, event: AnyEvent, headers: Mapping[str, str]) -> None:
        """Note an event of the log before the core takes it."""
        chronicle = self._chronicle
        if chronicle is not None and isinstance(event, NOTED_EVENTS):
            chronicle.event(event, headers, time.time_ns())
            if chronicle.finished:
                self._finished(chronicle)

    def trace_of(self, call: int) -> str | None:
        """Return the id of the trace that a call under way belongs to; None with telemetry off."""
        return None if self._chronicle is None else self._chronicle.trace_of(call)

    def _finished(self, chronicle: CallRecorder) -> None:
        finished, chronicle.finished = chronicle.finished, []
        assert self._later is not None
        for note in finished:
            self._later.add(partial(self._tell, note))

    def _tell(self, note: CallRecord) -> None:
        assert self._maker is not None
        self._maker.make_all(self._teller.spans_of(note))

    def lease_asked(self, ask: LeaseRequest, answer: LeaseAnswer, headers: Mapping[str, str], began_ns: int) -> None:
        """Tell that a reader's agent asked this one for a lease, if it said what for."""
        if self._later is not None and headers:
            # The headers are read later too.
            self._later.add(partial(self._tell_lease, ask, answer, headers, (began_ns, time.time_ns())))

    def _tell_lease(
        self, ask: LeaseRequest, answer: LeaseAnswer, headers: Mapping[str, str], times_ns: tuple[int, int]
    ) -> None:
        cause = context_in(headers)
        if cause is None or not cause.sampled or self._maker is None:
            return
        record = finished_span(
            "lease.grant",
            cause.beside(new_span_id()),
            cause,
            times_ns,
            {
                "tensorhub.job": self._job,
                "tensorhub.model": ask.model,
                "tensorhub.version": ask.version,
                "tensorhub.agent": self._agent,
                "tensorhub.replica": ask.source.replica,
                "tensorhub.shard": ask.source.shard,
                "tensorhub.reader.agent": ask.reader.agent,
                "tensorhub.reader.replica": ask.reader.replica,
                "tensorhub.reader.shard": ask.reader.shard,
            },
            error=answer.reason if isinstance(answer, LeaseRefusal) else None,
        )
        self._maker.make(record)

    def close(self) -> None:
        """Make what is left: the process ends."""
        if self._later is not None:
            self._later.flush()


def _reading_of(effect: RequestLease, shards: Mapping[ShardKey, ShardCore]) -> Source | None:
    """Return the read's own account of a source, whose figures the story takes at its end."""
    read = read_of(shards.get(effect.key))
    return None if read is None else read.source(effect.source)
