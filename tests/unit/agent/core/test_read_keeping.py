"""What was filled counts once a manifest tells of it, so that an agent that is killed then finds the version again."""

from tests.unit.agent.core.scene import MODEL, OneAgent
from tests.unit.agent.core.test_read import filling, publish
from tests.unit.agent.core.test_retained_copies import made, read, retaining

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import CompleteCall, FailCall, FreeShard, Keep
from tensorhub_agent.core.retained_copies import RELEASE_S
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Filled


def said(agent: OneAgent) -> list[Filled]:
    return [command for command in agent.unsaid if isinstance(command, Filled)]


def keeping() -> tuple[OneAgent, OneAgent, int, Keep]:
    """Return a trainer, a reader to which all bytes have come, its call, and the manifest that is to be written."""
    trainer, reader, call = filling()
    reader.keeps = False
    reader.brought(reader.key("rollout"), "a")
    effect = reader.last(Keep)
    assert effect is not None
    return trainer, reader, call, effect


def test_the_log_is_told_once_the_manifest_stands() -> None:
    _, reader, call, effect = keeping()
    key = reader.key("rollout")
    reader.closed(key)
    reader.log()
    assert (said(reader), reader.end_of(call)) == ([], None)
    assert (effect.key, effect.version) == (key, 1)
    reader.kept(effect)
    [filled] = said(reader)
    assert (filled.version, filled.root) == (1, effect.root)
    reader.log()
    assert isinstance(reader.end_of(call), CompleteCall)


def test_a_read_of_which_the_manifest_comes_too_late_says_nothing_more() -> None:
    """The disk stands still until the call has ended; what the memory holds is a part of a version."""
    _, reader, call, effect = keeping()
    key = reader.key("rollout")
    reader.closed(key)
    reader.tick(10.0)
    reader.log()
    end = reader.end_of(call)
    assert isinstance(end, FailCall)
    assert (end.error, "manifest is not written" in end.message) == ("RoundTimeout", True)
    assert (reader.memory(key), reader.core.shards[key].contents.partial) == (MemoryState.EMPTY, True)
    reader.kept(effect)
    assert said(reader) == []


def test_without_a_registry_either_the_call_still_ends() -> None:
    _, reader, call, effect = keeping()
    reader.closed(reader.key("rollout"))
    reader.tick(10.0)
    reader.tick(OUTCOME_S_MAX)
    assert reader.error_of(call) is not None
    reader.kept(effect)
    assert said(reader) == []


def test_the_answer_to_an_earlier_fill_is_none_to_this_one() -> None:
    """The first one failed at its bound while the disk stood still; the second one is whole, and not written yet."""
    _, reader, call, first = keeping()
    key = reader.key("rollout")
    reader.closed(key)
    reader.tick(10.0)
    reader.log()
    assert reader.end_of(call) is not None
    again = reader.read(key)
    reader.log()
    reader.log()
    second = reader.last(Keep)
    assert second is not None
    assert second.number != first.number
    reader.kept(first)
    assert said(reader) == []
    reader.kept(second)
    reader.log()
    assert isinstance(reader.end_of(again), CompleteCall)


def test_a_workers_read_is_good_without_a_manifest() -> None:
    """No room for the manifest costs a read anew at the agent's next start, and nothing now."""
    _, reader, call, effect = keeping()
    reader.closed(reader.key("rollout"))
    reader.kept(effect, "no room")
    reader.log()
    assert isinstance(reader.end_of(call), CompleteCall)


def test_what_swaps_has_no_manifest_of_its_own_until_it_has_swapped() -> None:
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    key = reader.register("rollout", staged=True)
    publish(trainer, "a")
    call = reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    reader.brought(key, "a")
    reader.log()
    assert isinstance(reader.end_of(call), CompleteCall)
    assert reader.last(Keep) is None


def test_a_copy_without_a_manifest_is_let_go_and_never_counted() -> None:
    """The trainer waits for a copy that outlives a process; one that would not is placed elsewhere."""
    agent = retaining()
    trainer = agent.key("trainer")
    call = agent.unpublish(trainer)
    copy = made(agent)
    agent.keeps = False
    read(agent, copy)
    effect = agent.last(Keep)
    assert effect is not None
    agent.kept(effect, "the disk is full")
    agent.log()
    assert not agent.catalog.models[MODEL].replicas[copy.replica].version
    assert (agent.memory(trainer), agent.end_of(call)) == (MemoryState.READY, None)
    agent.tick(RELEASE_S / 2)
    agent.log()
    assert agent.last(FreeShard) == FreeShard(copy)
    assert agent.memory(trainer) is MemoryState.READY


def test_the_failure_of_an_earlier_fill_gives_up_no_copy() -> None:
    """The first fill has ended when its failure is told; the second one stands, and goes on standing."""
    agent = retaining()
    agent.keeps = False
    copy = made(agent)
    read(agent, copy)
    first = agent.last(Keep)
    assert first is not None
    agent.do(agent.core.join(2, "host", "site", agent.now))
    agent.log()
    agent.tick(CoreConfig().copy_again_s)
    agent.log()
    read(agent, copy)
    second = agent.last(Keep)
    assert second is not None
    assert second.number != first.number
    agent.kept(first, "the disk is full")
    agent.kept(second)
    agent.log()
    agent.tick(CoreConfig().copy_again_s)
    agent.log()
    assert agent.memory(copy) is MemoryState.READY
    assert not agent.core.retained_copies.copies[copy].releasing
