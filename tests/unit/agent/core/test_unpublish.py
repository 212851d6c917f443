"""Taking a shard back: nobody reads what may be written, and a release that broke off still ends."""

from collections.abc import Callable
from itertools import count

import pytest
from tests.unit.agent.core.scene import MODEL, OneAgent, digests_of

from tensorhub_agent.core.effects import BreakLease, CallUnpublish, CompleteCall, FreeShard
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseRefusal
from tensorhub_common.protocol.log.commands import Expire, Filled, Granted, Join, Retain, Sender, Want

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
    assert agent.memory(key) is MemoryState.DRAINING


def test_waits_for_the_last_reader() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    call = agent.unpublish(key)
    agent.log()
    assert agent.end_of(call) is None
    agent.do(agent.core.lease_ended("lease", LeaseTransition.DONE, agent.now))
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.EMPTY


def test_breaks_the_readers_at_the_bound_and_then_returns() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    call = agent.unpublish(key)
    agent.log()
    agent.tick(10.0)
    assert agent.last(BreakLease) is not None
    assert not agent.core.leases.holds("lease")
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)


def test_without_a_registry_the_memory_must_not_be_overwritten() -> None:
    agent = published()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    assert agent.memory(key) is MemoryState.DRAINING
    again = agent.unpublish(key)
    agent.log()
    assert agent.end_of(again) == CompleteCall(call=again)


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
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.EMPTY


def test_nothing_published() -> None:
    agent = OneAgent()
    agent.join()
    assert agent.error_of(agent.unpublish(agent.register("trainer"))) == "NotPublished"


def test_release_drains_and_frees() -> None:
    agent = published()
    key = agent.key("trainer")
    call = agent.release(key)
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.last(FreeShard) == FreeShard(key)
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
    assert agent.last(FreeShard) == FreeShard(key)


def test_a_call_that_waits_behind_a_release_is_answered() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.release(key)
    late = CallUnpublish(call=99, session=8, deadline=100.0)
    agent.do(agent.core.called(key, late, agent.now))
    agent.log()
    assert agent.error_of(99) == "AgentUnavailable"


# --------------------------------------------------------------------------------------------- a silent registry


def given_up(agent: OneAgent, call: int) -> None:
    """Let time pass until the call has given up, with no word of the log."""
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"


def retained() -> OneAgent:
    """Return an agent with the last copy of a retained version, which nobody has room for another of."""
    agent = published()
    agent.take(Retain(model=MODEL, last=1))
    return agent


def with_room(agent: OneAgent) -> Sender:
    """Let another agent come that has room for copies."""
    agent.take(Join(by=Sender("agent-1", 1, 1), host="other", site="site", cache_bytes=1_000_000))
    return Sender("agent-1/1", 1, 1)


def test_what_the_log_goes_on_counting_as_published_is_read_again() -> None:
    """The log refuses an unpublish whose caller was told that it is silent: so the shard is a holder, and serves."""
    agent = retained()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    given_up(agent, call)
    assert isinstance(agent.lease(key, 1, ROOT), LeaseRefusal)
    agent.log()
    assert agent.catalog.models[MODEL].replicas["trainer"].version == 1
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT, "reads-again")
    assert agent.core.shards[key].detached is None
    again = agent.unpublish(key)
    agent.log()
    assert agent.error_of(again) == "RetentionFull"


def test_what_the_log_holds_back_is_read_until_another_copy_stands() -> None:
    agent = retained()
    key = agent.key("trainer")
    other = with_room(agent)
    given_up(agent, agent.unpublish(key))
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT, "the-copy")
    [cache] = [name for name in agent.catalog.models[MODEL].replicas if name != "trainer"]
    copied(agent, other, cache)
    assert agent.memory(key) is MemoryState.DRAINING
    assert isinstance(agent.lease(key, 1, ROOT, "late"), LeaseRefusal)
    agent.do(agent.core.lease_ended("the-copy", LeaseTransition.DONE, agent.now))
    agent.log()
    assert agent.memory(key) is MemoryState.DRAINING, "nobody has called, so nobody was told that it may be overwritten"
    again = agent.unpublish(key)
    agent.log()
    assert agent.end_of(again) == CompleteCall(call=again)
    assert agent.memory(key) is MemoryState.EMPTY


def copied(agent: OneAgent, by: Sender, cache: str) -> None:
    """Let the other agent make its copy."""
    shard = {"model": MODEL, "replica": cache, "shard": 0}
    numbers = count(by.n)

    def next_by() -> Sender:
        return Sender(by.lane, by.incarnation, next(numbers))

    agent.take(Want(by=next_by(), **shard, want=1))  # type: ignore[arg-type]  # Its fields are these.
    current = agent.catalog.models[MODEL].replicas[cache].round
    assert current is not None
    agent.take(Granted(by=next_by(), **shard, round=current.number, attempt=1))  # type: ignore[arg-type]
    agent.take(Filled(by=next_by(), **shard, round=current.number, version=1, root=ROOT, waits=True))  # type: ignore[arg-type]


def test_who_reads_while_it_is_held_back_is_broken_at_the_bound_too() -> None:
    """The log's word came after the bound had broken the readers of before; the copy stands in time all the same."""
    agent = retained()
    key = agent.key("trainer")
    other = with_room(agent)
    call = agent.unpublish(key)
    agent.tick(10.0)
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT, "reads-on")
    [cache] = [name for name in agent.catalog.models[MODEL].replicas if name != "trainer"]
    copied(agent, other, cache)
    assert agent.end_of(call) is None
    agent.tick(OUTCOME_S_MAX)
    assert agent.last(BreakLease) == BreakLease("reads-on", "the bound of unpublish was reached")
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.EMPTY


def test_where_the_copy_does_not_come_the_shard_goes_on_being_read() -> None:
    agent = retained()
    key = agent.key("trainer")
    with_room(agent)
    given_up(agent, agent.unpublish(key))
    agent.log()
    agent.take(Expire(by=Sender("_registry", 1, 1), agent="agent-1", incarnation=1, term=1))
    assert agent.memory(key) is MemoryState.READY
    assert agent.core.shards[key].detached is None
    agent.open_lease(key, 1, ROOT, "reads-again")


def test_a_read_is_not_answered_by_the_end_of_an_unpublish_that_gave_up() -> None:
    """The log was told of the drained memory and is silent; the worker reads, and then the log answers both."""
    agent = published()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log(1)
    given_up(agent, call)
    read = agent.read(key)
    agent.log()
    assert agent.memory(key) is MemoryState.EMPTY
    assert agent.core.shards[key].detached is None
    assert agent.end_of(read) is None, "its round waits for a version"
    agent.tick(10.0)
    agent.log()
    assert agent.error_of(read) == "VersionUnavailable"


def test_the_answer_to_a_call_that_asked_to_stay_serves_again() -> None:
    """Held back, the bound reached, and then the registry falls silent: nobody knows, until it speaks."""
    agent = retained()
    key = agent.key("trainer")
    with_room(agent)
    call = agent.unpublish(key)
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    given_up(agent, call)
    assert agent.memory(key) is MemoryState.DRAINING
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT, "reads-again")


def test_an_incarnation_that_is_over_settles_it() -> None:
    agent = retained()
    key = agent.key("trainer")
    given_up(agent, agent.unpublish(key))
    agent.join(2)
    assert agent.core.shards[key].detached is None
    again = agent.unpublish(key)
    agent.log()
    assert agent.end_of(again) == CompleteCall(call=again)


def test_a_release_without_a_registry_happens_once_it_answers() -> None:
    """The caller was told so. A reader that was there is broken at the bound, as in any release."""
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    call = agent.release(key)
    given_up(agent, call)
    assert not agent.core.leases.holds("lease")
    agent.log()
    assert key not in agent.core.shards
    assert agent.last(FreeShard) == FreeShard(key)
    assert "trainer" not in agent.catalog.models[MODEL].replicas


def test_a_release_waits_for_who_maps_the_memory_without_a_caller_too() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.lend(key, 1, ROOT)
    call = agent.release(key)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    agent.log()
    agent.probed(lent=True)
    assert key in agent.core.shards
    agent.tick(1.0)
    agent.probed(lent=False)
    agent.log()
    assert key not in agent.core.shards


def test_the_last_copy_of_a_retained_version_is_not_released_behind_anybodys_back() -> None:
    agent = retained()
    key = agent.key("trainer")
    given_up(agent, agent.release(key))
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT)


def test_a_release_that_the_log_was_told_of_excludes_other_calls_but_the_same_once_more() -> None:
    agent = published()
    key = agent.key("trainer")
    call = agent.release(key)
    agent.log(2)
    given_up(agent, call)
    assert agent.error_of(agent.unpublish(key)) == "ReplicaConflict"
    assert agent.error_of(agent.attach(key, 7)) == "ReplicaConflict"
    again = agent.release(key)
    agent.log()
    assert agent.end_of(again) == CompleteCall(call=again)
    assert key not in agent.core.shards


def test_a_worker_that_comes_back_before_the_log_was_told_keeps_the_shard() -> None:
    agent = published()
    key = agent.key("trainer")
    given_up(agent, agent.release(key))
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=8)
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.EMPTY
    assert key in agent.core.shards


@pytest.mark.parametrize("given_up_by", [OneAgent.release, OneAgent.unpublish])
def test_a_worker_that_comes_back_to_what_the_log_holds_back_keeps_it(
    given_up_by: Callable[[OneAgent, ShardKey], int],
) -> None:
    """The other copy that was waited for stands later, and nothing drains behind the new worker's back."""
    agent = retained()
    key = agent.key("trainer")
    other = with_room(agent)
    given_up(agent, given_up_by(agent, key))
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=8)
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.READY
    [cache] = [name for name in agent.catalog.models[MODEL].replicas if name != "trainer"]
    copied(agent, other, cache)
    agent.log()
    assert agent.catalog.models[MODEL].replicas["trainer"].version == 1
    agent.open_lease(key, 1, ROOT, "reads-again")
    again = agent.unpublish(key)
    agent.do(agent.core.lease_ended("reads-again", LeaseTransition.DONE, agent.now))
    agent.log()
    assert agent.end_of(again) == CompleteCall(call=again)
    assert agent.memory(key) is MemoryState.EMPTY


def test_a_release_goes_on_when_the_agent_has_joined_anew() -> None:
    agent = published()
    key = agent.key("trainer")
    given_up(agent, agent.release(key))
    agent.unsaid.clear()
    agent.join(2)
    agent.log()
    assert key not in agent.core.shards


def test_a_release_that_waits_goes_on_when_the_agent_has_joined_anew() -> None:
    """Its caller wants the shard gone, and that the agent was taken for lost meanwhile is no reason to ask again."""
    agent = published()
    key = agent.key("trainer")
    call = agent.release(key)
    agent.unsaid.clear()
    agent.join(2)
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert key not in agent.core.shards
