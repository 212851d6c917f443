"""An agent whose job is deleted: what it frees and when, what callers are told, and that it says nothing more."""

from tests.unit.agent.core.scene import NBYTES, SESSION, OneAgent, digests_of

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import AllocateCopy, BreakLease, CallRead, CallRegister, CopyMade, FailCall, FreeShard
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import DeleteJob, Retain
from tensorhub_common.protocol.log.events import CommandRejected

ROOT = root_digest(digests_of("a"))
WHY = "job 'run-7' was deleted: take another name"


def published() -> OneAgent:
    agent = OneAgent()
    agent.join()
    agent.publish(agent.register("trainer"), "a")
    agent.log()
    return agent


def freed(agent: OneAgent) -> list[str]:
    return [effect.key.replica for effect in agent.seen if isinstance(effect, FreeShard)]


def test_all_is_freed_and_nothing_more_is_said() -> None:
    """Readers are told, and whoever calls later hears why."""
    agent = published()
    key = agent.key("trainer")
    agent.open_lease(key, 1, ROOT)
    agent.take(DeleteJob())
    assert freed(agent) == ["trainer"]
    assert [effect.lease for effect in agent.seen if isinstance(effect, BreakLease)] == ["lease"]
    assert agent.core.is_over
    late = [agent.unpublish(key), agent.publish(key, "b", 2)]
    agent.register("late")
    late.append(agent.calls)
    assert [agent.error_of(call) for call in late] == ["JobGone"] * 3
    assert freed(agent) == ["trainer", "late"]
    assert agent.unsaid == []
    agent.take(DeleteJob())
    agent.do(agent.core.join(2, "host", "site", agent.now))
    agent.tick(100.0)
    assert agent.core.deadline() is None


def test_a_worker_that_comes_back_to_a_draining_shard_is_told_and_gets_no_memory() -> None:
    agent = published()
    key = agent.key("trainer")
    agent.unpublish(key)
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    agent.do(agent.core.worker_gone(SESSION, agent.now))
    call = agent.attach(key, SESSION + 1)
    agent.take(DeleteJob())
    assert freed(agent) == ["trainer"]
    assert agent.error_of(call) == "JobGone"


def test_a_publication_that_waits_for_its_siblings_ends() -> None:
    """It has been said and counts for nothing: the caller is told that the job is gone, not that the agent was."""
    agent = OneAgent()
    agent.join()
    key = agent.register("trainer", 0, 2)
    call = agent.publish(key, "a", 1)
    agent.log()
    assert agent.end_of(call) is None
    agent.take(DeleteJob())
    end = agent.end_of(call)
    assert isinstance(end, FailCall)
    assert (end.error, "--forget" in end.message) == ("JobGone", True)
    assert freed(agent) == ["trainer"]


def test_memory_is_not_freed_while_a_read_may_write_into_it() -> None:
    """The source is closed first; when it can bring nothing any more, the call ends and the memory goes."""
    agent = published()
    reader = agent.register("reader")
    call = agent.read(reader)
    agent.log()
    agent.plan(reader, "agent-0")
    agent.opened(reader, "a")
    agent.log()
    assert agent.memory(reader) is MemoryState.FILLING
    agent.take(DeleteJob())
    assert freed(agent) == ["trainer"]
    assert agent.end_of(call) is None
    assert not agent.core.is_over
    agent.brought(reader, "a")
    agent.closed(reader)
    assert agent.error_of(call) == "JobGone"
    assert freed(agent) == ["trainer", "reader"]
    assert agent.core.is_over


def test_who_waits_to_be_let_in_is_not_let_in() -> None:
    """The agent joins a job that was deleted meanwhile: the log's refusal is all that it hears, and it is enough."""
    agent = OneAgent()
    held = ShardContents(MemoryState.READY, version=1, root=ROOT, digests=digests_of("a"))
    place = ShardSpec(agent.key("trainer"), 1, spot=False, layout="f" * 64, nbytes=NBYTES)
    agent.core.adopt(place, held)
    agent.do(agent.core.join(1, "host", "site", 0.0))
    late = ShardSpec(agent.key("late"), 1, spot=False, layout="f" * 64, nbytes=NBYTES)
    agent.do(agent.core.register(late, CallRegister(call=1, session=7, deadline=10.0), 0.0))
    agent.catalog.deleted = 1
    [rejected] = agent.log(1)
    assert isinstance(rejected, CommandRejected)
    assert sorted(freed(agent)) == ["late", "trainer"]
    assert agent.error_of(1) == "JobGone"
    assert agent.unsaid == []


def test_a_copy_that_is_being_made_is_let_go_when_it_is_made() -> None:
    """The log wanted it, and the job is gone before there is memory for it."""
    agent = OneAgent()
    agent.core.config = CoreConfig(cache_bytes=1000)
    agent.join()
    agent.publish(agent.register("trainer"), "a")
    agent.log()
    agent.take(Retain(model="policy", last=1))
    wanted = agent.last(AllocateCopy)
    assert wanted is not None
    agent.take(DeleteJob())
    agent.do(agent.core.copy_made(CopyMade(wanted.key, 1, wanted.layout, nbytes=NBYTES), agent.now))
    assert freed(agent) == ["trainer", wanted.key.replica]
    assert agent.core.is_over


def test_the_refusal_from_outside_the_log_does_the_same() -> None:
    """An agent that was away asks a registry to open the job, and is told; once more changes nothing."""
    agent = published()
    agent.do(agent.core.job_deleted(WHY, agent.now))
    assert freed(agent) == ["trainer"]
    assert agent.core.job_deleted(WHY, agent.now) == []
    late = CallRead(call=9, session=7, deadline=1.0, want="latest", patience=1.0)
    assert agent.core.called(agent.key("trainer"), late, 0.0) == [FailCall(9, "JobGone", WHY)]
