"""An agent in a job: what it says before it is let in, what it keeps, and what it lets go."""

from tests.unit.agent.core.scene import NBYTES, OneAgent, digests_of

from tensorhub_agent.core.agent import UNSENT_MAX
from tensorhub_agent.core.effects import (
    CallRegister,
    CallUnpublish,
    CompleteCall,
    EndFenced,
    FailCall,
    FreeShard,
    Rejoin,
)
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.protocol.log.commands import Expire, Join, Sender

ROOT = root_digest(digests_of("a"))


def published() -> OneAgent:
    agent = OneAgent()
    agent.join()
    agent.register("trainer")
    agent.publish(agent.key("trainer"), "a")
    agent.log()
    return agent


def counted(agent: OneAgent) -> int | None:
    """Return the version that the log says the trainer holds."""
    return agent.catalog.models["policy"].replicas["trainer"].version


def expire(agent: OneAgent) -> None:
    by = Sender("_registry", 1, 1)
    agent.take(Expire(by=by, agent="agent-0", incarnation=agent.core.incarnation, term=1))


def test_nothing_is_said_before_the_log_has_let_the_agent_in() -> None:
    """On a lane of its own a command could overtake the join, be refused as stale, and cost another join."""
    agent = OneAgent()
    agent.do(agent.core.join(1, "host", "site", 0.0))
    place = ShardSpec(agent.key("trainer"), 1, spot=False, layout="f" * 64, nbytes=NBYTES)
    agent.do(agent.core.register(place, CallRegister(call=1, session=7, deadline=10.0), 0.0))
    assert [type(command) for command in agent.unsaid] == [Join]
    agent.log()
    assert agent.end_of(1) == CompleteCall(call=1)


def test_calls_that_wait_until_the_agent_has_joined_are_bounded() -> None:
    """A worker that calls and gives up again and again fills no memory; other shards' calls are taken."""
    agent = published()
    other = agent.register("other")
    agent.do(agent.core.join(2, "host", "site", agent.now))
    key = agent.key("trainer")
    calls = []
    for _ in range(2 * UNSENT_MAX):
        calls.append(agent.unpublish(key))
        agent.tick(20.0)
        agent.tick(20.0)
    ends = [agent.end_of(call) for call in calls]
    assert all(isinstance(end, FailCall) and end.error == "RegistryUnavailable" for end in ends)
    assert isinstance(ends[-1], FailCall)
    assert "earlier calls wait" in ends[-1].message
    assert len(agent.core._unsent) < UNSENT_MAX + 8
    assert agent.end_of(agent.publish(other, "b")) is None
    agent.unsaid.clear()
    agent.join(3)
    call = agent.unpublish(key)
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)


def test_a_wrongly_expired_agent_states_what_it_has_and_is_believed() -> None:
    agent = published()
    expire(agent)
    assert agent.last(Rejoin) is not None
    assert counted(agent) is None
    agent.join(2)
    assert counted(agent) == 1
    assert agent.memory(agent.key("trainer")) is MemoryState.READY


def test_memory_that_the_log_does_not_know_is_no_version() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("trainer")
    again = OneAgent(catalog=agent.catalog)
    place = ShardSpec(key, 1, spot=False, layout="f" * 64, nbytes=NBYTES)
    again.core.adopt(place, ShardContents(MemoryState.READY, version=9, root=ROOT, digests=digests_of("a")))
    again.join(2)
    assert again.memory(key) is MemoryState.EMPTY
    assert key not in again.core.leases.offers


def test_a_shard_that_the_log_never_knew_is_let_go() -> None:
    agent = OneAgent()
    key = agent.key("trainer")
    agent.core.adopt(ShardSpec(key, 1, spot=False, layout="f" * 64, nbytes=NBYTES), ShardContents())
    agent.join()
    assert agent.last(FreeShard) == FreeShard(key)
    assert key not in agent.core.shards


def test_a_higher_incarnation_of_the_same_name_ends_this_process() -> None:
    agent = published()
    agent.take(Join(by=Sender("agent-0", 5, 1), host="host", site="site"))
    assert agent.last(EndFenced) is not None


def test_a_lane_is_kept_for_a_shard_that_comes_back() -> None:
    agent = published()
    key = agent.key("trainer")
    lane = next(name for name in agent.catalog.lanes if "/" in name)
    agent.release(key)
    agent.log()
    agent.register("other")
    agent.register("trainer")
    agent.publish(key, "b")
    assert agent.unsaid[0].by is not None
    assert agent.unsaid[0].by.lane == lane


def test_a_second_worker_is_refused_while_the_first_lives() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.core.shards[key].session = 7
    assert agent.error_of(agent.attach(key, session=8)) == "ReplicaConflict"
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=9)
    assert agent.end_of(call) == CompleteCall(call=call)


def test_a_call_on_a_shard_that_is_not_here() -> None:
    agent = published()
    unknown = agent.key("nowhere")
    agent.do(agent.core.called(unknown, CallUnpublish(call=50, session=7, deadline=1.0), 0.0))
    assert agent.error_of(50) == "AgentUnavailable"


def test_a_shard_that_is_gone_may_be_released_once_more() -> None:
    """Whoever gave up waiting for a release asks again, when it has come to its end."""
    agent = published()
    key = agent.key("trainer")
    agent.release(key)
    agent.log()
    again = agent.release(key)
    assert agent.end_of(again) == CompleteCall(call=again)
