"""The stories of an agent's calls: which spans they give, where those stand, and what they say."""

import pytest
from tests.unit.agent.one_agent import digests_of
from tests.unit.agent.told_agent import BEGAN, NS, VERSION, WORKER, ToldAgent, check_tree, names, one

from tensorhub_agent.chronicle import SOURCES_NOTED_MAX, WISHES_MAX
from tensorhub_agent.effects import (
    AskPlan,
    BatchDone,
    Confirmed,
    Key,
    OpenSource,
    PlanCame,
    Post,
    ShardNews,
    SiblingsChecked,
    SourceClosed,
    SourceLost,
)
from tensorhub_agent.notes import ReadNote
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.tracecontext import PUBLISH, TRACEPARENT, TraceContext
from tensorhub_common.wire.commands import Publish
from tensorhub_common.wire.events import PublishWished, RoundDecided
from tensorhub_common.wire.transfer import Plan, Refusal, Share, SourceId

ENGINE = TraceContext(0xCCCC, 0xC1)
CLIENT = TraceContext(0xDDDD, 0xD1)


def published(text: str = "a") -> Catalog:
    """A catalog in which a trainer elsewhere has published version 1."""
    trainer = ToldAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), text)
    trainer.log()
    return trainer.catalog


def reader() -> tuple[ToldAgent, Key]:
    agent = ToldAgent("agent-1", catalog=published())
    agent.join()
    key = agent.register("rollout")
    agent.decided_by(VERSION)
    return agent, key


def decided() -> tuple[ToldAgent, Key, int]:
    """A read whose version is decided, one second after the call; it waits for a plan."""
    agent, key = reader()
    call = agent.begin_read(key, engine=ENGINE)
    agent.later(1.0)
    agent.log()
    return agent, key, call


def read_whole(agent: ToldAgent, key: Key, text: str = "a") -> None:
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


# ------------------------------------------------------------------------------------------------------ publications


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
    assert (whole.parent, whole.error) == (WORKER, None)
    assert one(spans, "log").end_ns == BEGAN + NS
    assert agent.causes["Answer"] == WORKER, "the worker learns where its version was published"


def test_without_a_workers_span_the_agent_makes_the_publish_span() -> None:
    agent = ToldAgent()
    agent.join()
    agent.begin_publish(agent.register("trainer"), "a", 7, cause=None)
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["publish", "publish.agent", "digest", "log"]
    check_tree(spans)
    assert one(spans, "publish").parent is None
    assert agent.causes["Answer"] is None


def test_the_shards_of_one_publication_stand_in_one_trace() -> None:
    """It is the trace of the shard whose word was the last; the others' publish spans are below that one's."""
    agent = ToldAgent()
    agent.join()
    key = agent.register("trainer", 0, 2)
    agent.register("trainer", 1, 2)
    news(agent, SiblingsChecked(agent.key("trainer", 1), None))
    agent.begin_publish(key, "a", 7)
    agent.log()
    agent.headers["version.published"] = {TRACEPARENT: VERSION.traceparent}
    agent.begin_publish(agent.key("trainer", 1), "b", 7, cause=VERSION)
    agent.log()
    first, last = agent.finished()
    spans = [span for note in (first, last) for span in agent.teller.spans_of(note)]
    assert [span.parent for span in spans if span.name == "publish.agent"] == [VERSION.beside(WORKER.span_id), VERSION]
    assert agent.causes["Answer"] == VERSION
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
    assert one(spans, "publish").parent == cause
    assert one(spans, "publish").attributes["tensorhub.version"] == 3
    check_tree(spans, CLIENT)


def test_wishes_that_come_to_nothing_are_forgotten() -> None:
    agent = ToldAgent()
    for number in range(WISHES_MAX + 1):
        wished = PublishWished(model="policy", replica=f"r{number}", version=1, shards=1)
        agent.chronicle.event(wished, {}, 0)
    assert len(agent.chronicle._wishes) == WISHES_MAX


# ------------------------------------------------------------------------------------------------------------- reads


def test_a_read_stands_in_the_trace_of_its_version() -> None:
    agent, key, _ = decided()
    assert agent.causes["AskPlan"] is not None
    read_whole(agent, key)
    spans = agent.spans()
    assert names(spans) == ["transfer", "round", "plan", "lease", "read", "verify", "ready"]
    check_tree(spans, VERSION)
    whole = one(spans, "transfer")
    assert whole.parent == VERSION
    assert whole.links == (ENGINE,)
    assert agent.causes["Answer"] == whole.context, "the worker's own span belongs to the transfer"
    assert agent.causes["Want"] is not None
    assert agent.causes["Want"].span_id == whole.context.span_id, "what was said before is right up to its trace"
    assert agent.causes["Filled"] == whole.context
    assert agent.causes["AskPlan"] == one(spans, "plan").context
    assert agent.causes["OpenSource"] == one(spans, "lease").context
    seconds = {span.name: (span.end_ns - span.start_ns) / NS for span in spans}
    assert seconds == {"transfer": 5, "round": 1, "plan": 1, "lease": 1, "read": 1, "verify": 0, "ready": 1}


def test_a_read_says_what_each_source_gave() -> None:
    agent, key, _ = decided()
    read_whole(agent, key)
    read = one(agent.spans(), "read").attributes
    assert read["tensorhub.source.agent"] == "elsewhere"
    assert (read["tensorhub.bytes"], read["tensorhub.pieces"], read["tensorhub.retries"]) == (12, 3, 0)
    assert (read["tensorhub.transport"], read["tensorhub.end"]) == ("local", "done")


def shared_plan(agent: ToldAgent, key: Key, *sources: tuple[str, tuple[tuple[int, int], ...]]) -> None:
    """Answer the last question for a plan with these sources and their pieces."""
    asked = agent.last(AskPlan)
    assert asked is not None
    shares = tuple(
        Share(source=SourceId(name, 1, "trainer", 0), transport="local", pieces=pieces, nbytes=4, why=f"{name} is near")
        for name, pieces in sources
    )
    answer = Plan(version=asked.demand.version, shares=shares, why="")
    agent.do(agent.core.on_news(PlanCame(key, asked.number, answer), agent.now))


def news(agent: ToldAgent, each: ShardNews) -> None:
    agent.do(agent.core.on_news(each, agent.now))


def test_a_source_that_is_lost_and_one_that_takes_over_are_both_told() -> None:
    agent, key, call = decided()
    agent.later(1.0)
    shared_plan(agent, key, ("elsewhere", ((0, 3),)))
    agent.opened(key, "a")
    agent.log()
    first, batch = agent.last(OpenSource), agent.last(Post)
    assert first is not None
    assert batch is not None
    agent.later(1.0)
    news(agent, SourceLost(key, first.source, "its agent is gone"))
    agent.later(1.0)
    news(agent, SourceClosed(key, first.source))
    shared_plan(agent, key, ("third", ((0, 3),)))
    agent.opened(key, "a")
    agent.later(1.0)
    agent.brought(key, "a")
    agent.log()
    assert agent.end_of(call) is not None
    spans = agent.spans()
    check_tree(spans, VERSION)
    assert names(spans) == ["transfer", "round", "plan", "plan", "lease", "read", "lease", "read", "verify", "ready"]
    lost, over = (span for span in spans if span.name == "read")
    assert lost.attributes["tensorhub.source.agent"] == "elsewhere"
    assert lost.attributes["tensorhub.end"] == lost.error == "lost: its agent is gone"
    assert (lost.attributes["tensorhub.bytes"], lost.attributes["tensorhub.retries"]) == (0, 3)
    assert (lost.end_ns - lost.start_ns) / NS == 1
    assert over.attributes["tensorhub.source.agent"] == "third"
    assert (over.attributes["tensorhub.bytes"], over.attributes["tensorhub.end"], over.error) == (12, "done", None)
    assert over.attributes["tensorhub.why"] == "third is near"
    assert one(spans, "transfer").error is None
    assert one(spans, "transfer").attributes["tensorhub.retries"] == 3


def test_wrong_bytes_are_told_as_the_reason() -> None:
    agent, key, _ = decided()
    shared_plan(agent, key, ("elsewhere", ((0, 3),)))
    agent.opened(key, "a")
    agent.log()
    post = agent.last(Post)
    assert post is not None
    news(agent, BatchDone(key, post.source, post.batch, digests_of("b")))
    news(agent, Confirmed(key, post.source, holds=True))
    agent.closed(key)
    agent.plan(key, "third")
    agent.opened(key, "a")
    agent.brought(key, "a")
    agent.log()
    wrong, right = (span for span in agent.spans() if span.name == "read")
    assert wrong.error == "lost: its bytes did not match the digests of the log"
    assert (wrong.attributes["tensorhub.retries"], right.attributes["tensorhub.retries"]) == (3, 0)


def test_a_failed_read_says_why_and_how_far_it_got() -> None:
    agent, key, call = decided()
    agent.later(1.0)
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    agent.tick(10.0)
    agent.log()
    agent.closed(key)
    assert agent.error_of(call) == "RoundTimeout"
    spans = agent.spans()
    assert names(spans) == ["transfer", "round", "plan", "lease", "read"]
    whole = one(spans, "transfer")
    assert whole.error is not None
    assert whole.error.startswith("RoundTimeout: ")
    assert agent.causes["Raise"] == whole.context, "the worker's failed call is told below it"


def test_a_source_that_grants_no_lease_has_no_read() -> None:
    agent, key, _ = decided()
    agent.plan(key)
    opening = agent.last(OpenSource)
    assert opening is not None
    news(agent, SourceLost(key, opening.source, "the shard is draining"))
    news(agent, SourceClosed(key, opening.source))
    agent.plan(key, "third")
    agent.opened(key, "a")
    agent.log()
    agent.brought(key, "a")
    agent.log()
    spans = agent.spans()
    assert names(spans).count("read") == 1
    refused, granted = (span for span in spans if span.name == "lease")
    assert (refused.error, granted.error) == ("the shard is draining", None)


def test_a_refused_plan_is_told() -> None:
    agent, key, _ = decided()
    asked = agent.last(AskPlan)
    assert asked is not None
    news(agent, PlanCame(key, asked.number, Refusal(error="LayoutMismatch", reason="w differs")))
    agent.log()
    assert one(agent.spans(), "plan").error == "LayoutMismatch: w differs"


def test_a_read_without_bytes() -> None:
    """All of it was verified by an earlier read that failed, so no source is asked for anything."""
    agent, key, _ = decided()
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    agent.brought(key, "a")
    agent.unsaid.clear()
    agent.tick(10.0)
    agent.log()
    agent.spans()
    agent.begin_read(key)
    agent.log()
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["transfer", "round", "verify", "ready"]
    whole = one(spans, "transfer").attributes
    assert (whole["tensorhub.bytes"], whole["tensorhub.kept"], whole["tensorhub.sources"]) == (0, 3, 0)
    check_tree(spans, VERSION)


def test_a_version_that_is_held_already_is_no_transfer() -> None:
    agent, key, _ = decided()
    read_whole(agent, key)
    agent.spans()
    call = agent.begin_read(key, 1)
    agent.log()
    assert agent.end_of(call) is not None
    assert agent.spans() == []


def test_a_read_that_ends_before_a_decision_tells_nothing() -> None:
    agent = ToldAgent("agent-1")
    agent.join()
    key = agent.register("rollout")
    call = agent.begin_read(key, "latest")
    agent.log()
    agent.tick(10.0)
    agent.log()
    assert agent.error_of(call) == "VersionUnavailable"
    assert agent.spans() == []
    assert agent.causes["Raise"] is None


# ------------------------------------------------------------------------------------------------------- whose trace


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
    assert one(spans, "transfer").context == own


def test_long_after_the_publication_a_read_has_a_trace_of_its_own_and_links_to_it() -> None:
    agent, key = reader()
    agent.begin_read(key, engine=ENGINE)
    own = agent.causes["Want"]
    agent.decided_by(own, **{PUBLISH: VERSION.traceparent})
    agent.log()
    read_whole(agent, key)
    whole = one(agent.spans(), "transfer")
    assert (whole.context, whole.parent) == (own, None)
    assert whole.links == (VERSION, ENGINE)


def test_another_version_is_another_story() -> None:
    """What was begun of the first one is told by itself, in the trace that others were told of."""
    agent, key, _ = decided()
    agent.later(1.0)
    agent.plan(key)
    note = agent.chronicle._now[key]
    assert isinstance(note, ReadNote)
    other = TraceContext(0xEEEE, 0xE1)
    again = RoundDecided(
        model=key.model, replica=key.replica, round=note.round or 0, attempt=2, version=2, roots=("r",), held=()
    )
    agent.chronicle.event(again, {TRACEPARENT: other.traceparent}, agent.at)
    first = agent.spans()
    assert names(first) == ["transfer", "round", "plan", "lease"]
    check_tree(first, VERSION)
    assert one(first, "transfer").error == "the log decided another version"
    now = agent.chronicle._now[key]
    assert isinstance(now, ReadNote)
    assert (now.version, now.parent, now.place.trace_id) == (2, other, other.trace_id)
    assert now.place.span_id != note.place.span_id


def test_an_unsampled_trace_stays_unsampled() -> None:
    agent, key = reader()
    agent.decided_by(TraceContext(VERSION.trace_id, VERSION.span_id, sampled=False))
    agent.begin_read(key)
    agent.log()
    read_whole(agent, key)
    assert {span.context.sampled for span in agent.spans()} == {False}


def test_a_story_names_a_bounded_number_of_sources() -> None:
    agent, key, _ = decided()
    asked = agent.last(AskPlan)
    assert asked is not None
    for number in range(SOURCES_NOTED_MAX + 5):
        share = Share(source=SourceId("a", 1, "r", 0), transport="local", pieces=(), nbytes=0, why="")
        agent.chronicle.effect(OpenSource(key, 1000 + number, share, 1, None), None, 0)
    note = agent.chronicle._now[key]
    assert len(getattr(note, "sources", ())) == SOURCES_NOTED_MAX
