"""The driver of an agent whose calls are noted, and give spans, as the agent service's `jobs/driver.py` has it."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Final

from tensorhub_agent.core.effects import AnyCall, AnyEffect, AppendCommand, EffectOutcome, RequestLease
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.observability.recorder import CallRecorder
from tensorhub_agent.observability.records import CallRecord
from tensorhub_agent.observability.span_builder import SpanBuilder
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.source import Source
from tensorhub_common.observability.trace_context import TRACEPARENT, SpanRecord, TraceContext
from tensorhub_common.protocol.log.events import AnyEvent, kind_of
from tensorhub_simulator.drivers.agent import OneAgent

NS: Final = 1_000_000_000
BEGAN: Final = 1000 * NS
"""When time begins, in ns since the epoch."""


class NotedAgent(OneAgent):
    """One agent. `caller` is the span of the worker that calls."""

    def __init__(
        self, name: str = "agent-0", caller: TraceContext | None = None, *, beside: OneAgent | None = None
    ) -> None:
        """Begin with nothing noted."""
        super().__init__(name, beside=beside)
        self.caller = caller
        ids = count(1)

        def new_id() -> str:
            return f"{next(ids):016x}"

        self.chronicle = CallRecorder(lambda _: TraceContext(f"{0xF000 + next(ids):032x}", new_id()), new_id)
        self.teller = SpanBuilder("run-7", name, self.core.config.digests, new_id)
        self.headers: dict[str, Mapping[str, str]] = {}
        """Those of the events of each kind."""
        self.causes: dict[str, TraceContext | None] = {}
        """What the last message of the agent's own of each kind names as its cause."""

    @property
    def at(self) -> int:
        """The time, in ns since the epoch."""
        return BEGAN + int(self.now * NS)

    def do(self, effects: Iterable[AnyEffect]) -> list[AnyEffect]:
        """Note what the core wants, and carry it out."""
        done = list(effects)
        for effect in done:
            place = self.chronicle.effect(effect, self._reading_of(effect), self.at)
            word = effect.command if isinstance(effect, AppendCommand) else effect
            self.causes[type(word).__name__] = place
        return super().do(done)

    def _reading_of(self, effect: AnyEffect) -> Source | None:
        if not isinstance(effect, RequestLease):
            return None
        transfer = self.operation(effect.key).transfer
        assert transfer is not None
        return transfer.sources.get(effect.source)

    def called(self, key: ShardKey, call: AnyCall) -> int:
        """Note a call, and take it."""
        self.chronicle.called(key, call, self.caller, self.at)
        return super().called(key, call)

    def read_event(self, event: AnyEvent) -> None:
        """Note an event, and read it."""
        self.chronicle.event(event, self.headers.get(kind_of(event), {}), self.at)
        super().read_event(event)

    def hear(self, news: EffectOutcome) -> list[AnyEffect]:
        """Note what came of an effect, and hear it."""
        self.chronicle.outcome(news, self.at)
        return super().hear(news)

    def later(self, seconds: float) -> None:
        """Let time pass without a look at the clock."""
        self.now += seconds

    def decided_by(self, place: TraceContext | None, **more: str) -> None:
        """Let the log's decision name a span as its cause."""
        self.headers["round.decided"] = {**({TRACEPARENT: place.traceparent} if place else {}), **more}

    def operation(self, key: ShardKey) -> ReadOperation:
        """Return the read under way."""
        found = self.core.shards[key].operation
        assert isinstance(found, ReadOperation)
        return found

    def read_slowly(self, key: ShardKey, text: str = "a") -> None:
        """Plan, lease, read and be ready, a second each."""
        self.later(1.0)
        self.plan(key)
        self.later(1.0)
        self.opened(key, text)
        self.log()
        self.later(1.0)
        self.brought(key, text)
        self.later(1.0)
        self.log()

    def finished(self) -> list[CallRecord]:
        """Return what is noted of all calls that have ended since the last time."""
        told, self.chronicle.finished = self.chronicle.finished, []
        return told

    def spans(self) -> list[SpanRecord]:
        """Return the spans of all calls that have ended since the last time."""
        return [span for note in self.finished() for span in self.teller.spans_of(note)]
