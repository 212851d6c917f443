"""An agent whose job is deleted: what it frees and when, what callers are told, and that it says nothing more."""

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import AllocateCopy, BreakLease, CallRead, CopyMade, FailCall
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.protocol.log.commands import DeleteJob, Retain
from tensorhub_common.protocol.log.events import CommandRejected
from tensorhub_simulator.drivers.agent import NBYTES, SESSION, OneAgent, joined, published, ready, root_of, spec_of

WHY = "job 'run-7' was deleted: take another name"


def test_all_is_freed_and_nothing_more_is_said() -> None:
    """Readers are told, and whoever calls later hears why."""
    agent, key = published()
    agent.open_lease(key, 1, root_of("a"))
    agent.take(DeleteJob())
    assert agent.freed() == [key]
    assert [effect.lease for effect in agent.all(BreakLease)] == ["lease"]
    assert agent.core.is_over
    late = [agent.unpublish(key), agent.publish(key, "b", 2), agent.begin_register(spec_of(agent.key("late")))]
    assert [agent.result(call) for call in late] == ["JobGone"] * 3
    assert agent.freed() == [key, agent.key("late")]
    assert agent.unsaid == []
    agent.take(DeleteJob())
    agent.joins(2)
    agent.tick(100.0)
    assert agent.core.deadline() is None


def test_a_worker_that_comes_back_to_a_draining_shard_is_told_and_gets_no_memory() -> None:
    agent, key = published()
    agent.silence(agent.unpublish(key))
    agent.worker_gone()
    call = agent.attach(key, SESSION + 1)
    agent.take(DeleteJob())
    assert agent.freed() == [key]
    assert agent.result(call) == "JobGone"


def test_a_publication_that_waits_for_its_siblings_ends() -> None:
    """It has been said and counts for nothing: the caller is told that the job is gone, not that the agent was."""
    agent = joined()
    key = agent.register("trainer", 0, 2)
    call = agent.logged(agent.publish(key, "a", 1))
    assert agent.result(call) is None
    agent.take(DeleteJob())
    assert agent.result(call) == "JobGone"
    assert "--forget" in agent.why(call)
    assert agent.freed() == [key]


def test_memory_is_not_freed_while_a_read_may_write_into_it() -> None:
    """The source is closed first; when it can bring nothing any more, the call ends and the memory goes."""
    agent, key = published()
    reader = agent.register("reader")
    call = agent.read(reader)
    agent.begin_filling(reader, "a", "agent-0")
    assert agent.memory(reader) is MemoryState.FILLING
    agent.take(DeleteJob())
    assert agent.freed() == [key]
    assert agent.result(call) is None
    assert not agent.core.is_over
    agent.brought(reader, "a")
    agent.closed(reader)
    assert agent.result(call) == "JobGone"
    assert agent.freed() == [key, reader]
    assert agent.core.is_over


def test_who_waits_to_be_let_in_is_not_let_in() -> None:
    """The agent joins a job that was deleted meanwhile: the log's refusal is all that it hears, and it is enough."""
    agent = OneAgent()
    key, late = agent.key("trainer"), agent.key("late")
    agent.core.adopt(spec_of(key), ready())
    agent.joins()
    call = agent.begin_register(spec_of(late))
    agent.catalog.deleted = 1
    [rejected] = agent.log(1)
    assert isinstance(rejected, CommandRejected)
    assert sorted(agent.freed()) == [late, key]
    assert agent.result(call) == "JobGone"
    assert agent.unsaid == []


def test_a_copy_that_is_being_made_is_let_go_when_it_is_made() -> None:
    """The log wanted it, and the job is gone before there is memory for it."""
    agent = OneAgent(config=CoreConfig(cache_bytes=1000))
    agent.join()
    key = agent.register("trainer")
    agent.logged(agent.publish(key, "a"))
    agent.take(Retain(model=key.model, last=1))
    wanted = agent.need(AllocateCopy)
    agent.take(DeleteJob())
    agent.do(agent.core.copy_made(CopyMade(wanted.key, 1, wanted.layout, nbytes=NBYTES), agent.now))
    assert agent.freed() == [key, wanted.key]
    assert agent.core.is_over


def test_the_refusal_from_outside_the_log_does_the_same() -> None:
    """An agent that was away asks a registry to open the job, and is told; once more changes nothing."""
    agent, key = published()
    agent.do(agent.core.job_deleted(WHY, agent.now))
    assert agent.freed() == [key]
    assert agent.core.job_deleted(WHY, agent.now) == []
    late = CallRead(call=9, session=7, deadline=1.0, want="latest", patience=1.0)
    assert agent.core.called(key, late, 0.0) == [FailCall(9, "JobGone", WHY)]
