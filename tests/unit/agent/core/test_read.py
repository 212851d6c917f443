"""Reading as one shard of a round: writes only when all have leases, answers only when no byte may come any more."""

import pytest
from tests.unit.agent.core.scene import MODEL, OneAgent, digests_of

from tensorhub_agent.core.effects import CompleteCall, FailCall, PlanReceived, ReadBatch, RequestPlan, SourceLost
from tensorhub_agent.core.operations.read import REPLAN_S
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_AGAIN_S
from tensorhub_common.catalog.transitions import ShardState
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Drained, GiveUp, Granted, Replan, Unpublish
from tensorhub_common.protocol.plans import Refusal


def pair() -> tuple[OneAgent, OneAgent]:
    """A trainer that has published version 1, and a rollout's agent; both on one catalog."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    reader.register("rollout")
    publish(trainer, "a")
    return trainer, reader


def publish(trainer: OneAgent, text: str) -> None:
    trainer.publish(trainer.key("trainer"), text)
    trainer.log()


def filling() -> tuple[OneAgent, OneAgent, int]:
    trainer, reader = pair()
    key = reader.key("rollout")
    call = reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "a")
    assert reader.last(ReadBatch) is None, "nothing may be asked for before every shard has its leases"
    reader.log()
    assert reader.memory(key) is MemoryState.FILLING
    return trainer, reader, call


def test_reads_verifies_and_returns() -> None:
    _, reader, call = filling()
    key = reader.key("rollout")
    reader.brought(key, "a")
    reader.log()
    end = reader.end_of(call)
    assert isinstance(end, CompleteCall)
    assert end.version == 1
    assert end.report is not None
    assert (end.report.pieces, end.report.kept, end.report.retried) == (3, 0, 0)
    assert reader.core.shards[key].contents.root == root_digest(digests_of("a"))


def test_a_failed_round_answers_only_when_nothing_can_be_written_any_more() -> None:
    _, reader, call = filling()
    key = reader.key("rollout")
    reader.tick(10.0)
    reader.log()
    assert reader.end_of(call) is None, "a batch is still under way"
    reader.closed(key)
    assert reader.error_of(call) == "RoundTimeout"
    assert (reader.memory(key), reader.core.shards[key].contents.partial) == (MemoryState.EMPTY, True)


def test_what_was_verified_before_is_not_read_again() -> None:
    _, reader, _ = filling()
    key = reader.key("rollout")
    reader.brought(key, "a")
    reader.unsaid.clear()
    reader.tick(10.0)
    reader.log()
    again = reader.read(key)
    reader.log()
    reader.log()
    end = reader.end_of(again)
    assert isinstance(end, CompleteCall)
    assert end.report is not None
    assert end.report.kept == 3


def test_a_planner_that_is_silent_is_asked_again_as_long_as_the_call_may_last() -> None:
    """A planner that is being restarted says nothing about who holds the version."""
    _, reader = pair()
    key = reader.key("rollout")
    call = reader.read(key)
    reader.log()
    for _ in range(4):
        asked = reader.last(RequestPlan)
        assert asked is not None
        reader.do(
            reader.core.on_outcome(PlanReceived(key, asked.number, Refusal(error=NO_ANSWER, reason="")), reader.now)
        )
        reader.tick(PLAN_AGAIN_S)
    reader.tick(2.0)
    reader.tick(PLAN_AGAIN_S)
    assert reader.end_of(call) is None
    reader.plan(key)
    reader.opened(key, "a")
    assert any(isinstance(command, Granted) for command in reader.unsaid)


def test_a_read_that_ends_for_want_of_a_planner_says_so() -> None:
    _, reader = pair()
    key = reader.key("rollout")
    call = reader.read(key)
    reader.log()
    asked = reader.last(RequestPlan)
    assert asked is not None
    refusal = Refusal(error=NO_ANSWER, reason="no planner listens")
    reader.do(reader.core.on_outcome(PlanReceived(key, asked.number, refusal), reader.now))
    reader.tick(10.0)
    reader.log()
    end = reader.end_of(call)
    assert isinstance(end, FailCall)
    assert "for it got no plan: no planner listens. See that tensorhub-planner runs" in end.message


def test_leases_that_cant_be_had_are_planned_again_by_the_log() -> None:
    _, reader = pair()
    key = reader.key("rollout")
    reader.read(key)
    reader.log()
    asked = reader.last(RequestPlan)
    assert asked is not None
    gone = Refusal(error="VersionUnavailable", reason="nobody has it")
    reader.do(reader.core.on_outcome(PlanReceived(key, asked.number, gone), reader.now))
    reader.tick(REPLAN_S)
    assert [type(command) for command in reader.unsaid] == [Replan]
    reader.log()
    again = reader.last(RequestPlan)
    assert again is not None
    assert again.number != asked.number


def test_a_round_that_was_taken_up_again_after_giving_up_is_left_for_good_by_a_fence() -> None:
    """The log answers a giving-up by a new attempt, and the caller has heard RegistryUnavailable: none may stay."""
    trainer, reader, call = filling()
    key = reader.key("rollout")
    opening = reader.last(ReadBatch)
    assert opening is not None
    reader.do(reader.core.on_outcome(SourceLost(key, opening.source, "gone"), reader.now))
    reader.closed(key)
    asked = reader.last(RequestPlan)
    assert asked is not None
    reader.do(
        reader.core.on_outcome(PlanReceived(key, asked.number, Refusal(error="VersionUnavailable", reason="")), 0.0)
    )
    reader.tick(1.5)
    asked = reader.last(RequestPlan)
    assert asked is not None
    reader.do(
        reader.core.on_outcome(PlanReceived(key, asked.number, Refusal(error="VersionUnavailable", reason="")), 1.5)
    )
    assert [type(command) for command in reader.unsaid] == [GiveUp]
    reader.tick(OUTCOME_S_MAX + 10.0)
    assert reader.error_of(call) == "RegistryUnavailable"
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    publish(trainer, "b")
    reader.log()
    assert trainer.catalog.models["policy"].replicas["rollout"].round is None


def test_a_fill_that_nobody_was_told_of_is_taken_back() -> None:
    _, reader, call = filling()
    key = reader.key("rollout")
    reader.brought(key, "a")
    reader.tick(10.0)
    reader.tick(OUTCOME_S_MAX)
    assert reader.error_of(call) == "RegistryUnavailable"
    assert [type(command) for command in reader.unsaid[-2:]] == [Unpublish, Drained]
    reader.log()
    assert reader.catalog.models["policy"].replicas["rollout"].version is None


def test_a_wish_for_newer_that_loses_its_patience_answers_none() -> None:
    _, reader, _ = filling()
    key = reader.key("rollout")
    reader.brought(key, "a")
    reader.log()
    call = reader.read(key, "newer", patience=5.0)
    reader.log()
    assert reader.end_of(call) is None
    reader.tick(5.0)
    reader.log()
    assert reader.end_of(call) == CompleteCall(call=call)


def test_a_repeat_that_the_log_refuses_as_late_ends_no_call() -> None:
    """A delayed copy of the want comes after a later word of the lane: its refusal is not the want's outcome."""
    _, reader = pair()
    key = reader.key("rollout")
    call = reader.read(key)
    want = reader.unsaid[0]
    reader.log()
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    reader.take(want)
    assert reader.end_of(call) is None
    assert reader.memory(key) is MemoryState.FILLING


def test_a_worker_that_dies_before_anything_is_written_leaves_the_round() -> None:
    _, reader = pair()
    key = reader.key("rollout")
    reader.read(key)
    reader.log()
    reader.do(reader.core.worker_gone(7, reader.now))
    reader.log()
    assert reader.core.shards[key].operation is None
    assert reader.catalog.models["policy"].replicas["rollout"].round is None


def registered(agent: OneAgent, replica: str, shards: int = 2) -> list[ShardKey]:
    keys = []
    for shard in range(shards):
        keys.append(agent.register(replica, shard, shards))
        if shard > 0:
            agent.siblings_checked()
    return keys


def test_what_was_filled_stands_though_a_sibling_was_not_and_the_round_failed() -> None:
    """The log goes on counting the shard as ready, and may answer the next read by it: it must not be forgotten."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    sources = registered(trainer, "trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    late, whole = registered(reader, "rollout")
    for source in sources:
        trainer.publish(source, "a")
    trainer.log()
    calls = [reader.read(late), reader.read(whole)]
    for key in (late, whole):
        reader.log()
        asked = next(each for each in reader.seen if isinstance(each, RequestPlan) and each.key == key)
        reader.seen.append(asked)
        reader.plan(key)
        reader.opened(key, "a")
    reader.log()
    reader.brought(whole, "a")
    reader.log()
    assert reader.memory(whole) is MemoryState.READY
    reader.tick(10.0)
    reader.log()
    reader.closed(late)
    assert [reader.error_of(call) for call in calls] == ["RoundTimeout", "RoundTimeout"]
    shard = trainer.catalog.models[MODEL].replicas["rollout"].members[1]
    held = reader.core.shards[whole].contents
    assert (shard.state, shard.version) == (ShardState.READY, 1)
    assert (held.memory, held.version) == (MemoryState.READY, 1)


def told(agent: OneAgent, call: int) -> tuple[str, str]:
    end = agent.end_of(call)
    assert isinstance(end, FailCall)
    return end.error, end.message


def waiting(shards: int, came: int) -> tuple[OneAgent, list[int]]:
    """Shards of a replica that ask for the latest of a model of which nothing is published."""
    agent = OneAgent()
    agent.join()
    calls = [agent.read(key, patience=10.0) for key in registered(agent, "rollout", shards)[:came]]
    agent.log()
    return agent, calls


@pytest.mark.parametrize("at_once", [True, False])
def test_all_shards_are_told_alike_that_nothing_is_published(*, at_once: bool) -> None:
    """Whoever ends last doesn't wait for those who have left at the same bound, and is not told that it did."""
    agent, calls = waiting(shards=3, came=3)
    agent.tick(10.0)
    while agent.unsaid:
        agent.log(3 if at_once else 1)
    nothing = "no version of model 'policy' was to be had within the bound: has a trainer published one?"
    assert [told(agent, call) for call in calls] == [("VersionUnavailable", nothing)] * 3


def test_all_shards_are_told_alike_who_never_came() -> None:
    agent, calls = waiting(shards=3, came=2)
    agent.tick(10.0)
    agent.log()
    for shard, call in enumerate(calls):
        error, message = told(agent, call)
        assert error == "RoundTimeout"
        assert message.startswith(f"shard {shard} of policy/rollout: shards [2] of the replica did not join the round")


def test_who_left_before_the_last_one_came_is_named() -> None:
    """They were never there together, so that nothing is published is not why."""
    agent, (first,) = waiting(shards=2, came=1)
    agent.tick(10.0)
    agent.log()
    second = agent.read(agent.key("rollout", 1))
    agent.log()
    agent.tick(10.0)
    agent.log()
    assert "shards [1] of the replica did not join" in told(agent, first)[1]
    assert "shards [0] of the replica did not join" in told(agent, second)[1]
