"""One agent whose calls are noted as `jobs/driver.py` has them noted; it reads what a trainer elsewhere publishes."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Final

from tests.unit.span_places import place_at

from tensorhub_agent.core.effects import AnyCall, AnyEffect, AppendCommand, EffectOutcome, RequestLease
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.observability.recorder import CallRecorder
from tensorhub_agent.observability.records import CallRecord, ReadRecord
from tensorhub_agent.observability.span_builder import SpanBuilder
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.observability.trace_context import TRACEPARENT, SpanRecord, TraceContext
from tensorhub_common.protocol.log.events import AnyEvent, RoundDecided, kind_of
from tensorhub_simulator.drivers.agent import OneAgent, published

NS: Final = 1_000_000_000
BEGAN: Final = 1000 * NS
WORKER = place_at(0xAAAA, 0xA1)
"""The publish span of a worker."""
VERSION = place_at(0xBBBB, 0xB1)
"""The publish span of a version that somebody else has published."""
ENGINE = place_at(0xCCCC, 0xC1)
"""The update span of a worker that reads."""


class ToldAgent(OneAgent):
    """`headers` are those of the events of each kind; `causes` is what the agent's own messages name.

    `caller` is the span of the worker that calls.
    """

    def __init__(
        self, name: str = "agent-0", caller: TraceContext | None = None, *, beside: OneAgent | None = None
    ) -> None:
        super().__init__(name, beside=beside)
        self.caller = caller
        ids = count(1)
        self.chronicle = CallRecorder(lambda _: place_at(0xF000 + next(ids), next(ids)), lambda: f"{next(ids):016x}")
        self.teller = SpanBuilder("run-7", name, self.core.config.digests, lambda: f"{next(ids):016x}")
        self.headers: dict[str, Mapping[str, str]] = {}
        self.causes: dict[str, TraceContext | None] = {}

    @property
    def at(self) -> int:
        return BEGAN + int(self.now * NS)

    def do(self, effects: Iterable[AnyEffect]) -> list[AnyEffect]:
        done = list(effects)
        for effect in done:
            place = self.chronicle.effect(effect, self._reading_of(effect), self.at)
            word = effect.command if isinstance(effect, AppendCommand) else effect
            self.causes[type(word).__name__] = place
        return super().do(done)

    def _reading_of(self, effect: AnyEffect) -> Any:
        if not isinstance(effect, RequestLease):
            return None
        transfer = self.operation(effect.key).transfer
        assert transfer is not None
        return transfer.sources.get(effect.source)

    def called(self, key: ShardKey, call: AnyCall) -> int:
        self.chronicle.called(key, call, self.caller, self.at)
        return super().called(key, call)

    def read_event(self, event: AnyEvent) -> None:
        self.chronicle.event(event, self.headers.get(kind_of(event), {}), self.at)
        super().read_event(event)

    def hear(self, news: EffectOutcome) -> list[AnyEffect]:
        self.chronicle.news(news, self.at)
        return super().hear(news)

    def later(self, seconds: float) -> None:
        self.now += seconds

    def decided_by(self, place: TraceContext | None, **more: str) -> None:
        """Let the log's decision name a span as its cause."""
        self.headers["round.decided"] = {**({TRACEPARENT: place.traceparent} if place else {}), **more}

    def finished(self) -> list[CallRecord]:
        told, self.chronicle.finished = self.chronicle.finished, []
        return told

    def note(self, key: ShardKey) -> ReadRecord:
        """Return what is noted of the read under way."""
        found = self.chronicle._now[key]
        assert isinstance(found, ReadRecord)
        return found

    def operation(self, key: ShardKey) -> ReadOperation:
        found = self.core.shards[key].operation
        assert isinstance(found, ReadOperation)
        return found

    def spans(self) -> list[SpanRecord]:
        """Return the spans of all calls that have ended since the last time."""
        return [span for note in self.finished() for span in self.teller.spans_of(note)]


def names(spans: list[SpanRecord]) -> list[str]:
    return [span.name for span in spans]


def one(spans: list[SpanRecord], name: str) -> SpanRecord:
    (found,) = (span for span in spans if span.name == name)
    return found


def said_of(span: SpanRecord, *names: str) -> tuple[object, ...]:
    """Return what a span says of these."""
    return tuple(span.attributes.get(f"tensorhub.{name}") for name in names)


def seconds(span: SpanRecord) -> float:
    return (span.end_ns - span.start_ns) / NS


def told_trainer() -> tuple[ToldAgent, ShardKey]:
    agent = ToldAgent(caller=WORKER)
    agent.join()
    return agent, agent.register("trainer")


def reader() -> tuple[ToldAgent, ShardKey]:
    """Return the agent of a rollout; a trainer elsewhere has published version 1."""
    trainer, _ = published()
    agent = ToldAgent("agent-1", ENGINE, beside=trainer)
    agent.join()
    key = agent.register("rollout")
    agent.decided_by(VERSION)
    return agent, key


def decided() -> tuple[ToldAgent, ShardKey, int]:
    """Return a read whose version is decided, one second after the call; it waits for a plan."""
    agent, key = reader()
    call = agent.read(key)
    agent.later(1.0)
    agent.log()
    return agent, key, call


def read_whole(agent: ToldAgent, key: ShardKey, text: str = "a") -> None:
    """Plan, lease, read and be ready, a second each."""
    agent.later(1.0)
    agent.plan(key)
    agent.later(1.0)
    agent.opened(key, text)
    agent.log()
    agent.later(1.0)
    agent.brought(key, text)
    agent.later(1.0)
    agent.log()


def decided_again(key: ShardKey, note: ReadRecord, version: int, root: str | None) -> RoundDecided:
    """Return another decision of the log on the round of a read."""
    return RoundDecided(
        model=key.model, replica=key.replica, round=note.round or 0, attempt=2, version=version, roots=(root,), held=()
    )


def check_tree(spans: list[SpanRecord], *outside: TraceContext) -> None:
    """Raise unless all stand in one trace, each within the time of one that is there, or below one of those outside."""
    waits = [span for span in spans if span.name == "wait"]
    spans = [span for span in spans if span.name != "wait"]
    for wait in waits:
        transfers = {TraceContext(span.trace, span.span): span for span in spans if span.name == "transfer"}
        assert wait.parent is None, "what is waited for is published later"
        (whole,) = [transfers[link] for link in wait.links if link in transfers]
        assert wait.end_ns == whole.start_ns, "the transfer begins where the wait for it ends"
    ids = {span.span: span for span in spans}
    assert len(ids) == len(spans), "two spans have one id"
    assert len({span.trace for span in spans}) == 1
    for span in spans:
        assert span.start_ns <= span.end_ns, span.name
        if span.parent is None:
            continue
        above = ids.get(span.parent)
        if above is None:
            assert span.parent in {place.span_id for place in outside}, f"nothing is above {span.name}"
        else:
            assert above.start_ns <= span.start_ns, f"{span.name} begins before {above.name}"
            assert span.end_ns <= above.end_ns, f"{span.name} ends after {above.name}"
