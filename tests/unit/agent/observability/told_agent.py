"""An agent whose calls are noted reads what a trainer elsewhere has published, and what its spans say."""

from tests.unit.span_places import place_at

from tensorhub_agent.observability.records import ReadRecord
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.observability.trace_context import SpanRecord, TraceContext
from tensorhub_common.protocol.log.events import RoundDecided
from tensorhub_simulator.drivers.agent import published
from tensorhub_simulator.drivers.noted_agent import NS, NotedAgent

WORKER = place_at(0xAAAA, 0xA1)
"""The publish span of a worker."""
VERSION = place_at(0xBBBB, 0xB1)
"""The publish span of a version that somebody else has published."""
ENGINE = place_at(0xCCCC, 0xC1)
"""The update span of a worker that reads."""


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


def told_trainer() -> tuple[NotedAgent, ShardKey]:
    agent = NotedAgent(caller=WORKER)
    agent.join()
    return agent, agent.register("trainer")


def reader() -> tuple[NotedAgent, ShardKey]:
    """Return the agent of a rollout; a trainer elsewhere has published version 1."""
    trainer, _ = published()
    agent = NotedAgent("agent-1", ENGINE, beside=trainer)
    agent.join()
    key = agent.register("rollout")
    agent.decided_by(VERSION)
    return agent, key


def decided() -> tuple[NotedAgent, ShardKey, int]:
    """Return a read whose version is decided, one second after the call; it waits for a plan."""
    agent, key = reader()
    call = agent.read(key)
    agent.later(1.0)
    agent.log()
    return agent, key, call


def note_of(agent: NotedAgent, key: ShardKey) -> ReadRecord:
    """Return what is noted of the read under way."""
    found = agent.chronicle._now[key]
    assert isinstance(found, ReadRecord)
    return found


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
