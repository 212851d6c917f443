"""What is noted of calls: which spans it gives, in whose trace those stand, and what they say."""

import pytest
from tests.unit.agent.observability.told_agent import (
    ENGINE,
    VERSION,
    WORKER,
    check_tree,
    decided,
    decided_again,
    names,
    note_of,
    one,
    reader,
    said_of,
    seconds,
    told_trainer,
)
from tests.unit.span_places import place_at, place_of

from tensorhub_agent.core.effects import CompleteCall, Digested, DigestMemory, RequestLease
from tensorhub_agent.core.operations.read_report import report_of_failure
from tensorhub_agent.observability.recorder import SOURCES_NOTED_MAX, WISHES_MAX
from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TRACEPARENT, TraceContext
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.log.events import PublishWished
from tensorhub_common.protocol.plans import Refusal, Share, SourceId
from tensorhub_common.protocol.worker import EncodedBytes
from tensorhub_simulator.drivers.agent import digests_of
from tensorhub_simulator.drivers.noted_agent import BEGAN, NS, NotedAgent

CLIENT = place_at(0xDDDD, 0xD1)

# Publications.


@pytest.mark.parametrize("caller", [WORKER, None])
def test_a_publication_stands_below_its_workers_span(caller: TraceContext | None) -> None:
    """Without one the agent makes the publish span."""
    agent, key = told_trainer()
    agent.caller = caller
    agent.publish(key, "a", 7)
    assert agent.causes["Ready"] is not None
    assert caller in (None, agent.causes["Ready"]), "what is said to the log belongs to the publication"
    agent.later(1.0)
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["publish", "publish.agent", "digest", "log"][caller is not None :]
    check_tree(spans, WORKER)
    whole = one(spans, "publish.agent")
    assert (said_of(whole, "version"), whole.error) == ((7,), None)
    if caller is None:
        assert one(spans, "publish").parent is None
    else:
        assert (whole.trace, whole.parent) == (WORKER.trace_id, WORKER.span_id)
    assert one(spans, "log").end_ns == BEGAN + NS
    assert agent.causes["CompleteCall"] == caller, "the worker learns where its version was published"
    agent.publish(key, "b", 8)
    *_, refused = agent.spans()
    assert (refused.error or "").startswith("VersionConflict: ")
    assert "unpublish 7 first" in (refused.error or "")


def test_the_shards_of_one_publication_stand_in_one_trace() -> None:
    """It is the trace of the shard whose word was the last; the others' publish spans are below that one's."""
    agent = NotedAgent(caller=WORKER)
    agent.join()
    key, other = agent.register_all("trainer")
    agent.logged(agent.publish(key, "a", 7))
    agent.caller = VERSION
    agent.headers["version.published"] = {TRACEPARENT: VERSION.traceparent}
    agent.logged(agent.publish(other, "b", 7))
    spans = agent.spans()
    assert [(span.trace, span.parent) for span in spans if span.name == "publish.agent"] == [
        (VERSION.trace_id, WORKER.span_id),
        (VERSION.trace_id, VERSION.span_id),
    ]
    assert agent.causes["CompleteCall"] == VERSION
    check_tree(spans, WORKER, VERSION)


@pytest.mark.parametrize("cause", [CLIENT, None])
def test_a_wish_from_outside_stands_below_its_clients_span(cause: TraceContext | None) -> None:
    agent, key = told_trainer()
    if cause is not None:
        agent.headers["publish.wished"] = {"Traceparent": cause.traceparent}
    agent.take(Publish(model=key.model, replica=key.replica, version=3))
    agent.hear(Digested(key, agent.need(DigestMemory).number, digests_of("a")))
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["publish", "publish.agent", "digest", "log"]
    publish = one(spans, "publish")
    assert publish.parent == (None if cause is None else cause.span_id)
    assert cause is None or publish.trace == cause.trace_id
    assert said_of(publish, "version") == (3,)
    check_tree(spans, CLIENT)


def test_wishes_and_sources_that_are_noted_are_bounded() -> None:
    agent, key, _ = decided()
    for number in range(WISHES_MAX + 1):
        wished = PublishWished(model="policy", replica=f"r{number}", version=1, shards=1)
        agent.chronicle.event(wished, {}, 0)
    assert len(agent.chronicle._wishes) == WISHES_MAX
    share = Share(source=SourceId("a", 1, "r", 0), transport="local", pieces=(), nbytes=0, why="")
    for number in range(SOURCES_NOTED_MAX + 5):
        agent.chronicle.effect(RequestLease(key, 1000 + number, share, 1, None), None, 0)
    assert len(note_of(agent, key).sources) == SOURCES_NOTED_MAX


# Reads.


def test_a_read_stands_in_the_trace_of_its_version_and_says_what_each_source_gave() -> None:
    agent, key, _ = decided()
    assert agent.causes["RequestPlan"] is not None
    agent.read_slowly(key)
    spans = agent.spans()
    assert names(spans) == ["transfer", "wait", "plan", "lease", "read", "verify", "ready"]
    check_tree(spans, VERSION)
    whole, wait = one(spans, "transfer"), one(spans, "wait")
    assert (whole.trace, whole.parent) == (VERSION.trace_id, VERSION.span_id)
    assert whole.links == (ENGINE, place_of(wait))
    assert agent.causes["CompleteCall"] == place_of(whole), "the worker's own span belongs to the transfer"
    assert agent.causes["Want"] is not None
    assert agent.causes["Want"].span_id == whole.span, "what was said before is right up to its trace"
    assert agent.causes["Filled"] == place_of(whole)
    assert agent.causes["RequestPlan"] == place_of(one(spans, "plan"))
    assert agent.causes["RequestLease"] == place_of(one(spans, "lease"))
    took = {span.name: seconds(span) for span in spans}
    assert took == {"transfer": 4, "wait": 1, "plan": 1, "lease": 1, "read": 1, "verify": 0, "ready": 1}
    assert wait.trace not in {VERSION.trace_id, ENGINE.trace_id}, "it began before there was a version"
    assert wait.links == (place_of(whole), ENGINE)
    assert said_of(whole, "wait_s") == (1,)
    told = said_of(one(spans, "read"), "source.agent", "transport", "bytes", "pieces", "retries", "end")
    assert told == ("elsewhere", "local", 12, 3, 0, "done")


def test_a_read_says_what_came_as_a_delta() -> None:
    agent, key, _ = decided()
    agent.begin_filling(key, "a")
    agent.bring(key, "a", EncodedBytes(how="delta", nbytes=8, wire_bytes=1, why="25 MB/s in this read"))
    told = said_of(one(agent.spans(), "read"), "encodings", "wire_bytes", "encodings_why")
    assert told == (("delta",), 5, "delta: 25 MB/s in this read")


def test_a_source_that_is_lost_and_one_that_takes_over_are_both_told() -> None:
    agent, key, call = decided()
    agent.later(1.0)
    agent.begin_filling(key, "a")
    agent.later(1.0)
    agent.lose_source(key, "its agent is gone")
    agent.later(1.0)
    agent.plan(key, "third")
    agent.opened(key, "a")
    agent.later(1.0)
    agent.bring(key, "a")
    assert agent.result(call) == "done"
    spans = agent.spans()
    check_tree(spans, VERSION)
    assert names(spans) == ["transfer", "wait", "plan", "plan", "lease", "read", "lease", "read", "verify", "ready"]
    lost, over = (span for span in spans if span.name == "read")
    why = "lost: its agent is gone"
    told = ("source.agent", "bytes", "retries", "end")
    assert (said_of(lost, *told), lost.error, seconds(lost)) == (("elsewhere", 0, 3, why), why, 1)
    assert (said_of(over, *told, "why"), over.error) == (("third", 12, 0, "done", "third is near"), None)
    whole = one(spans, "transfer")
    assert (said_of(whole, "retries"), whole.error) == ((3,), None)


def test_wrong_bytes_are_told_as_the_reason() -> None:
    agent, key, _ = decided()
    agent.begin_filling(key, "a")
    agent.brought(key, "b")
    agent.confirmed(key)
    agent.closed(key)
    agent.plan(key, "third")
    agent.opened(key, "a")
    agent.bring(key, "a")
    wrong, right = (span for span in agent.spans() if span.name == "read")
    assert wrong.error == "lost: its bytes did not match the digests of the log"
    assert said_of(wrong, "retries") + said_of(right, "retries") == (3, 0)


def test_a_failed_read_says_why_and_how_far_it_got() -> None:
    agent, key, call = decided()
    agent.begin_filling(key, "a")
    agent.tick_and_log(10.0)
    agent.closed(key)
    assert agent.result(call) == "RoundTimeout"
    spans = agent.spans()
    assert names(spans) == ["transfer", "wait", "plan", "lease", "read"]
    whole = one(spans, "transfer")
    assert (whole.error or "").startswith("RoundTimeout: ")
    assert agent.causes["FailCall"] == place_of(whole), "the worker's failed call is told below it"
    agent, _, call = decided()
    agent.do([CompleteCall(call=call, report=report_of_failure("no source is left", 1.0))])
    assert one(agent.spans(), "transfer").error == "no source is left", "an update that is put off has failed"


def test_a_source_that_grants_no_lease_has_no_read_and_a_refused_plan_is_told() -> None:
    agent, key, _ = decided()
    agent.plan(key)
    agent.lose_source(key, "the shard is draining")
    agent.plan(key, "third")
    agent.opened(key, "a")
    agent.log()
    agent.bring(key, "a")
    spans = agent.spans()
    assert names(spans).count("read") == 1
    refused, granted = (span for span in spans if span.name == "lease")
    assert (refused.error, granted.error) == ("the shard is draining", None)
    agent, key, _ = decided()
    agent.refuse_plan(key, Refusal(error="LayoutMismatch", reason="w differs"))
    agent.log()
    assert one(agent.spans(), "plan").error == "LayoutMismatch: w differs"


def test_a_read_without_bytes() -> None:
    """All of it was verified by an earlier read that failed, so no source is asked for anything."""
    agent, key, _ = decided()
    agent.begin_filling(key, "a")
    agent.brought(key, "a")
    agent.unsaid.clear()
    agent.tick_and_log(10.0)
    agent.spans()
    agent.logged(agent.read(key))
    agent.log()
    spans = agent.spans()
    assert names(spans) == ["transfer", "verify", "ready"]
    assert said_of(one(spans, "transfer"), "bytes", "kept", "sources") == (0, 3, 0)
    check_tree(spans, VERSION)


def test_an_update_that_finds_nothing_newer_and_a_version_that_is_held_are_no_transfer() -> None:
    agent, key, _ = decided()
    agent.read_slowly(key)
    agent.spans()
    held = agent.logged(agent.read(key, 1))
    newer = agent.logged(agent.read(key, "newer", patience=agent.now + 5.0))
    assert [agent.result(call) for call in (held, newer)] == ["done", None]
    agent.tick_and_log(5.0)
    assert agent.end_of(newer) == CompleteCall(call=newer), "it has lost its patience"
    assert agent.spans() == []
    assert agent.causes["CompleteCall"] is None


def test_a_read_that_fails_before_a_decision_tells_what_it_waited_for_and_why_in_vain() -> None:
    """Where its line in the log says, and its worker's span stands below it."""
    agent = NotedAgent("agent-1", ENGINE)
    agent.join()
    key = agent.register("rollout")
    call = agent.logged(agent.read(key))
    named = agent.chronicle.trace_of(call)
    agent.tick_and_log(10.0)
    (wait,) = agent.spans()
    assert (wait.name, wait.trace, wait.parent) == ("wait", named, None)
    assert seconds(wait) == 10
    assert (wait.error or "").startswith("VersionUnavailable: no version of model 'policy'")
    assert said_of(wait, "replica", "shard", "version") == ("rollout", 0, None)
    assert wait.links == (ENGINE,)
    assert agent.causes["FailCall"] == place_of(wait)


# Traces.


GARBAGE = ["", "nonsense", "00-0-0-00", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "é" * 60]


@pytest.mark.parametrize("garbage", [*GARBAGE, None])
def test_without_a_readable_cause_a_read_has_a_trace_of_its_own(garbage: str | None) -> None:
    """So it has long after the publication, to which it links then."""
    agent, key = reader()
    agent.read(key)
    own = agent.causes["Want"]
    agent.headers["round.decided"] = {TRACEPARENT: garbage or ""}
    if garbage is None:
        agent.decided_by(own, **{PUBLISH_HEADER: VERSION.traceparent})
    agent.log()
    agent.read_slowly(key)
    spans = agent.spans()
    check_tree(spans)
    whole = one(spans, "transfer")
    assert (place_of(whole), whole.parent) == (own, None)
    assert garbage is not None or whole.links == (VERSION, ENGINE)


def test_another_version_is_told_by_itself() -> None:
    """What was begun of the first one stands in the trace that others were told of."""
    agent, key, _ = decided()
    agent.later(1.0)
    agent.plan(key)
    note = note_of(agent, key)
    other = place_at(0xEEEE, 0xE1)
    agent.chronicle.event(decided_again(key, note, 2, "r"), {TRACEPARENT: other.traceparent}, agent.at)
    first = agent.spans()
    assert names(first) == ["transfer", "wait", "plan", "lease"]
    check_tree(first, VERSION)
    assert one(first, "transfer").error == "the log decided another version"
    now = note_of(agent, key)
    assert (now.version, now.parent, now.context.trace_id) == (2, other, other.trace_id)
    assert now.context.span_id != note.context.span_id


def test_of_a_trace_that_is_not_sampled_nothing_is_noted_and_others_hear_so() -> None:
    agent, key = reader()
    agent.decided_by(TraceContext(VERSION.trace_id, VERSION.span_id, sampled=False))
    agent.logged(agent.read(key))
    note = note_of(agent, key)
    assert agent.chronicle.trace_of(note.call.call) is None, "a line would name a trace that nobody keeps"
    agent.read_slowly(key)
    assert (note.plans, note.sources) == ([], {})
    assert agent.causes["RequestPlan"] is agent.causes["RequestLease"] is None
    answered = agent.causes["CompleteCall"]
    assert answered is not None
    assert (answered.trace_id, answered.sampled) == (VERSION.trace_id, False)
    assert agent.finished() == []
    trainer, key = told_trainer()
    trainer.caller = TraceContext(WORKER.trace_id, WORKER.span_id, sampled=False)
    trainer.logged(trainer.publish(key, "a", 1))
    ready = trainer.causes["Ready"]
    assert ready is not None
    assert not ready.sampled
    assert trainer.finished() == []
