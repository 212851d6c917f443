"""What the log and an agent take a shard for, after a call that ended in between: calling again must help."""

import pytest
from tests.unit.agent.core.scene import MODEL, NBYTES, SESSION, OneAgent, digests_of
from tests.unit.agent.core.test_read import pair, publish

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AllocateCopy,
    AppendCommand,
    CallRegister,
    CompareLayouts,
    CompleteCall,
    CopyMade,
    Digested,
    DigestMemory,
    FailCall,
    FreeShard,
    PlanReceived,
    RequestPlan,
    SiblingsChecked,
    SourceLost,
)
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.transitions import ShardState
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Expire, Retain, Sender, Want
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_common.protocol.plans import Refusal

ROOT = root_digest(digests_of("a"))
DRAIN_S = 5.0


def state_of(agent: OneAgent, key: ShardKey) -> tuple[ShardState, int | None]:
    """Return what the log takes a shard for."""
    shard = agent.catalog.models[MODEL].replicas[key.replica].members[key.shard]
    return shard.state, shard.version


def read_of(agent: OneAgent, key: ShardKey, text: str) -> int:
    """Read to the end."""
    call = agent.read(key)
    agent.log()
    agent.plan(key)
    agent.opened(key, text)
    agent.log()
    agent.brought(key, text)
    agent.closed(key)
    agent.log()
    return call


def between_versions() -> tuple[OneAgent, OneAgent, ShardKey]:
    """Return a trainer that has gone from version 1 to 2, and a rollout's agent that holds 1."""
    trainer, reader = pair()
    key = reader.key("rollout")
    read_of(reader, key, "a")
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    publish(trainer, "b")
    return trainer, reader, key


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_a_read_that_waits_for_readers_when_its_agent_joins_anew_leaves_what_it_stated(mapped: bool) -> None:  # noqa: FBT001
    """The log restates the old version, which nobody has touched: it is served, and the next calls go on from it."""
    _, reader, key = between_versions()
    reader.core.config = reader.core.shards[key].config = CoreConfig(refill_drain_s=0.0 if mapped else DRAIN_S)
    if mapped:
        reader.lend(key, 1, ROOT)
    else:
        reader.open_lease(key, 1, ROOT)
    call = reader.read(key, "newer")
    reader.log()
    reader.plan(key)
    reader.opened(key, "b")
    reader.log()
    if mapped:
        reader.probed(lent=True)
    reader.do(reader.core.join(2, "host", "site", reader.now))
    reader.closed(key)
    reader.log()
    assert reader.error_of(call) == "AgentUnavailable"
    assert (state_of(reader, key), reader.memory(key)) == ((ShardState.READY, 1), MemoryState.READY)
    reader.open_lease(key, 1, ROOT, "reads-again")
    again = reader.read(key, 1)
    reader.log()
    assert reader.end_of(again) == CompleteCall(call=again, version=1)
    if not mapped:
        for name in ("lease", "reads-again"):
            reader.do(reader.core.lease_ended(name, LeaseTransition.DONE, reader.now))
        taken_back = reader.unpublish(key)
        reader.log()
        assert reader.end_of(taken_back) == CompleteCall(call=taken_back)


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_fill_that_the_log_refuses_leaves_the_round(staged: bool) -> None:  # noqa: FBT001
    """An engine without digests has told the log a root of this layout meanwhile; others can still call."""
    trainer, _ = pair()

    def engine(name: str, *, digests: bool) -> tuple[OneAgent, ShardKey]:
        agent = OneAgent(name, digests=digests, catalog=trainer.catalog)
        agent.join()
        key = agent.key(f"engine-{name}")
        agent.calls += 1
        call = CallRegister(call=agent.calls, session=SESSION, deadline=10.0)
        place = ShardSpec(key, 1, spot=False, layout="e" * 64, nbytes=NBYTES, staged=staged and digests)
        agent.do(agent.core.register(place, call, agent.now))
        agent.log()
        return agent, key

    proves, key = engine("on", digests=True)
    trusts, other = engine("off", digests=False)
    call = proves.read(key)
    proves.log()
    trusts.read(other)
    trusts.log()
    for agent, its in ((proves, key), (trusts, other)):
        agent.plan(its)
        agent.opened(its, "a")
        agent.log()
    trusts.brought(other, "a")
    trusts.confirmed(other)
    trusts.closed(other)
    trusts.log()
    proves.brought(key, "a")
    if (digest := proves.last(DigestMemory)) is not None:
        proves.do(proves.core.on_outcome(Digested(key, digest.number, digests_of("a")), proves.now))
    proves.closed(key)
    proves.log()
    assert proves.error_of(call) == "IntegrityError"
    assert trainer.catalog.models[MODEL].replicas[key.replica].round is None
    assert state_of(proves, key)[0] is ShardState.EMPTY
    again = proves.read(key)
    proves.log()
    assert proves.end_of(again) is None, "it is read again, and not refused"


def test_what_the_log_gave_up_for_a_read_that_failed_in_that_moment_is_not_held() -> None:
    """The sources go after they had granted: nothing is written, and the old version counts nowhere."""
    _, reader, key = between_versions()
    call = reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "b")
    opened = reader.last(RequestPlan)
    assert opened is not None
    operation = reader.core.shards[key].operation
    assert operation is not None
    number = operation.transfer.sources  # type: ignore[attr-defined]  # It is a read.
    reader.do(reader.core.on_outcome(SourceLost(key, max(number), "killed"), reader.now))
    reader.closed(key)
    for _ in range(60):
        asked = reader.last(RequestPlan)
        assert asked is not None
        refused = Refusal(error="VersionUnavailable", reason="gone")
        reader.do(reader.core.on_outcome(PlanReceived(key, asked.number, refused), reader.now))
        reader.tick(PLAN_AGAIN_S)
    reader.log()
    end = reader.end_of(call)
    assert end is None or isinstance(end, FailCall)
    agrees(reader, key)


def agrees(agent: OneAgent, key: ShardKey) -> None:
    """Check that both take the shard for the same."""
    state, version = state_of(agent, key)
    held = agent.core.shards[key].contents
    assert (state is ShardState.READY, version) == (held.memory is MemoryState.READY, held.version)


def test_what_the_log_gave_up_for_a_read_that_had_given_up_is_not_held() -> None:
    """The log is silent until the call has ended, and starts its round then."""
    _, reader, key = between_versions()
    call = reader.read(key, "newer")
    reader.log()
    reader.plan(key)
    reader.opened(key, "b")
    reader.tick(10.0)
    reader.tick(OUTCOME_S_MAX)
    reader.closed(key)
    assert reader.end_of(call) is not None
    reader.log()
    agrees(reader, key)
    assert reader.memory(key) is MemoryState.EMPTY
    again = read_of(reader, key, "b")
    assert isinstance(reader.end_of(again), CompleteCall)


def test_a_start_that_comes_after_the_agent_has_begun_to_join_anew_gives_nothing_up() -> None:
    """The join fails the round, and the log takes what is stated in it."""
    _, reader, key = between_versions()
    reader.read(key, "newer")
    reader.log()
    reader.plan(key)
    reader.opened(key, "b")
    [granted] = reader.unsaid
    started = apply(reader.catalog, reader.catalog.seq + 1, reader.now, granted)
    reader.unsaid.clear()
    reader.do(reader.core.join(2, "host", "site", reader.now))
    reader.closed(key)
    for event in started:
        reader.do(reader.core.on_event(event, reader.now))  # type: ignore[arg-type]  # It is any event.
    reader.log()
    agrees(reader, key)
    assert (reader.memory(key), state_of(reader, key)) == (MemoryState.READY, (ShardState.READY, 1))
    reader.open_lease(key, 1, ROOT)


def test_a_siblings_check_of_a_registration_that_is_over_decides_no_other() -> None:
    agent = OneAgent()
    agent.join()
    agent.register("engine", 0, 2)
    key = agent.key("engine", 1)

    def register() -> int:
        agent.calls += 1
        call = CallRegister(call=agent.calls, session=SESSION, deadline=agent.now + 10.0)
        place = ShardSpec(key, 2, spot=False, layout="f" * 64, nbytes=NBYTES)
        agent.do(agent.core.register(place, call, agent.now))
        return agent.calls

    first = register()
    agent.log()
    agent.do(agent.core.join(2, "host", "site", agent.now))
    assert agent.error_of(first) == "AgentUnavailable"
    check = agent.last(CompareLayouts)
    assert check is not None
    stale = SiblingsChecked(check.key, check.number, "tensor 'w' differs")
    second = register()
    agent.do(agent.core.on_outcome(stale, agent.now))
    assert agent.end_of(second) is None
    agent.log()
    agent.do(agent.core.on_outcome(stale, agent.now))
    assert agent.end_of(second) is None
    agent.siblings_checked()
    assert agent.end_of(second) == CompleteCall(call=second)
    assert key in agent.core.shards


class Agents:
    """Some agents on one log."""

    def __init__(self, count: int, level: Level = NEWEST_LEVEL) -> None:
        first = OneAgent("agent-0")
        self.catalog = first.catalog
        self.catalog.level = level
        self.all = [first, *(OneAgent(f"agent-{number}", catalog=self.catalog) for number in range(1, count))]
        self.made: list[ShardKey] = []

    def join(self, cache_bytes: int) -> None:
        """Let all but the first one have room for copies."""
        for agent in self.all:
            agent.core.config = CoreConfig(cache_bytes=0 if agent is self.all[0] else cache_bytes)
            agent.do(agent.core.join(1, f"host-{agent.core.agent}", "site", agent.now))
            self.log()

    def log(self) -> None:
        """Let the log take all that was said, and everybody read what it answers."""
        while any(agent.unsaid for agent in self.all):
            for agent in self.all:
                if agent.unsaid:
                    for event in apply(self.catalog, self.catalog.seq + 1, agent.now, agent.unsaid.pop(0)):
                        for each in self.all:
                            each.do(each.core.on_event(event, each.now))  # type: ignore[arg-type]  # It is any event.

    def published(self, shards: int) -> None:
        """Publish version 1, of which copies are wanted."""
        trainer = self.all[0]
        for shard in range(shards):
            key = trainer.key("trainer", shard)
            trainer.calls += 1
            call = CallRegister(call=trainer.calls, session=SESSION, deadline=10.0)
            trainer.do(trainer.core.register(place_of(key, shards), call, trainer.now))
        self.log()
        if shards > 1:
            trainer.siblings_checked()
        trainer.unsaid.append(Retain(model=MODEL, last=1))
        self.log()
        for shard in range(shards):
            trainer.publish(trainer.key("trainer", shard), "a")
        self.log()

    def make_copies(self) -> None:
        """Make the memory that is wanted."""
        for agent in self.all:
            for wish in [each for each in agent.seen if isinstance(each, AllocateCopy) and each.key not in self.made]:
                self.made.append(wish.key)
                made = CopyMade(wish.key, wish.shards, wish.layout, nbytes=NBYTES)
                agent.do(agent.core.copy_made(made, agent.now))
        self.log()

    def fill(self, *keys: ShardKey) -> None:
        """Let reads of these go through."""
        reads = [(agent, key) for key in keys for agent in self.all if key in agent.core.shards]
        for agent, key in reads:
            agent.plan(key)
            agent.opened(key, "a")
        self.log()
        for agent, key in reads:
            agent.brought(key, "a")
            agent.closed(key)
        self.log()

    def copied(self, shards: int = 1) -> list[ShardKey]:
        """Publish version 1, and let a copy of it come to stand; returns its shards."""
        self.join(sum(NBYTES))
        self.published(shards)
        self.make_copies()
        self.fill(*self.made)
        return sorted(self.made)

    def last_copy(self) -> ShardKey:
        """Let the copy be all that holds the version."""
        [key] = self.copied()
        trainer = self.all[0]
        taken_back = trainer.unpublish(trainer.key("trainer"))
        self.log()
        assert trainer.end_of(taken_back) == CompleteCall(call=taken_back)
        return key

    def version_of(self, key: ShardKey) -> int | None:
        return self.catalog.models[MODEL].replicas[key.replica].version


def place_of(key: ShardKey, shards: int) -> ShardSpec:
    return ShardSpec(key, shards, spot=False, layout="f" * 64, nbytes=NBYTES)


def test_the_shards_of_a_copy_that_stand_join_the_one_that_reads_again() -> None:
    """One agent began anew and found its shard not whole: the copy stands again, and does not wait for an hour."""
    agents = Agents(3)
    _, key = agents.copied(2)
    assert agents.version_of(key) == 1
    gone = next(agent for agent in agents.all if key in agent.core.shards)
    back = OneAgent(gone.core.agent, catalog=gone.catalog)
    back.core.config = gone.core.config
    back.core.adopt(place_of(key, 2), ShardContents(partial=True))
    agents.all[agents.all.index(gone)] = back
    back.do(back.core.join(2, f"host-{back.core.agent}", "site", back.now))
    agents.log()
    assert agents.version_of(key) is None
    agents.fill(key)
    assert agents.version_of(key) == 1


def test_shards_of_a_copy_that_join_at_the_same_time_read_once() -> None:
    """Each hears that the other is missing, whose word is on its way; nothing is read again when both stand."""
    agents = Agents(3)
    agents.copied(2)
    for agent in agents.all:
        agent.tick(CoreConfig().copy_again_s)
    agents.log()
    wants = [
        each
        for agent in agents.all
        for each in agent.seen
        if isinstance(each, AppendCommand) and isinstance(each.command, Want)
    ]
    assert len(wants) == 2
    assert agents.version_of(agents.made[0]) == 1


@pytest.mark.parametrize("level", list(Level))
def test_a_copy_that_is_the_last_one_and_has_to_go_is_replaced(level: Level) -> None:
    """Its disk fails. Below the level the new copy is let go in the command that places it, so it is tried for ever."""
    agents = Agents(3, level)
    agents.join(1000)
    agents.published(1)
    agents.make_copies()
    [first] = agents.made
    agents.fill(first)
    trainer = agents.all[0]
    taken_back = trainer.unpublish(trainer.key("trainer"))
    agents.log()
    assert trainer.end_of(taken_back) == CompleteCall(call=taken_back)
    holder = next(agent for agent in agents.all if first in agent.core.shards)
    holder.do(holder.core.copy_failed(first, holder.now))
    agents.log()
    for _ in range(10):
        known = len(agents.made)
        agents.make_copies()
        agents.fill(*agents.made[known:])
        for agent in agents.all:
            agent.tick(CoreConfig().copy_again_s)
        agents.log()
    whole = [name for name, replica in agents.catalog.models[MODEL].replicas.items() if replica.version == 1]
    if level < Level.LEAVING_COPIES:
        assert (whole, len(agents.made) > 5) == ([first.replica], True)
    else:
        assert (whole, len(agents.made)) == ([agents.made[1].replica], 2)
        assert first not in holder.core.shards


def set_aside(agents: Agents, key: ShardKey) -> OneAgent:
    """Let the agent of a copy begin anew in a process that can't take the copy back, for want of descriptors or so."""
    gone = next(agent for agent in agents.all if key in agent.core.shards)
    back = OneAgent(gone.core.agent, catalog=gone.catalog)
    back.core.config = gone.core.config
    back.core.set_aside(key)
    begin_anew(agents, gone, back, 2)
    return back


def begin_anew(agents: Agents, gone: OneAgent, back: OneAgent, incarnation: int) -> None:
    agents.all[agents.all.index(gone)] = back
    back.do(back.core.join(incarnation, f"host-{back.core.agent}", "site", back.now))
    agents.log()


@pytest.mark.parametrize("level", list(Level))
def test_a_copy_that_its_agent_cannot_take_back_is_replaced_and_freed(level: Level) -> None:
    """Below the level the log takes it for one that is coming, and whoever may go once it stands waits for that."""
    agents, back, first = with_a_copy_aside(Agents(3, level))
    agents.make_copies()
    assert back.last(FreeShard) is None, "the new copy does not stand yet"
    agents.fill(*agents.made[1:])
    trainer = agents.all[0]
    taken_back = trainer.unpublish(trainer.key("trainer"))
    agents.log()
    if level < Level.LEAVING_COPIES:
        assert (trainer.end_of(taken_back), len(agents.made)) == (None, 1)
        return
    assert back.last(FreeShard) == FreeShard(first)
    assert (back.core.aside, first.replica in agents.catalog.models[MODEL].replicas) == (set(), False)
    assert trainer.end_of(taken_back) == CompleteCall(call=taken_back)
    assert agents.version_of(agents.made[1]) == 1


def with_a_copy_aside(agents: Agents) -> tuple[Agents, OneAgent, ShardKey]:
    """Return the agents, that of the copy in a process that can't take it back, and the copy. The trainer holds it."""
    [first] = agents.copied()
    return agents, set_aside(agents, first), first


def test_a_copy_that_cannot_be_taken_back_and_not_be_replaced_is_kept() -> None:
    """No agent has room. Who may not go is told so at once; the holder is lost, and the next process has the copy."""
    agents, back, key = with_a_copy_aside(Agents(2))
    trainer = agents.all[0]
    taken_back = trainer.unpublish(trainer.key("trainer"))
    agents.log()
    assert trainer.error_of(taken_back) == "RetentionFull"
    assert back.core.aside == {key}
    trainer.unsaid.append(Expire(by=Sender("_registry", 1, 1), agent=trainer.core.agent, incarnation=1, term=1))
    agents.log()
    taken_back_by(agents, back, key)
    assert (agents.version_of(key), len(agents.made)) == (1, 1)


def taken_back_by(agents: Agents, gone: OneAgent, key: ShardKey) -> None:
    """Let a process of the agent begin that can take the copy back."""
    able = OneAgent(gone.core.agent, catalog=gone.catalog)
    able.core.config = gone.core.config
    able.core.adopt(place_of(key, 1), ShardContents(MemoryState.READY, version=1, root=ROOT, digests=digests_of("a")))
    begin_anew(agents, gone, able, 3)
    agents.make_copies()
    able.open_lease(key, 1, ROOT)


def test_a_copy_that_is_still_empty_when_its_agent_begins_anew_is_awaited() -> None:
    """It was not set aside: its agent has it, and fills it. Who may go once it stands waits for that."""
    agents = Agents(3)
    agents.join(sum(NBYTES))
    agents.published(1)
    agents.make_copies()
    [key] = agents.made
    gone = next(agent for agent in agents.all if key in agent.core.shards)
    back = OneAgent(gone.core.agent, catalog=gone.catalog)
    back.core.config = gone.core.config
    back.core.adopt(place_of(key, 1), ShardContents())
    begin_anew(agents, gone, back, 2)
    trainer = agents.all[0]
    taken_back = trainer.unpublish(trainer.key("trainer"))
    agents.log()
    assert (trainer.end_of(taken_back), trainer.error_of(taken_back)) == (None, None)
    agents.fill(key)
    assert trainer.end_of(taken_back) == CompleteCall(call=taken_back)
    agents.make_copies()
    assert (agents.version_of(key), agents.made) == (1, [key])


def test_a_copy_that_was_set_aside_and_can_not_come_to_be_whole_is_let_go() -> None:
    """Its other shard is gone for good, so what was set aside only takes the room that another copy needs."""
    agents = Agents(3)
    first, second = agents.copied(2)
    back = set_aside(agents, first)
    assert back.core.aside == {first}
    gone = next(agent for agent in agents.all if second in agent.core.shards)
    empty = OneAgent(gone.core.agent, catalog=gone.catalog)
    empty.core.config = gone.core.config
    begin_anew(agents, gone, empty, 2)
    assert (back.core.aside, back.last(FreeShard)) == (set(), FreeShard(first))
    agents.make_copies()
    agents.fill(*agents.made[2:])
    assert [agents.version_of(key) for key in agents.made[2:]] == [1, 1]


def test_the_last_copy_is_kept_though_its_agent_cannot_take_it_back_now() -> None:
    """Nobody else holds the version: the next process of its agent, which can, brings it back."""
    agents = Agents(3)
    key = agents.last_copy()
    back = set_aside(agents, key)
    assert (back.core.aside, agents.version_of(key), back.last(FreeShard)) == ({key}, None, None)
    taken_back_by(agents, back, key)
    assert (agents.version_of(key), len(agents.made)) == (1, 1)
