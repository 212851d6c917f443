"""Whose trace a read stands in: that of its version, or one of its own where nothing names that or it is long over."""

import pytest
from tests.unit.agent.core.recorded_agent import VERSION, WORKER, ToldAgent, check_tree, names, one
from tests.unit.agent.core.recorded_reads import ENGINE, decided, read_whole, reader
from tests.unit.span_places import place_at, place_of

from tensorhub_agent.observability.records import ReadRecord
from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TRACEPARENT, TraceContext
from tensorhub_common.protocol.log.events import RoundDecided


@pytest.mark.parametrize("garbage", ["", "nonsense", "00-0-0-00", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "é" * 60])
def test_without_a_readable_cause_a_read_has_a_trace_of_its_own(garbage: str) -> None:
    agent, key = reader()
    agent.headers["round.decided"] = {TRACEPARENT: garbage}
    agent.begin_read(key)
    agent.log()
    own = agent.causes["Want"]
    read_whole(agent, key)
    spans = agent.spans()
    check_tree(spans)
    assert one(spans, "transfer").parent is None
    assert place_of(one(spans, "transfer")) == own


def test_long_after_the_publication_a_read_has_a_trace_of_its_own_and_links_to_it() -> None:
    agent, key = reader()
    agent.begin_read(key, engine=ENGINE)
    own = agent.causes["Want"]
    agent.decided_by(own, **{PUBLISH_HEADER: VERSION.traceparent})
    agent.log()
    read_whole(agent, key)
    whole = one(agent.spans(), "transfer")
    assert (place_of(whole), whole.parent) == (own, None)
    assert whole.links == (VERSION, ENGINE)


def test_another_version_is_another_story() -> None:
    """What was begun of the first one is told by itself, in the trace that others were told of."""
    agent, key, _ = decided()
    agent.later(1.0)
    agent.plan(key)
    note = agent.chronicle._now[key]
    assert isinstance(note, ReadRecord)
    other = place_at(0xEEEE, 0xE1)
    again = RoundDecided(
        model=key.model, replica=key.replica, round=note.round or 0, attempt=2, version=2, roots=("r",), held=()
    )
    agent.chronicle.event(again, {TRACEPARENT: other.traceparent}, agent.at)
    first = agent.spans()
    assert names(first) == ["transfer", "wait", "plan", "lease"]
    check_tree(first, VERSION)
    assert one(first, "transfer").error == "the log decided another version"
    now = agent.chronicle._now[key]
    assert isinstance(now, ReadRecord)
    assert (now.version, now.parent, now.context.trace_id) == (2, other, other.trace_id)
    assert now.context.span_id != note.context.span_id


def test_of_a_trace_that_is_not_sampled_nothing_is_noted_and_others_hear_so() -> None:
    agent, key = reader()
    unsampled = TraceContext(VERSION.trace_id, VERSION.span_id, sampled=False)
    agent.decided_by(unsampled)
    agent.begin_read(key)
    agent.log()
    note = agent.chronicle._now[key]
    assert isinstance(note, ReadRecord)
    assert agent.chronicle.trace_of(note.call.call) is None, "a line would name a trace that nobody keeps"
    read_whole(agent, key)
    assert (note.plans, note.sources) == ([], {})
    assert agent.causes["RequestPlan"] is None
    assert agent.causes["RequestLease"] is None
    answered = agent.causes["CompleteCall"]
    assert answered is not None
    assert (answered.trace_id, answered.sampled) == (VERSION.trace_id, False)
    assert agent.finished() == []


def test_a_publication_that_is_not_sampled_says_so_to_the_log() -> None:
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer")
    agent.begin_publish(key, "a", 1, TraceContext(WORKER.trace_id, WORKER.span_id, sampled=False))
    agent.log()
    ready = agent.causes["Ready"]
    assert ready is not None
    assert not ready.sampled
    assert agent.finished() == []
