"""Records of an agent's calls, of which spans are made when the calls are over. Pure.

The recorder sees the effects and the outcomes that the cores see, and notes when they came. It gives out beforehand the
contexts of the spans that messages name as their cause. A read's context moves into the trace of the version when the
log has decided it; span ids stay, so what others were told before is right up to its trace
(docs/design/adr/0004-one-trace-per-version.md).

Always true: nothing here is asked for each piece; a call that has ended is in `finished` once and nowhere else, unless
its trace is not sampled: then nothing is noted of it but its context, which says so to others.
"""

from collections.abc import Callable, Mapping
from typing import Final

from tensorhub_agent.core.effects import (
    AnyCall,
    AnyEffect,
    AppendCommand,
    BatchDone,
    CallPublish,
    CallRead,
    CompleteCall,
    Digested,
    DigestMemory,
    EffectOutcome,
    FailCall,
    PlanReceived,
    RequestLease,
    RequestPlan,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.observability.records import CallRecord, PlanRecord, PublishRecord, ReadRecord, SourceRecord
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.source import Source
from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TraceContext, context_in
from tensorhub_common.protocol.log.commands import Filled, Ready, ShardCommand, Want
from tensorhub_common.protocol.log.events import (
    AnyEvent,
    CommandRejected,
    PublishFailed,
    PublishWished,
    PublishWithdrawn,
    ReplicaReady,
    RoundDecided,
    RoundEvent,
    RoundJoined,
    RoundReopened,
    RoundStarted,
    VersionPublished,
)

PLANS_NOTED_MAX: Final = 16
SOURCES_NOTED_MAX: Final = 64
"""Of one read at most this many requests for a plan and this many sources are recorded; the rest only counts."""

WISHES_MAX: Final = 256
"""At most this many publications wished from outside may wait for the digest with which they begin."""

NOTED: Final = frozenset({AppendCommand, CompleteCall, FailCall, DigestMemory, RequestPlan, RequestLease})
"""The effects that are noted; of the others, which are the many, the time need not be taken."""

NOTED_EVENTS: Final = (
    RoundEvent,
    PublishWished,
    VersionPublished,
    ReplicaReady,
    PublishFailed,
    PublishWithdrawn,
    CommandRejected,
)

GIVEN_UP: Final = "given up"


class CallRecorder:
    """The stories of one agent in one job. `new_trace` and `new_span` give out ids, which come from outside."""

    def __init__(self, new_trace: Callable[[str], TraceContext], new_span: Callable[[], str]) -> None:
        """Begin with no story."""
        self._new_trace, self._new_span = new_trace, new_span
        self._calls: dict[int, CallRecord] = {}
        self._now: dict[ShardKey, CallRecord] = {}
        """The note of the call that is under way on each shard."""
        self._wishes: dict[tuple[str, str], tuple[TraceContext | None, int]] = {}
        self.finished: list[CallRecord] = []

    # What the driver tells.

    def called(self, key: ShardKey, call: AnyCall, cause: TraceContext | None, at: int) -> None:
        """A worker calls. `cause` is its publish span, or what was active in an engine that reads."""
        note: CallRecord
        if isinstance(call, CallRead):
            context = self._new_trace("transfer")
            note = ReadRecord(key, call, context, at, cause, context.beside(self._new_span()))
        elif isinstance(call, CallPublish):
            note = PublishRecord(key, call, cause or self._new_trace("publish"), at, is_ours=cause is None)
        else:
            return
        self._calls[call.call] = note
        self._now.setdefault(key, note)

    def effect(self, effect: AnyEffect, reading: Source | None, at: int) -> TraceContext | None:
        """Note an effect that is about to be carried out; returns the context that its message names as its cause."""
        match effect:
            case AppendCommand(command=ShardCommand() as command):
                return self._said(command, at)
            case CompleteCall():
                return self._ended(effect.call, effect, at)
            case FailCall():
                return self._ended(effect.call, effect, at)
            case DigestMemory():
                self._digest(effect.key, at)
            case RequestPlan():
                return self._asked_plan(effect, at)
            case RequestLease():
                return self._opening(effect, reading, at)
            case _:
                pass
        return None

    def outcome(self, outcome: EffectOutcome, at: int) -> None:
        """Note what came of an effect."""
        note = self._now.get(outcome.key)
        if note is None or not note.context.sampled:
            return
        if isinstance(note, PublishRecord):
            if isinstance(outcome, Digested):
                note.digested = at
        else:
            self._read_outcome(note, outcome, at)

    def event(self, event: AnyEvent, headers: Mapping[str, str], at: int) -> None:
        """Note an event of the log before the core takes it. `headers` are those of its message."""
        if isinstance(event, RoundEvent):
            for read in self._reads(event.model, event.replica):
                self._round(read, event, headers, at)
        elif isinstance(event, PublishWished):
            while len(self._wishes) >= WISHES_MAX:
                del self._wishes[next(iter(self._wishes))]
            self._wishes[event.model, event.replica] = (context_in(headers), at)
        elif isinstance(event, VersionPublished | ReplicaReady | PublishFailed):
            for publication in self._publications(event.model, event.replica):
                self._publish_event(publication, event, headers, at)
        elif isinstance(event, PublishWithdrawn | CommandRejected) and event.by is not None:
            error = event.error if isinstance(event, CommandRejected) else GIVEN_UP
            for note in list(self._now.values()):
                if isinstance(note, PublishRecord) and event.by == note.said_by:
                    self._wish_ended(note, None, error, at)

    def trace_of(self, call: int) -> str | None:
        """Return the trace of a call that is under way, if its spans are kept."""
        note = self._calls.get(call)
        return None if note is None or not note.context.sampled else note.context.trace_id

    # Publications.

    def _digest(self, key: ShardKey, at: int) -> None:
        note = self._now.get(key)
        if isinstance(note, PublishRecord) and (note.call is not None or not note.digested_from):
            note.digested_from = at
            return
        if isinstance(note, PublishRecord):
            self._finish(note, GIVEN_UP, at)
        cause, wished = self._wishes.pop((key.model, key.replica), (None, at))
        # The span of the program that wished is the parent of the publish span, which no worker makes.
        context = self._new_trace("publish") if cause is None else cause.beside(self._new_span())
        note = PublishRecord(key, None, context, wished, is_ours=True, parent=cause, digested_from=at)
        self._now[key] = note

    def _publish_event(
        self,
        note: PublishRecord,
        event: VersionPublished | ReplicaReady | PublishFailed,
        headers: Mapping[str, str],
        at: int,
    ) -> None:
        if isinstance(event, VersionPublished):
            self._published(note, context_in(headers))
        elif isinstance(event, PublishFailed):
            self._wish_ended(note, None, event.error, at)
        elif event.round is None:
            self._wish_ended(note, event.version, None, at)

    def _published(self, note: PublishRecord, version: TraceContext | None) -> None:
        """The version stands in the trace of the shard whose word was the last; the others move there."""
        if note.said and version is not None and version.trace_id != note.context.trace_id:
            note.context = version.beside(note.context.span_id)
            note.parent = version

    def _wish_ended(self, note: PublishRecord, version: int | None, error: str | None, at: int) -> None:
        if note.call is None and note.said:
            note.version = version
            self._finish(note, error, at)

    # Reads.

    def _round(self, note: ReadRecord, event: RoundEvent, headers: Mapping[str, str], at: int) -> None:
        if isinstance(event, RoundJoined) and event.by is not None and event.by == note.said_by:
            note.round = event.round
        elif event.round != note.round:
            return
        elif isinstance(event, RoundStarted):
            note.started = note.started or at
        elif isinstance(event, RoundDecided):
            self._decided(note, event, headers, at)
        elif isinstance(event, RoundReopened) and note.version is not None:
            # What it waits for from now on is another publication.
            self._anew(note, f"version {event.version} went before it was read", at)

    def _decided(self, note: ReadRecord, event: RoundDecided, headers: Mapping[str, str], at: int) -> None:
        """Move the read into the trace that the log names: the version's, or that of a round long after it."""
        note.attempts = event.attempt
        if note.version == event.version:
            return
        if note.version is not None:
            note = self._anew(note, "the log decided another version", at)
        note.version, note.decided = event.version, at
        note.published = context_in(headers, PUBLISH_HEADER)
        cause = context_in(headers)
        if cause is not None and cause.span_id != note.context.span_id:
            note.context, note.parent = cause.beside(note.context.span_id), cause

    def _anew(self, old: ReadRecord, why: str, at: int) -> ReadRecord:
        """The version that was decided is not read: what was begun is a story of its own, and the call's goes on."""
        context = self._new_trace("transfer")
        wait = context.beside(self._new_span())
        new = ReadRecord(old.key, old.call, context, at, old.engine, wait, said_by=old.said_by, round=old.round)
        old.ended, old.error = at, why
        if old.context.sampled:
            self.finished.append(old)
        self._calls[old.call.call] = self._now[old.key] = new
        return new

    def _asked_plan(self, effect: RequestPlan, at: int) -> TraceContext | None:
        note = self._now.get(effect.key)
        if not isinstance(note, ReadRecord) or not note.context.sampled or len(note.plans) >= PLANS_NOTED_MAX:
            return None
        plan = PlanRecord(note.context.beside(self._new_span()), effect.number, at)
        note.plans.append(plan)
        return plan.context

    def _opening(self, effect: RequestLease, reading: Source | None, at: int) -> TraceContext | None:
        note = self._now.get(effect.key)
        if not isinstance(note, ReadRecord) or not note.context.sampled or len(note.sources) >= SOURCES_NOTED_MAX:
            return None
        lease, read = note.context.beside(self._new_span()), note.context.beside(self._new_span())
        note.sources[effect.source] = SourceRecord(
            effect.share, reading, lease, read, at, None if effect.base is None else effect.base.version
        )
        return lease

    def _read_outcome(self, note: ReadRecord, outcome: EffectOutcome, at: int) -> None:
        if isinstance(outcome, PlanReceived):
            for plan in note.plans:
                if plan.number == outcome.number:
                    plan.came, plan.answer = at, outcome.answer
            return
        number = getattr(outcome, "source", None)
        source = None if number is None else note.sources.get(number)
        if source is None:
            return
        match outcome:
            case BatchDone():
                source.last = at
            case SourceOpened():
                source.opened = at
            case SourceLost():
                source.over, source.lost = source.over or at, outcome.reason
            case SourceClosed():
                source.over = source.over or at

    # What calls say, and how they end.

    def _said(self, command: ShardCommand, at: int) -> TraceContext | None:
        note = self._now.get(ShardKey(command.model, command.replica, command.shard))
        if note is None:
            return None
        if isinstance(command, Want | Ready):
            note.said_by = command.by
        if isinstance(note, PublishRecord) and isinstance(command, Ready):
            note.said, note.root = at, command.root
        elif isinstance(note, ReadRecord) and isinstance(command, Filled):
            note.filled = at
        return note.context

    def _ended(self, call: int, effect: CompleteCall | FailCall, at: int) -> TraceContext | None:
        """A call is answered. Who waits for it learns where its version was published, or how its read went.

        An update that is put off has failed, though its worker goes on; one that found nothing newer has not.
        """
        note = self._calls.get(call)
        if note is None:
            return None
        if isinstance(note, PublishRecord):
            note.version = effect.version if isinstance(effect, CompleteCall) else None
        elif effect.report is not None and isinstance(effect, CompleteCall):
            note.nbytes, note.kept = effect.report.nbytes, effect.report.kept
        self._finish(note, _failure(effect), at)
        if isinstance(note, PublishRecord):
            return None if note.is_ours else (note.parent or note.context)
        if note.version is not None:
            return note.context
        return None if note.error is None else note.wait

    def _finish(self, note: CallRecord, error: str | None, at: int) -> None:
        note.ended, note.error = at, error
        if note.call is not None:
            self._calls.pop(note.call.call, None)
        if self._now.get(note.key) is note:
            del self._now[note.key]
            waiting = next((each for each in self._calls.values() if each.key == note.key), None)
            if waiting is not None:
                self._now[note.key] = waiting
        if note.context.sampled:
            self.finished.append(note)

    def _reads(self, model: str, replica: str) -> list[ReadRecord]:
        return [note for note in self._notes_of(model, replica) if isinstance(note, ReadRecord)]

    def _publications(self, model: str, replica: str) -> list[PublishRecord]:
        return [note for note in self._notes_of(model, replica) if isinstance(note, PublishRecord)]

    def _notes_of(self, model: str, replica: str) -> list[CallRecord]:
        return [note for key, note in self._now.items() if (key.model, key.replica) == (model, replica)]


def _failure(effect: CompleteCall | FailCall) -> str | None:
    if isinstance(effect, FailCall):
        return f"{effect.error}: {effect.message}"
    return None if effect.report is None else effect.report.failure or None
