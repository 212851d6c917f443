"""Taking a shard back: nobody reads what may be written, and a release that broke off still ends."""

from collections.abc import Callable

import pytest

from tensorhub_agent.core.effects import AppendCommand, BreakLease, CallUnpublish, SaveManifest
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseRefusal
from tensorhub_common.protocol.log.commands import Expire, Retain, Sender
from tensorhub_simulator.drivers.agent import MODEL, SESSION, AgentsWithCopies, OneAgent, root_of
from tensorhub_simulator.drivers.agent import published as published_by_one

ROOT = root_of("a")
DRAINING, EMPTY, READY = MemoryState.DRAINING, MemoryState.EMPTY, MemoryState.READY
Call = Callable[[OneAgent, ShardKey], int]
each_call = pytest.mark.parametrize("call_it", [OneAgent.unpublish, OneAgent.release])


def published(*, retained: bool = False) -> tuple[OneAgent, ShardKey]:
    """`retained`: it is the last copy of a retained version, which nobody has room for another of."""
    agent, key = published_by_one()
    if retained:
        agent.take(Retain(model=MODEL, last=1))
    return agent, key


def serves(agent: OneAgent, key: ShardKey) -> bool:
    """Check that the shard is read again, as the log says."""
    agent.open_lease(key, 1, ROOT, f"again-{agent.now}")
    return (agent.memory(key), agent.counted(key), agent.core.shards[key].detached) == (READY, 1, None)


@each_call
@pytest.mark.parametrize("reader", ["none", "ends", "stays"])
def test_from_the_call_on_nobody_reads_and_it_returns_after_the_last_reader(call_it: Call, reader: str) -> None:
    """Who reads is waited for, and broken at the bound."""
    agent, key = published()
    if reader != "none":
        agent.open_lease(key, 1, ROOT)
    agent.seen.clear()
    call = call_it(agent, key)
    assert isinstance(agent.lease(key, 1, ROOT, "late"), LeaseRefusal)
    assert (agent.memory(key), agent.need(SaveManifest).state) == (DRAINING, "draining")
    wanted = [type(effect) for effect in agent.seen]
    assert wanted.index(SaveManifest) < wanted.index(AppendCommand), "the manifest says it before the log is told"
    agent.log()
    if reader != "none":
        assert agent.result(call) is None
        if reader == "ends":
            agent.end_lease()
        else:
            agent.tick(10.0)
        assert (agent.last(BreakLease) is not None) == (reader == "stays")
        assert not agent.core.leases.holds("lease")
        agent.log()
    assert agent.result(call) == "done"
    if call_it is OneAgent.release:
        assert (agent.freed(), agent.core.shards) == ([key], {})
    else:
        assert agent.memory(key) is EMPTY


def test_without_a_registry_the_memory_must_not_be_overwritten_before_another_call() -> None:
    """The same call may be made again. A worker that comes back is told that nothing stands here, once that is so."""
    for again in (OneAgent.unpublish, back_again):
        agent, key = published()
        agent.silence(agent.unpublish(key))
        assert agent.memory(key) is DRAINING
        call = again(agent, key)
        assert agent.result(call) is None
        agent.log()
        assert (agent.result(call), agent.memory(key)) == ("done", EMPTY)


def back_again(agent: OneAgent, key: ShardKey) -> int:
    """Let the next worker come to the shard."""
    agent.worker_gone()
    return agent.attach(key, SESSION + 1)


@pytest.mark.parametrize("taken", [0, 2])
def test_a_release_without_a_registry_happens_once_it_answers(taken: int) -> None:
    """The caller was told so. The same where the log had heard of it: its later word still ends the shard.

    Else the agent would keep a shard that the log has forgotten, and every later call on it would be refused.
    """
    agent, key = published()
    if not taken:
        agent.open_lease(key, 1, ROOT)
    call = agent.release(key)
    agent.log(taken)
    agent.silence(call)
    assert not agent.core.leases.holds("lease")
    agent.log()
    assert (agent.freed(), agent.core.shards) == ([key], {})
    assert "trainer" not in agent.catalog.models[MODEL].replicas


# A registry that is silent until the call has given up.


def with_room() -> tuple[OneAgent, ShardKey, Callable[[], None]]:
    """One with the last copy of a retained version, and what lets the copy stand for which another agent has room."""
    agents = AgentsWithCopies(2)
    trainer, other = agents.all

    def copies() -> None:
        other.now = trainer.now
        agents.fill(agents.made)

    return trainer, trainer.key("trainer"), copies


def test_what_the_log_goes_on_counting_as_published_is_read_again() -> None:
    """The log refuses a call whose caller was told that it is silent: so the shard is a holder, and serves."""
    for call_it in (OneAgent.unpublish, OneAgent.release):
        agent, key = published(retained=True)
        agent.silence(call_it(agent, key))
        assert isinstance(agent.lease(key, 1, ROOT), LeaseRefusal)
        agent.log()
        assert serves(agent, key)
        again = agent.logged(agent.unpublish(key))
        assert agent.result(again) == "RetentionFull"


@pytest.mark.parametrize("comes", [True, False])
def test_what_the_log_holds_back_is_read_until_another_copy_stands(*, comes: bool) -> None:
    agent, key, copies = with_room()
    agent.silence(agent.unpublish(key))
    agent.log()
    assert agent.memory(key) is READY
    agent.open_lease(key, 1, ROOT, "the-copy")
    if not comes:
        agent.take(Expire(by=Sender("_registry", 1, 1), agent="agent-1", incarnation=1, term=1))
        assert serves(agent, key)
        return
    copies()
    assert agent.memory(key) is DRAINING
    assert isinstance(agent.lease(key, 1, ROOT, "late"), LeaseRefusal)
    agent.end_lease("the-copy")
    agent.log()
    assert agent.memory(key) is DRAINING, "nobody has called, so nobody was told that it may be overwritten"
    again = agent.logged(agent.unpublish(key))
    assert (agent.result(again), agent.memory(key)) == ("done", EMPTY)


def test_who_reads_while_it_is_held_back_is_broken_at_the_bound_too() -> None:
    """The log's word came after the bound had broken the readers of before; the copy stands in time all the same."""
    agent, key, copies = with_room()
    call = agent.unpublish(key)
    agent.tick_and_log(10.0)
    assert agent.memory(key) is READY
    agent.open_lease(key, 1, ROOT, "reads-on")
    copies()
    assert agent.result(call) is None
    agent.tick(OUTCOME_S_MAX)
    assert agent.need(BreakLease).lease == "reads-on"
    agent.log()
    assert (agent.result(call), agent.memory(key)) == ("done", EMPTY)


def test_a_read_is_not_answered_by_the_end_of_an_unpublish_that_gave_up() -> None:
    """The log was told of the drained memory and is silent; the worker reads, and then the log answers both."""
    agent, key = published()
    call = agent.unpublish(key)
    agent.log(1)
    agent.silence(call)
    read = agent.logged(agent.read(key))
    assert (agent.memory(key), agent.core.shards[key].detached) == (EMPTY, None)
    assert agent.result(read) is None, "its round waits for a version"
    agent.tick_and_log(10.0)
    assert agent.result(read) == "VersionUnavailable"


def test_the_answer_to_a_call_that_asked_to_stay_serves_again() -> None:
    """Held back, the bound reached, and then the registry falls silent: nobody knows, until it speaks."""
    agent, key, copies = with_room()
    call = agent.logged(agent.unpublish(key))
    assert agent.memory(key) is READY
    agent.silence(call)
    assert agent.memory(key) is DRAINING
    agent.log()
    assert serves(agent, key)
    again = agent.logged(agent.unpublish(key))
    assert agent.result(again) is None
    agent.end_lease(f"again-{agent.now}")
    copies()
    assert agent.result(again) == "done"


@each_call
def test_an_incarnation_that_is_over_settles_it(call_it: Call) -> None:
    """An unpublish may be called again; of a release that goes on, for its caller wants the shard gone."""
    agent, key = published(retained=call_it is OneAgent.unpublish)
    agent.silence(call_it(agent, key))
    agent.unsaid.clear()
    agent.join(2)
    if call_it is OneAgent.release:
        assert key not in agent.core.shards
        return
    assert agent.core.shards[key].detached is None
    again = agent.logged(agent.unpublish(key))
    assert agent.result(again) == "done"


def test_a_release_that_waits_goes_on_when_the_agent_has_joined_anew() -> None:
    """That the agent was taken for lost meanwhile is no reason to ask again; a call behind it is answered."""
    agent, key = published()
    call = agent.release(key)
    late = agent.called(key, CallUnpublish(call=99, session=8, deadline=100.0))
    agent.unsaid.clear()
    agent.join(2)
    assert (agent.result(call), agent.result(late)) == ("done", "AgentUnavailable")
    assert key not in agent.core.shards


def test_a_release_that_the_log_was_told_of_excludes_other_calls_but_the_same_once_more() -> None:
    agent, key = published()
    call = agent.release(key)
    agent.log(2)
    agent.silence(call)
    assert agent.result(agent.unpublish(key)) == agent.result(agent.attach(key, SESSION)) == "ReplicaConflict"
    again = agent.logged(agent.release(key))
    assert agent.result(again) == "done"
    assert key not in agent.core.shards


def test_a_worker_that_comes_back_before_the_log_was_told_keeps_the_shard() -> None:
    agent, key = published()
    agent.silence(agent.release(key))
    call = back_again(agent, key)
    agent.log()
    assert (agent.result(call), agent.memory(key)) == ("done", EMPTY)


@each_call
def test_a_worker_that_comes_back_to_what_the_log_holds_back_keeps_it(call_it: Call) -> None:
    """The other copy that was waited for stands later, and nothing drains behind the new worker's back."""
    agent, key, copies = with_room()
    agent.silence(call_it(agent, key))
    agent.log()
    assert agent.memory(key) is READY
    call = back_again(agent, key)
    agent.log()
    assert (agent.result(call), agent.memory(key)) == ("done", READY)
    copies()
    agent.log()
    assert agent.counted(key) == 1
    agent.open_lease(key, 1, ROOT)
    again = agent.unpublish(key)
    agent.end_lease()
    agent.log()
    assert (agent.result(again), agent.memory(key)) == ("done", EMPTY)
