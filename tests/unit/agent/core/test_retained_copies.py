"""Copies of retained versions: made where the log places them, read again when that fails, let go when it says so."""

import pytest

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import AllocateCopy, CopyMade, Keep, SourceLost
from tensorhub_agent.core.retained_copies import RELEASE_S, TRIES_MAX
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.log.commands import Expire, Release, Retain, Sender, Stay, Want
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_simulator.drivers.agent import MODEL, NBYTES, AgentsWithCopies, OneAgent, ready, root_of, spec_of

ROOT = root_of("a")
READY, EMPTY, DRAINING = MemoryState.READY, MemoryState.EMPTY, MemoryState.DRAINING
AGAIN_S = CoreConfig().copy_again_s


def retaining(cache_bytes: int = 1000) -> OneAgent:
    """Return an agent that has published version 1 of a model whose last version is retained."""
    agent = OneAgent(config=CoreConfig(cache_bytes=cache_bytes))
    agent.join()
    agent.register("trainer")
    agent.take(Retain(model=MODEL, last=1))
    agent.publish_next("a")
    return agent


def held_back(cache_bytes: int = 1000) -> tuple[OneAgent, ShardKey, int]:
    """One whose trainer is unpublished: the log holds it back until a copy stands, where there is room for one."""
    agent = retaining(cache_bytes)
    key = agent.key("trainer")
    call = agent.logged(agent.unpublish(key))
    return agent, key, call


def wanted(agent: OneAgent) -> AllocateCopy:
    return agent.need(AllocateCopy)


def made(agent: OneAgent, failure: str | None = None) -> ShardKey:
    """Answer the last wish for memory; returns which copy it is."""
    wish = wanted(agent)
    answer = CopyMade(wish.key, wish.shards, wish.layout, nbytes=() if failure else NBYTES, failure=failure)
    agent.do(agent.core.copy_made(answer, agent.now))
    agent.log()
    return wish.key


def read(agent: OneAgent, key: ShardKey) -> ShardKey:
    """Let the copy's read go through."""
    agent.fill(key, "a")
    agent.closed(key)
    agent.log()
    return key


def test_a_copy_is_made_read_and_then_lets_the_trainer_go() -> None:
    """Until then the trainer is held back, and grants leases; also when its agent joins anew meanwhile."""
    for rejoins in (False, True):
        agent, key, call = held_back()
        assert (agent.result(call), agent.memory(key)) == (None, READY)
        agent.open_lease(key, 1, ROOT)
        agent.end_lease()
        if rejoins:
            agent.join(2)
            assert (agent.result(call), agent.memory(key)) == (None, READY)
        copy = made(agent)
        assert agent.memory(copy) is EMPTY
        read(agent, copy)
        assert agent.memory(copy) is READY
        assert (agent.result(call), agent.memory(key)) == ("done", EMPTY)


@pytest.mark.parametrize("why_not", ["at the bound", "no room", "no memory"])
def test_at_the_bound_the_shard_stays_published_and_the_call_raises(why_not: str) -> None:
    """Where there is no room for a copy, or no memory, that is told at once."""
    agent, key, call = held_back(0 if why_not == "no room" else 1000)
    if why_not == "at the bound":
        agent.tick(10.0)
        assert isinstance(agent.unsaid[-1], Stay)
        agent.log()
    elif why_not == "no memory":
        made(agent, failure="no room")
    assert (agent.result(call), agent.memory(key)) == ("RetentionFull", READY)
    agent.open_lease(key, 1, ROOT)


def test_a_read_that_fails_is_tried_again_and_given_up_in_the_end() -> None:
    agent = retaining()
    copy = made(agent)
    for _ in range(TRIES_MAX):
        agent.do(agent.core.shards[copy].operation.abandon(agent.now) or [])  # type: ignore[union-attr]
        agent.do(agent.core._take(agent.core.shards[copy]))
        agent.log()
        agent.tick_and_log(0.0)
        agent.tick_and_log(AGAIN_S)
    assert copy not in agent.core.shards
    assert agent.freed() == [copy]
    assert not [command for command in agent.unsaid if isinstance(command, Release)]


@pytest.mark.parametrize("stands", [True, False])
def test_a_copy_that_the_log_lets_go_is_freed(*, stands: bool) -> None:
    """Also when its memory is only made then."""
    agent = retaining()
    if stands:
        copy = read(agent, made(agent))
    agent.take(Retain(model=MODEL, last=0))
    if not stands:
        copy = made(agent)
    assert agent.freed() == [copy]
    assert copy not in agent.core.retained_copies.copies
    assert copy not in agent.core.shards


@pytest.mark.parametrize("held", [ready(), ShardContents(partial=True)], ids=["whole", "partial"])
def test_an_adopted_copy_is_believed_and_one_that_is_not_whole_is_read_again(held: ShardContents) -> None:
    agent = retaining()
    copy = read(agent, made(agent))
    after = OneAgent(after=agent)
    after.core.adopt(spec_of(agent.key("trainer")), ready())
    after.core.adopt(spec_of(copy), held)
    after.join(2)
    if held.partial:
        read(after, copy)
    assert (after.counted(copy), after.memory(copy)) == (1, READY)


def test_a_source_that_goes_is_replaced_within_the_same_try() -> None:
    """Nothing is due while the agent has not joined again: a timer that does nothing would ring for ever."""
    agent = retaining()
    copy = made(agent)
    agent.plan(copy)
    opening = agent.core.shards[copy].operation
    assert opening is not None
    agent.hear(SourceLost(copy, 99, "gone"))
    assert agent.core.shards[copy].operation is opening
    agent.joins(2)
    when = agent.core.deadline()
    assert when is None or when > agent.now


def test_a_copy_that_its_disk_does_not_keep_is_let_go() -> None:
    """The trainer still holds the version, so nothing holds the copy back; for a while none is placed here again."""
    agent = retaining()
    copy = read(agent, made(agent))
    for _ in range(2):
        # One that is gone already is nothing to let go.
        agent.do(agent.core.copy_failed(copy, agent.now))
        agent.log()
        assert copy not in agent.core.shards
        assert agent.freed() == [copy]
    assert wanted(agent).key == copy


def test_a_copy_without_a_manifest_is_let_go_and_never_counted() -> None:
    """The trainer waits for a copy that outlives a process; one that would not is placed elsewhere."""
    agent, trainer, call = held_back()
    agent.keeps = False
    copy = read(agent, made(agent))
    agent.kept(agent.need(Keep), "the disk is full")
    agent.log()
    assert not agent.counted(copy)
    assert (agent.memory(trainer), agent.result(call)) == (READY, None)
    agent.tick_and_log(RELEASE_S / 2)
    assert agent.freed() == [copy]
    assert agent.memory(trainer) is READY


def test_the_failure_of_an_earlier_fill_gives_up_no_copy() -> None:
    """The first fill has ended when its failure is told; the second one stands, and goes on standing."""
    agent = retaining()
    agent.keeps = False
    copy = read(agent, made(agent))
    first = agent.need(Keep)
    agent.join(2)
    agent.tick_and_log(AGAIN_S)
    read(agent, copy)
    second = agent.need(Keep)
    assert second.number != first.number
    agent.kept(first, "the disk is full")
    agent.kept(second)
    agent.log()
    agent.tick_and_log(AGAIN_S)
    assert agent.memory(copy) is READY
    assert not agent.core.retained_copies.copies[copy].releasing


# Copies on several agents.


def copied(count: int = 3, shards: int = 1, level: Level = NEWEST_LEVEL) -> tuple[AgentsWithCopies, list[ShardKey]]:
    """Return agents of which some hold a copy, and its shards."""
    agents = AgentsWithCopies(count, shards, level=level)
    agents.fill(agents.made)
    return agents, sorted(agents.made)


def test_the_shards_of_a_copy_that_stand_join_the_one_that_reads_again() -> None:
    """One agent began anew and found its shard not whole: the copy stands again, and does not wait for an hour."""
    agents, (_, key) = copied(shards=2)
    assert agents.trainer.counted(key) == 1
    agents.begin_anew(key, ShardContents(partial=True), 2)
    assert agents.trainer.counted(key) is None
    agents.fill([key])
    assert agents.trainer.counted(key) == 1


def test_shards_of_a_copy_that_join_at_the_same_time_read_once() -> None:
    """Each hears that the other is missing, whose word is on its way; nothing is read again when both stand."""
    agents, (key, _) = copied(shards=2)
    agents.tick(AGAIN_S)
    assert sum(len(agent.appended(Want)) for agent in agents.all) == 2
    assert agents.trainer.counted(key) == 1


@pytest.mark.parametrize("level", list(Level))
def test_a_copy_that_is_the_last_one_and_has_to_go_is_replaced(level: Level) -> None:
    """Its disk fails. Below the level the new copy is let go in the command that places it, so it is tried for ever."""
    agents = AgentsWithCopies(3, level=level, room=1000)
    [first] = agents.made
    agents.fill([first])
    assert agents.trainer.result(agents.unpublish()) == "done"
    holder = agents.holder(first)
    holder.do(holder.core.copy_failed(first, holder.now))
    agents.log()
    for _ in range(10):
        agents.fill(agents.make_copies())
        agents.tick(AGAIN_S)
    whole = [name for name, replica in agents.catalog.models[MODEL].replicas.items() if replica.version == 1]
    if level < Level.LEAVING_COPIES:
        assert (whole, len(agents.made) > 5) == ([first.replica], True)
    else:
        assert (whole, len(agents.made)) == ([agents.made[1].replica], 2)
        assert first not in holder.core.shards


@pytest.mark.parametrize("level", list(Level))
def test_a_copy_that_its_agent_cannot_take_back_is_replaced_and_freed(level: Level) -> None:
    """Below the level the log takes it for one that is coming, and whoever may go once it stands waits for that."""
    agents, [first] = copied(level=level)
    back = agents.begin_anew(first, aside=True)
    later = agents.make_copies()
    assert back.freed() == [], "the new copy does not stand yet"
    agents.fill(later)
    call = agents.unpublish()
    if level < Level.LEAVING_COPIES:
        assert (agents.trainer.result(call), len(agents.made)) == (None, 1)
        return
    assert back.freed() == [first]
    assert (back.core.aside, first.replica in agents.catalog.models[MODEL].replicas) == (set(), False)
    assert agents.trainer.result(call) == "done"
    assert agents.trainer.counted(agents.made[1]) == 1


def taken_back(agents: AgentsWithCopies, key: ShardKey) -> None:
    """Let a process of the agent begin that can take the copy back."""
    able = agents.begin_anew(key, ready())
    agents.make_copies()
    able.open_lease(key, 1, ROOT)
    assert (agents.trainer.counted(key), len(agents.made)) == (1, 1)


def test_a_copy_that_cannot_be_taken_back_and_not_be_replaced_is_kept() -> None:
    """No agent has room. Who may not go is told so at once; the holder is lost, and the next process has the copy."""
    agents, [key] = copied(2)
    back = agents.begin_anew(key, aside=True)
    assert agents.trainer.result(agents.unpublish()) == "RetentionFull"
    assert back.core.aside == {key}
    agents.trainer.unsaid.append(Expire(by=Sender("_registry", 1, 1), agent="agent-0", incarnation=1, term=1))
    agents.log()
    taken_back(agents, key)


def test_the_last_copy_is_kept_though_its_agent_cannot_take_it_back_now() -> None:
    """Nobody else holds the version: the next process of its agent, which can, brings it back."""
    agents, [key] = copied()
    assert agents.trainer.result(agents.unpublish()) == "done"
    back = agents.begin_anew(key, aside=True)
    assert (back.core.aside, agents.trainer.counted(key), back.freed()) == ({key}, None, [])
    taken_back(agents, key)


def test_a_copy_that_is_still_empty_when_its_agent_begins_anew_is_awaited() -> None:
    """It was not set aside: its agent has it, and fills it. Who may go once it stands waits for that."""
    agents = AgentsWithCopies(3)
    [key] = agents.made
    agents.begin_anew(key, ShardContents())
    call = agents.unpublish()
    assert agents.trainer.result(call) is None
    agents.fill([key])
    assert agents.trainer.result(call) == "done"
    agents.make_copies()
    assert (agents.trainer.counted(key), agents.made) == (1, [key])


def test_a_copy_that_was_set_aside_and_can_not_come_to_be_whole_is_let_go() -> None:
    """Its other shard is gone for good, so what was set aside only takes the room that another copy needs."""
    agents, (first, second) = copied(shards=2)
    back = agents.begin_anew(first, aside=True)
    assert back.core.aside == {first}
    agents.begin_anew(second)
    assert (back.core.aside, back.freed()) == (set(), [first])
    later = agents.make_copies()
    agents.fill(later)
    assert [agents.trainer.counted(key) for key in later] == [1, 1]
