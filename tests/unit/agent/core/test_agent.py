"""An agent in a job: joining and registering, one call of a shard at a time, and what it lets go of.

A job's end is in test_job_deleted.py, each kind of call in a file of its own.
"""

import pytest

from tensorhub_agent.core.agent import UNSENT_MAX
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    CallRead,
    CallUnpublish,
    CompareLayouts,
    Digested,
    DigestMemory,
    EndFenced,
    Rejoin,
    SiblingsChecked,
)
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.protocol.leases import LeaseRefusal
from tensorhub_common.protocol.log.commands import Expire, Join, Publish, Ready, Sender
from tensorhub_common.protocol.log.events import PublishDeclined
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.drivers.agent import MODEL, SESSION, OneAgent, digests_of, joined, published, ready, spec_of

# Joining.


def test_nothing_is_said_before_the_log_has_let_the_agent_in() -> None:
    """On a lane of its own a command could overtake the join, be refused as stale, and cost another join."""
    agent = OneAgent()
    agent.joins()
    call = agent.begin_register(spec_of(agent.key("trainer")))
    assert agent.said() == ["Join"]
    agent.log()
    assert agent.result(call) == "done"


def test_calls_that_wait_until_the_agent_has_joined_are_bounded() -> None:
    """A worker that calls and gives up again and again fills no memory; other shards' calls are taken."""
    agent, key = published()
    other = agent.register("other")
    agent.joins(2)
    calls = []
    for _ in range(2 * UNSENT_MAX):
        calls.append(agent.unpublish(key))
        agent.tick(20.0)
        agent.tick(20.0)
    assert {agent.result(call) for call in calls} == {"RegistryUnavailable"}
    assert "earlier calls wait" in agent.why(calls[-1])
    assert len(agent.core._unsent) < UNSENT_MAX + 8
    assert agent.result(agent.publish(other, "b")) is None
    agent.unsaid.clear()
    agent.join(3)
    call = agent.logged(agent.unpublish(key))
    assert agent.result(call) == "done"


def test_a_wrongly_expired_agent_states_what_it_has_and_is_believed() -> None:
    """A higher incarnation of the same name ends its process."""
    agent, key = published()
    agent.take(Expire(by=Sender("_registry", 1, 1), agent="agent-0", incarnation=1, term=1))
    assert agent.last(Rejoin) is not None
    assert agent.counted(key) is None
    agent.join(2)
    assert (agent.counted(key), agent.memory(key)) == (1, MemoryState.READY)
    agent.take(Join(by=Sender("agent-0", 5, 1), host="host", site="site"))
    assert agent.last(EndFenced) is not None


def test_memory_that_the_log_does_not_know_is_no_version_and_a_shard_that_it_never_knew_is_let_go() -> None:
    agent = joined()
    key = agent.register("trainer")
    again = OneAgent(after=agent)
    again.core.adopt(spec_of(key), ready(version=9))
    stranger = again.key("stranger")
    again.core.adopt(spec_of(stranger), ShardContents())
    again.join(2)
    assert again.memory(key) is MemoryState.EMPTY
    assert key not in again.core.leases.offers
    assert again.freed() == [stranger]
    assert list(again.core.shards) == [key]


def test_a_lane_is_kept_for_a_shard_that_comes_back() -> None:
    agent, key = published()
    lane = next(name for name in agent.catalog.lanes if "/" in name)
    agent.logged(agent.release(key))
    agent.register("other")
    agent.register("trainer")
    agent.publish(key, "b")
    assert agent.unsaid[0].by is not None
    assert agent.unsaid[0].by.lane == lane


# Registering.


def test_siblings_of_which_the_later_one_clashes() -> None:
    """The first one stands at once. A later one is compared; if that clashes, or the log refuses it, it is freed."""
    agent = joined()
    first, *later = (agent.key("trainer", shard) for shard in range(3))
    calls = [agent.begin_register(spec_of(first, 3))]
    assert agent.result(calls[0]) is None
    agent.log()
    assert agent.result(calls[0]) == "done"
    for key, mismatch, result in zip(later, (None, "tensor 'w' differs"), ("done", "LayoutMismatch"), strict=True):
        call = agent.logged(agent.begin_register(spec_of(key, 3)))
        assert agent.result(call) is None
        agent.siblings_checked(mismatch)
        agent.log()
        assert agent.result(call) == result
    refused = agent.logged(agent.begin_register(spec_of(later[1], 4)))
    assert agent.result(refused) == "LayoutMismatch"
    assert agent.freed() == [later[1], later[1]]
    assert list(agent.catalog.models[MODEL].replicas["trainer"].members) == [0, 1]


def test_what_the_log_does_not_confirm_is_taken_back_and_the_next_try_stands() -> None:
    """Both tries speak on one lane, so the first one's release can't end the second."""
    agent = joined()
    spec = spec_of(agent.key("trainer"))
    first = agent.begin_register(spec)
    agent.tick(10.0)
    assert agent.result(first) == "RegistryUnavailable"
    second = agent.logged(agent.begin_register(spec))
    assert agent.result(second) == "done"
    assert 0 in agent.catalog.models[MODEL].replicas["trainer"].members


def test_a_siblings_check_of_a_registration_that_is_over_decides_no_other() -> None:
    agent = joined()
    agent.register("engine", 0, 2)
    spec = spec_of(agent.key("engine", 1), 2)
    first = agent.logged(agent.begin_register(spec))
    agent.joins(2)
    assert agent.result(first) == "AgentUnavailable"
    check = agent.need(CompareLayouts)
    stale = SiblingsChecked(check.key, check.number, "tensor 'w' differs")
    second = agent.begin_register(spec)
    agent.hear(stale)
    agent.log()
    agent.hear(stale)
    assert agent.result(second) is None
    agent.siblings_checked()
    assert agent.result(second) == "done"
    assert spec.key in agent.core.shards


# Calls.


def test_a_second_call_of_the_same_worker_is_refused_and_one_of_another_waits_until_its_bound() -> None:
    agent = joined()
    key = agent.register("trainer", 0, 2)
    agent.publish(key, "a")
    assert agent.result(agent.unpublish(key)) == "ReplicaConflict"
    agent.called(key, CallUnpublish(call=60, session=8, deadline=1.0))
    assert agent.result(60) is None
    agent.tick(1.0)
    assert agent.result(60) == "ReplicaConflict"


def test_the_next_worker_waits_for_what_the_dead_one_began() -> None:
    """The log may still publish what stands here. Should it die as well, its call is ended for its driver."""
    agent = joined()
    key = agent.register("trainer")
    agent.publish(key, "a")
    assert agent.result(agent.attach(key, 8)) == "ReplicaConflict", "the first one lives"
    agent.worker_gone()
    second = agent.attach(key, 8)
    agent.worker_gone(8)
    assert agent.result(second) == "AgentUnavailable"
    third = agent.attach(key, 9)
    assert agent.result(third) is None
    agent.log()
    assert (agent.result(third), agent.memory(key)) == ("done", MemoryState.READY)


def test_of_a_shard_that_is_not_here_a_release_is_done_and_any_other_call_fails() -> None:
    """Whoever gave up waiting for a release asks again, when it has come to its end. Nor is what is not published."""
    agent, key = published()
    assert agent.result(agent.unpublish(agent.register("engine"))) == "NotPublished"
    assert agent.result(agent.unpublish(agent.key("nowhere"))) == "AgentUnavailable"
    agent.logged(agent.release(key))
    assert agent.result(agent.release(key)) == "done"


# Wishes from outside to publish.


def test_a_wish_that_not_all_shards_fulfil_is_over_after_a_while() -> None:
    agent = joined()
    key, other = (agent.register("trainer", shard, 2) for shard in range(2))
    agent.take(Publish(model=MODEL, replica="trainer"))
    agent.core.shards[other].operation = None
    digest = next(effect for effect in agent.all(DigestMemory) if effect.key == key)
    agent.hear(Digested(key, digest.number, digests_of("a")))
    agent.log()
    agent.tick_and_log(CoreConfig().wish_s_max)
    assert agent.core.shards[key].operation is None
    assert agent.memory(key) is MemoryState.EMPTY


@pytest.mark.parametrize(("why_not", "error"), [("partial", "NotFilled"), ("reads", "ReplicaConflict")])
def test_a_wish_that_can_not_be_fulfilled_is_declined_for_all_to_hear(why_not: str, error: str) -> None:
    """No call could raise, and a read that has not reached the log when the wish does is none to refuse it for."""
    agent = joined()
    key = agent.register("trainer")
    if why_not == "partial":
        agent.core.shards[key].contents.partial = True
    else:
        agent.core.called(key, CallRead(call=99, session=SESSION, deadline=60.0, want="latest", patience=60.0), 0.0)
    agent.take(Publish(model=MODEL, replica="trainer"))
    wish = agent.catalog.seq
    [declined] = [event for event in agent.log() if isinstance(event, PublishDeclined)]
    assert (declined.error, declined.wish) == (error, wish)
    assert agent.memory(key) is MemoryState.EMPTY


def test_a_shard_that_was_never_registered_is_published_before_the_join_is_answered() -> None:
    """The log drops it: nothing is said of memory that is gone, and its worker's call ends."""
    agent = OneAgent()
    key = agent.key("trainer")
    agent.core.adopt(spec_of(key), ShardContents())
    agent.do(agent.core.join(1, "host", "site", agent.now))
    agent.attach(key, session=SESSION)
    call = agent.publish(key, "a")
    agent.log()
    assert agent.result(call) == AgentUnavailable.__name__
    assert agent.freed() == [key]
    assert agent.appended(Ready) == []


# Questions for leases that come before the log's word for them.


def test_a_question_for_a_lease_waits_while_the_logs_word_for_it_may_be_on_its_way() -> None:
    agent = joined()
    trainer, rollout = agent.register("trainer"), agent.register("rollout")

    def answer(key: ShardKey, version: int = 1) -> object:
        return agent.lease(key, version, None, turn=ReadPriority(1 << 30, 1))

    for key in (agent.key("nowhere"), rollout):
        assert isinstance(answer(key), LeaseRefusal)
    agent.read(rollout)
    assert answer(rollout) is None, "whoever has joined a round may have been decided without knowing"
    agent.logged(agent.publish(trainer, "a", 1))
    assert isinstance(answer(trainer, 2), LeaseRefusal)
