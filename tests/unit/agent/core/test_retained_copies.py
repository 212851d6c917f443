"""Copies of retained versions: made where the log places them, read again when that fails, let go when it says so."""

from tests.unit.agent.core.scene import MODEL, NBYTES, OneAgent, digests_of

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import AllocateCopy, CompleteCall, CopyMade, FreeShard, SourceLost
from tensorhub_agent.core.retained_copies import TRIES_MAX
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey as AgentKey
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Release, Retain, Stay

ROOT = root_digest(digests_of("a"))


def retaining(cache_bytes: int = 1000) -> OneAgent:
    """Return an agent that has published version 1 of a model whose last version is retained."""
    agent = OneAgent()
    agent.core.config = CoreConfig(cache_bytes=cache_bytes)
    agent.join()
    agent.register("trainer")
    agent.take(Retain(model=MODEL, last=1))
    agent.publish(agent.key("trainer"), "a")
    agent.log()
    return agent


def wanted(agent: OneAgent) -> AllocateCopy:
    found = agent.last(AllocateCopy)
    assert found is not None
    return found


def made(agent: OneAgent, failure: str | None = None) -> AgentKey:
    """Answer the last wish for memory; returns which copy it is."""
    wish = wanted(agent)
    answer = CopyMade(wish.key, wish.shards, wish.layout, nbytes=() if failure else NBYTES, failure=failure)
    agent.do(agent.core.copy_made(answer, agent.now))
    agent.log()
    return wish.key


def read(agent: OneAgent, key: AgentKey) -> None:
    """Let the copy's read go through."""
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    agent.brought(key, "a")
    agent.closed(key)
    agent.log()


def test_a_copy_is_made_read_and_then_lets_the_trainer_go() -> None:
    agent = retaining()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log()
    assert agent.end_of(call) is None
    assert agent.memory(key) is MemoryState.READY
    copy = made(agent)
    assert agent.memory(copy) is MemoryState.EMPTY
    read(agent, copy)
    assert agent.memory(copy) is MemoryState.READY
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.EMPTY


def test_a_shard_that_is_held_back_grants_leases() -> None:
    agent = retaining()
    key = agent.key("trainer")
    agent.unpublish(key)
    agent.log()
    agent.open_lease(key, 1, ROOT)


def test_at_the_bound_the_shard_stays_published_and_the_call_raises() -> None:
    agent = retaining()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log()
    agent.tick(10.0)
    assert isinstance(agent.unsaid[-1], Stay)
    agent.log()
    assert agent.error_of(call) == "RetentionFull"
    assert agent.memory(key) is MemoryState.READY
    agent.open_lease(key, 1, ROOT)


def test_without_room_it_raises_at_once_and_stays_published() -> None:
    agent = retaining(cache_bytes=0)
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log()
    assert agent.error_of(call) == "RetentionFull"
    agent.open_lease(key, 1, ROOT)


def test_with_no_word_of_the_registry_at_the_bound_the_memory_must_not_be_overwritten() -> None:
    agent = retaining()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log()
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    assert agent.memory(key) is MemoryState.DRAINING
    agent.log()
    again = agent.unpublish(key)
    agent.log()
    assert agent.end_of(again) is None
    read(agent, made(agent))
    assert agent.end_of(again) == CompleteCall(call=again)


def test_an_agent_that_joins_anew_holds_the_shard_back_again() -> None:
    agent = retaining()
    key = agent.key("trainer")
    call = agent.unpublish(key)
    agent.log()
    agent.join(2)
    assert agent.end_of(call) is None
    assert agent.memory(key) is MemoryState.READY
    read(agent, made(agent))
    assert agent.end_of(call) == CompleteCall(call=call)


def test_a_copy_without_memory_is_released_and_who_waited_for_it_is_told() -> None:
    agent = retaining()
    call = agent.unpublish(agent.key("trainer"))
    agent.log()
    made(agent, failure="no room")
    assert agent.error_of(call) == "RetentionFull"


def test_a_read_that_fails_is_tried_again_and_given_up_in_the_end() -> None:
    agent = retaining()
    copy = made(agent)
    for _ in range(TRIES_MAX):
        agent.do(agent.core.shards[copy].operation.abandon(agent.now) or [])  # type: ignore[union-attr]
        agent.do(agent.core._take(agent.core.shards[copy]))
        agent.log()
        agent.tick(0.0)
        agent.log()
        agent.tick(CoreConfig().copy_again_s)
        agent.log()
    assert copy not in agent.core.shards
    assert agent.last(FreeShard) == FreeShard(copy)
    assert not [command for command in agent.unsaid if isinstance(command, Release)]


def test_a_copy_that_the_log_lets_go_is_freed() -> None:
    agent = retaining()
    copy = made(agent)
    read(agent, copy)
    agent.take(Retain(model=MODEL, last=0))
    assert agent.last(FreeShard) == FreeShard(copy)
    assert copy not in agent.core.retained_copies.copies


def test_a_copy_that_is_let_go_while_its_memory_is_made_is_freed_when_that_comes() -> None:
    agent = retaining()
    agent.take(Retain(model=MODEL, last=0))
    copy = made(agent)
    assert agent.last(FreeShard) == FreeShard(copy)
    assert copy not in agent.core.shards


def test_an_adopted_copy_is_believed_and_one_that_is_not_whole_is_read_again() -> None:
    agent = retaining()
    copy = made(agent)
    read(agent, copy)
    for held in (
        ShardContents(MemoryState.READY, version=1, root=ROOT, digests=digests_of("a")),
        ShardContents(partial=True),
    ):
        after = OneAgent(catalog=agent.catalog)
        after.core.config = agent.core.config
        trainer = ShardContents(MemoryState.READY, version=1, root=ROOT, digests=digests_of("a"))
        after.core.adopt(ShardSpec(agent.key("trainer"), 1, spot=False, layout="f" * 64, nbytes=NBYTES), trainer)
        after.core.adopt(ShardSpec(copy, 1, spot=False, layout="f" * 64, nbytes=NBYTES), held)
        after.join(agent.catalog.agents["agent-0"].incarnation + 1)
        if held.memory is MemoryState.READY:
            assert after.catalog.models[MODEL].replicas[copy.replica].version == 1
        else:
            read(after, copy)
        assert after.memory(copy) is MemoryState.READY
        agent = after


def test_a_source_that_goes_is_replaced_within_the_same_try() -> None:
    agent = retaining()
    copy = made(agent)
    agent.plan(copy)
    opening = agent.core.shards[copy].operation
    assert opening is not None
    agent.do(agent.core.on_outcome(SourceLost(copy, 99, "gone"), agent.now))
    assert agent.core.shards[copy].operation is opening


def test_nothing_is_due_about_a_copy_while_the_agent_has_not_joined_again() -> None:
    """A timer that is due and does nothing would be due for ever."""
    agent = retaining()
    made(agent)
    agent.do(agent.core.join(2, "host", "site", agent.now))
    when = agent.core.deadline()
    assert when is None or when > agent.now


def test_a_copy_that_its_disk_does_not_keep_is_let_go() -> None:
    """The trainer still holds the version, so nothing holds the copy back; for a while none is placed here again."""
    agent = retaining()
    copy = made(agent)
    read(agent, copy)
    agent.do(agent.core.copy_failed(copy, agent.now))
    agent.log()
    assert copy not in agent.core.shards
    assert agent.last(FreeShard) == FreeShard(copy)
    assert wanted(agent).key == copy
    # One that is gone already is nothing to let go.
    agent.do(agent.core.copy_failed(copy, agent.now))
