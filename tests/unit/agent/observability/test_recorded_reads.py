"""The stories of reads: which spans they give, and what those say of sources, failures and bytes."""

from tests.unit.agent.core.recorded_agent import NS, VERSION, ToldAgent, check_tree, names, one
from tests.unit.agent.core.recorded_reads import ENGINE, decided, published, read_whole
from tests.unit.agent.core.scene import digests_of
from tests.unit.span_places import place_of

from tensorhub_agent.core.effects import (
    BatchDone,
    CompleteCall,
    LeaseConfirmed,
    PlanReceived,
    ReadBatch,
    RequestLease,
    RequestPlan,
    SourceClosed,
    SourceLost,
)
from tensorhub_agent.core.operations.read_report import report_of_failure
from tensorhub_agent.observability.recorder import SOURCES_NOTED_MAX
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId
from tensorhub_common.protocol.worker import EncodedBytes


def test_a_read_stands_in_the_trace_of_its_version() -> None:
    agent, key, _ = decided()
    assert agent.causes["RequestPlan"] is not None
    read_whole(agent, key)
    spans = agent.spans()
    assert names(spans) == ["transfer", "wait", "plan", "lease", "read", "verify", "ready"]
    check_tree(spans, VERSION)
    whole = one(spans, "transfer")
    assert (whole.trace, whole.parent) == (VERSION.trace_id, VERSION.span_id)
    assert whole.links == (ENGINE, place_of(one(spans, "wait")))
    assert agent.causes["CompleteCall"] == place_of(whole), "the worker's own span belongs to the transfer"
    assert agent.causes["Want"] is not None
    assert agent.causes["Want"].span_id == whole.span, "what was said before is right up to its trace"
    assert agent.causes["Filled"] == place_of(whole)
    assert agent.causes["RequestPlan"] == place_of(one(spans, "plan"))
    assert agent.causes["RequestLease"] == place_of(one(spans, "lease"))
    seconds = {span.name: (span.end_ns - span.start_ns) / NS for span in spans}
    assert seconds == {"transfer": 4, "wait": 1, "plan": 1, "lease": 1, "read": 1, "verify": 0, "ready": 1}
    wait = one(spans, "wait")
    assert wait.trace not in {VERSION.trace_id, ENGINE.trace_id}, "it began before there was a version"
    assert wait.links == (place_of(whole), ENGINE)
    assert whole.attributes["tensorhub.wait_s"] == 1


def test_a_read_says_what_each_source_gave() -> None:
    agent, key, _ = decided()
    read_whole(agent, key)
    read = one(agent.spans(), "read").attributes
    assert read["tensorhub.source.agent"] == "elsewhere"
    assert (read["tensorhub.bytes"], read["tensorhub.pieces"], read["tensorhub.retries"]) == (12, 3, 0)
    assert (read["tensorhub.transport"], read["tensorhub.end"]) == ("local", "done")


def test_a_read_says_what_came_as_a_delta() -> None:
    agent, key, _ = decided()
    agent.later(1.0)
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    post = agent.last(ReadBatch)
    assert post is not None
    encoded = (EncodedBytes(how="delta", nbytes=8, wire_bytes=1, why="25 MB/s in this read"),)
    agent.hear(BatchDone(key, post.source, post.batch, digests_of("a"), encoded))
    agent.log()
    read = one(agent.spans(), "read").attributes
    assert (read["tensorhub.encodings"], read["tensorhub.wire_bytes"]) == (("delta",), 5)
    assert read["tensorhub.encodings_why"] == "delta: 25 MB/s in this read"


def shared_plan(agent: ToldAgent, key: ShardKey, *sources: tuple[str, tuple[tuple[int, int], ...]]) -> None:
    """Answer the last question for a plan with these sources and their pieces."""
    asked = agent.last(RequestPlan)
    assert asked is not None
    shares = tuple(
        Share(source=SourceId(name, 1, "trainer", 0), transport="local", pieces=pieces, nbytes=4, why=f"{name} is near")
        for name, pieces in sources
    )
    answer = Plan(version=asked.demand.version, shares=shares, why="")
    agent.hear(PlanReceived(key, asked.number, answer))


def test_a_source_that_is_lost_and_one_that_takes_over_are_both_told() -> None:
    agent, key, call = decided()
    agent.later(1.0)
    shared_plan(agent, key, ("elsewhere", ((0, 3),)))
    agent.opened(key, "a")
    agent.log()
    first, batch = agent.last(RequestLease), agent.last(ReadBatch)
    assert first is not None
    assert batch is not None
    agent.later(1.0)
    agent.hear(SourceLost(key, first.source, "its agent is gone"))
    agent.later(1.0)
    agent.hear(SourceClosed(key, first.source))
    shared_plan(agent, key, ("third", ((0, 3),)))
    agent.opened(key, "a")
    agent.later(1.0)
    agent.brought(key, "a")
    agent.log()
    assert agent.end_of(call) is not None
    spans = agent.spans()
    check_tree(spans, VERSION)
    assert names(spans) == ["transfer", "wait", "plan", "plan", "lease", "read", "lease", "read", "verify", "ready"]
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
    post = agent.last(ReadBatch)
    assert post is not None
    agent.hear(BatchDone(key, post.source, post.batch, digests_of("b")))
    agent.hear(LeaseConfirmed(key, post.source, holds=True))
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
    assert names(spans) == ["transfer", "wait", "plan", "lease", "read"]
    whole = one(spans, "transfer")
    assert whole.error is not None
    assert whole.error.startswith("RoundTimeout: ")
    assert agent.causes["FailCall"] == place_of(whole), "the worker's failed call is told below it"


def test_a_source_that_grants_no_lease_has_no_read() -> None:
    agent, key, _ = decided()
    agent.plan(key)
    opening = agent.last(RequestLease)
    assert opening is not None
    agent.hear(SourceLost(key, opening.source, "the shard is draining"))
    agent.hear(SourceClosed(key, opening.source))
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
    asked = agent.last(RequestPlan)
    assert asked is not None
    agent.hear(PlanReceived(key, asked.number, Refusal(error="LayoutMismatch", reason="w differs")))
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
    assert names(spans) == ["transfer", "verify", "ready"]
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


def test_a_read_that_fails_before_a_decision_tells_what_it_waited_for_and_why_in_vain() -> None:
    """Where its line in the log says, and its worker's span stands below it."""
    agent = ToldAgent("agent-1")
    agent.join()
    key = agent.register("rollout")
    call = agent.begin_read(key, "latest", engine=ENGINE)
    agent.log()
    named = agent.chronicle.trace_of(call)
    agent.tick(10.0)
    agent.log()
    assert agent.error_of(call) == "VersionUnavailable"
    (wait,) = agent.spans()
    assert (wait.name, wait.trace, wait.parent) == ("wait", named, None)
    assert (wait.end_ns - wait.start_ns) == 10 * NS
    assert wait.error is not None
    assert wait.error.startswith("VersionUnavailable: no version of model 'policy'")
    assert (wait.attributes["tensorhub.replica"], wait.attributes["tensorhub.shard"]) == ("rollout", 0)
    assert "tensorhub.version" not in wait.attributes
    assert wait.links == (ENGINE,)
    assert agent.causes["FailCall"] == place_of(wait)


def test_a_read_whose_sibling_is_missing_tells_so() -> None:
    agent = ToldAgent("agent-1", catalog=published())
    agent.join()
    key = agent.register("rollout", 0, 2)
    agent.register("rollout", 1, 2)
    call = agent.begin_read(key)
    agent.log()
    agent.tick(10.0)
    agent.log()
    assert agent.error_of(call) == "RoundTimeout"
    (wait,) = agent.spans()
    assert (wait.name, (wait.error or "")[:12]) == ("wait", "RoundTimeout")


def test_an_update_that_is_put_off_has_failed() -> None:
    """Its line in the log names the trace, be it that of a version or of a wait for another one."""
    agent, _, call = decided()
    agent.do([CompleteCall(call=call, report=report_of_failure("no source is left", 1.0))])
    assert one(agent.spans(), "transfer").error == "no source is left"


def test_an_update_that_finds_nothing_newer_tells_nothing() -> None:
    agent, key, _ = decided()
    read_whole(agent, key)
    agent.spans()
    call = agent.begin_read(key, "newer", patience=0.0)
    agent.log()
    assert isinstance(agent.end_of(call), CompleteCall)
    assert agent.spans() == []
    assert agent.causes["CompleteCall"] is None


def test_a_story_names_a_bounded_number_of_sources() -> None:
    agent, key, _ = decided()
    asked = agent.last(RequestPlan)
    assert asked is not None
    for number in range(SOURCES_NOTED_MAX + 5):
        share = Share(source=SourceId("a", 1, "r", 0), transport="local", pieces=(), nbytes=0, why="")
        agent.chronicle.effect(RequestLease(key, 1000 + number, share, 1, None), None, 0)
    note = agent.chronicle._now[key]
    assert len(getattr(note, "sources", ())) == SOURCES_NOTED_MAX
