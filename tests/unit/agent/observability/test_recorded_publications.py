"""The stories of publications: which spans they give, whose trace they stand in, and what they say."""

import pytest
from tests.unit.agent.core.recorded_agent import BEGAN, NS, VERSION, WORKER, ToldAgent, check_tree, names, one
from tests.unit.span_places import place_at

from tensorhub_agent.observability.recorder import WISHES_MAX
from tensorhub_common.observability.trace_context import TRACEPARENT, TraceContext
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.log.events import PublishWished

CLIENT = place_at(0xDDDD, 0xD1)


def test_a_publication_stands_below_its_workers_span() -> None:
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer")
    agent.begin_publish(key, "a", 7)
    assert agent.causes["Ready"] == WORKER, "the log's word on it belongs to the publication"
    agent.later(1.0)
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["publish.agent", "digest", "log"]
    check_tree(spans, WORKER)
    whole = one(spans, "publish.agent")
    assert whole.attributes["tensorhub.version"] == 7
    assert (whole.trace, whole.parent, whole.error) == (WORKER.trace_id, WORKER.span_id, None)
    assert one(spans, "log").end_ns == BEGAN + NS
    assert agent.causes["CompleteCall"] == WORKER, "the worker learns where its version was published"


def test_without_a_workers_span_the_agent_makes_the_publish_span() -> None:
    agent = ToldAgent()
    agent.join()
    agent.begin_publish(agent.register("trainer"), "a", 7, cause=None)
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["publish", "publish.agent", "digest", "log"]
    check_tree(spans)
    assert one(spans, "publish").parent is None
    assert agent.causes["CompleteCall"] is None


def test_the_shards_of_one_publication_stand_in_one_trace() -> None:
    """It is the trace of the shard whose word was the last; the others' publish spans are below that one's."""
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer", 0, 2)
    agent.register("trainer", 1, 2)
    agent.siblings_checked()
    agent.begin_publish(key, "a", 7)
    agent.log()
    agent.headers["version.published"] = {TRACEPARENT: VERSION.traceparent}
    agent.begin_publish(agent.key("trainer", 1), "b", 7, cause=VERSION)
    agent.log()
    first, last = agent.finished()
    spans = [span for note in (first, last) for span in agent.teller.spans_of(note)]
    assert [(span.trace, span.parent) for span in spans if span.name == "publish.agent"] == [
        (VERSION.trace_id, WORKER.span_id),
        (VERSION.trace_id, VERSION.span_id),
    ]
    assert agent.causes["CompleteCall"] == VERSION
    check_tree(spans, WORKER, VERSION)


def test_a_refused_publication_says_why() -> None:
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer")
    agent.begin_publish(key, "a", 7)
    agent.log()
    agent.spans()
    agent.begin_publish(key, "b", 8)
    (span,) = agent.spans()
    assert span.error is not None
    assert span.error.startswith("VersionConflict: ")
    assert "unpublish 7 first" in span.error


@pytest.mark.parametrize("cause", [CLIENT, None])
def test_a_wish_from_outside_stands_below_its_clients_span(cause: TraceContext | None) -> None:
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer")
    if cause is not None:
        agent.headers["publish.wished"] = {"Traceparent": cause.traceparent}
    agent.take(Publish(model=key.model, replica=key.replica, version=3))
    agent.publish(key, "a", 3)  # The digest that the wish asked for; the call beside it is refused.
    agent.log()
    spans = [span for span in agent.spans() if span.error is None]
    assert names(spans) == ["publish", "publish.agent", "digest", "log"]
    publish = one(spans, "publish")
    assert publish.parent == (None if cause is None else cause.span_id)
    assert cause is None or publish.trace == cause.trace_id
    assert one(spans, "publish").attributes["tensorhub.version"] == 3
    check_tree(spans, CLIENT)


def test_wishes_that_come_to_nothing_are_forgotten() -> None:
    agent = ToldAgent()
    for number in range(WISHES_MAX + 1):
        wished = PublishWished(model="policy", replica=f"r{number}", version=1, shards=1)
        agent.chronicle.event(wished, {}, 0)
    assert len(agent.chronicle._wishes) == WISHES_MAX
