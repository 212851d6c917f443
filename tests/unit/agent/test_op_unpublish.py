"""Taking a shard back: nobody reads what may be written, and a release that broke off still ends."""

from tests.unit.agent.one_agent import OneAgent, digests_of

from tensorhub_agent.effects import Answer, BreakLease, CallUnpublish, Free
from tensorhub_agent.lease import LeaseMove
from tensorhub_agent.memory import Memory
from tensorhub_common.bounds import OUTCOME_S_MAX
from tensorhub_common.digests import root_digest
from tensorhub_common.wire.transfer import LeaseRefusal

ROOT = root_digest(digests_of("a"))


def published() -> OneAgent:
    agent = OneAgent()
    agent.join()
    agent.register("trainer")
    agent.publish(agent.key("trainer"), "a")
    agent.log()
    return agent


def test_no_lease_is_granted_from_the_call_on() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.unpublish(key)
    assert isinstance(agent.lease(key, 1, ROOT), LeaseRefusal)
    assert agent.memory(key) is Memory.DRAINING


def test_waits_for_the_last_reader() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    call = agent.unpublish(key)
    agent.log()
    assert agent.end_of(call) is None
    agent.do(agent.core.lease_ended("lease", LeaseMove.DONE, agent.now))
    agent.log()
    assert agent.end_of(call) == Answer(call=call)
    assert agent.memory(key) is Memory.EMPTY


def test_breaks_the_readers_at_the_bound_and_then_returns() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    call = agent.unpublish(key)
    agent.log()
    agent.tick(10.0)
    assert agent.last(BreakLease) is not None
    assert not agent.core.table.holds("lease")
    agent.log()
    assert agent.end_of(call) == Answer(call=call)


def test_without_a_registry_the_memory_must_not_be_overwritten() -> None:
    agent = published()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    assert agent.memory(key) is Memory.DRAINING
    again = agent.unpublish(key)
    agent.log()
    assert agent.end_of(again) == Answer(call=again)


def test_a_worker_that_comes_back_to_a_draining_shard_gets_it_drained() -> None:
    """It is told that nothing stands here, and so writes at once."""
    agent = published()
    key = agent.key("trainer")
    agent.unpublish(key)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=8)
    assert agent.end_of(call) is None
    agent.log()
    assert agent.end_of(call) == Answer(call=call)
    assert agent.memory(key) is Memory.EMPTY


def test_nothing_published() -> None:
    agent = OneAgent()
    agent.join()
    assert agent.error_of(agent.unpublish(agent.register("trainer"))) == "NotPublished"


def test_release_drains_and_frees() -> None:
    agent = published()
    key = agent.key("trainer")
    call = agent.release(key)
    agent.log()
    assert agent.end_of(call) == Answer(call=call)
    assert agent.last(Free) == Free(key)
    assert key not in agent.core.shards


def test_a_release_that_the_log_answers_too_late_still_ends_the_shard() -> None:
    """Else the agent would keep a shard that the log has forgotten, and every later call on it would be refused."""
    agent = published()
    key = agent.key("trainer")
    call = agent.release(key)
    agent.log(2)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    agent.log()
    assert key not in agent.core.shards
    assert agent.last(Free) == Free(key)


def test_a_call_that_waits_behind_a_release_is_answered() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.release(key)
    late = CallUnpublish(call=99, session=8, deadline=100.0)
    agent.do(agent.core.called(key, late, agent.now))
    agent.log()
    assert agent.error_of(99) == "AgentUnavailable"
