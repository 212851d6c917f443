"""One agent whose calls a chronicle notes, as `jobs/driver.py` has it noted."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Final

from tests.unit.agent.core.scene import SESSION, OneAgent
from tests.unit.span_places import place_at

from tensorhub_agent.core.effects import AnyEffect, AppendCommand, CallPublish, CallRead, EffectOutcome, RequestLease
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.observability.recorder import CallRecorder
from tensorhub_agent.observability.records import CallRecord
from tensorhub_agent.observability.span_builder import SpanBuilder
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.observability.trace_context import TRACEPARENT, SpanRecord, TraceContext
from tensorhub_common.protocol.log.commands import VersionRequest
from tensorhub_common.protocol.log.events import AnyEvent, kind_of

NS: Final = 1_000_000_000
BEGAN: Final = 1000 * NS
WORKER = place_at(0xAAAA, 0xA1)
"""The publish span of a worker."""
VERSION = place_at(0xBBBB, 0xB1)
"""The publish span of a version that somebody else has published."""


class ToldAgent(OneAgent):
    """`headers` are those of the events of each kind; `causes` is what the agent's own messages name."""

    def __init__(self, name: str = "agent-0", *, digests: bool = True, catalog: Catalog | None = None) -> None:
        super().__init__(name, digests=digests, catalog=catalog)
        ids = count(1)
        self.chronicle = CallRecorder(lambda _: place_at(0xF000 + next(ids), next(ids)), lambda: f"{next(ids):016x}")
        self.teller = SpanBuilder("run-7", name, digests, lambda: f"{next(ids):016x}")
        self.headers: dict[str, Mapping[str, str]] = {}
        self.causes: dict[str, TraceContext | None] = {}
        self.core = _Noted(self)  # type: ignore[assignment]  # It stands in for the core that it wraps.

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
        operation = self.core.shards[effect.key].operation
        assert isinstance(operation, ReadOperation)
        assert operation.transfer is not None
        return operation.transfer.sources.get(effect.source)

    def begin_publish(self, key: ShardKey, text: str, version: int, cause: TraceContext | None = WORKER) -> int:
        """Publish as a worker does that has a span of its own."""
        call = CallPublish(call=self.calls + 1, session=SESSION, deadline=self.now + 10.0, version=version)
        self.chronicle.called(key, call, cause, self.at)
        return self.publish(key, text, version)

    def begin_read(
        self, key: ShardKey, want: VersionRequest = "latest", engine: TraceContext | None = None, patience: float = 1e9
    ) -> int:
        """Read as a worker does."""
        call = CallRead(call=self.calls + 1, session=SESSION, deadline=self.now + 10.0, want=want, patience=patience)
        self.chronicle.called(key, call, engine, self.at)
        return self.read(key, want, patience)

    def hear(self, news: EffectOutcome) -> None:
        """Tell it what came of an effect."""
        self.do(self.core.on_outcome(news, self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds

    def decided_by(self, place: TraceContext | None, **more: str) -> None:
        """Let the log's decision name a span as its cause."""
        self.headers["round.decided"] = {**({TRACEPARENT: place.traceparent} if place else {}), **more}

    def finished(self) -> list[CallRecord]:
        told, self.chronicle.finished = self.chronicle.finished, []
        return told

    def spans(self) -> list[SpanRecord]:
        """Return the spans of all calls that have ended since the last time."""
        return [span for note in self.finished() for span in self.teller.spans_of(note)]


class _Noted:
    """A core that the chronicle hears before."""

    def __init__(self, agent: ToldAgent) -> None:
        self._agent, self._core = agent, agent.core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def on_event(self, event: AnyEvent, now: float) -> list[AnyEffect]:
        self._agent.chronicle.event(event, self._agent.headers.get(kind_of(event), {}), self._agent.at)
        return self._core.on_event(event, now)

    def on_outcome(self, news: Any, now: float) -> list[AnyEffect]:
        self._agent.chronicle.outcome(news, self._agent.at)
        return self._core.on_outcome(news, now)


def names(spans: list[SpanRecord]) -> list[str]:
    return [span.name for span in spans]


def one(spans: list[SpanRecord], name: str) -> SpanRecord:
    (found,) = (span for span in spans if span.name == name)
    return found


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
