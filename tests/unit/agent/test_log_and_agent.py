"""What the log and an agent take a shard for, after a call that ended in between: calling again must help."""

import pytest
from tests.unit.agent.one_agent import MODEL, NBYTES, SESSION, OneAgent, digests_of
from tests.unit.agent.test_op_read import pair, publish

from tensorhub_agent.asking import PLAN_AGAIN_S
from tensorhub_agent.effects import (
    Answer,
    AskPlan,
    CallRegister,
    CopyMade,
    Digest,
    Digested,
    Key,
    MakeCopy,
    PlanCame,
    Post,
    Raise,
    SiblingsChecked,
    SourceLost,
)
from tensorhub_agent.lease import LeaseMove
from tensorhub_agent.limits import Limits
from tensorhub_agent.memory import Held, Memory, Place
from tensorhub_common.bounds import OUTCOME_S_MAX
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.table import ShardState
from tensorhub_common.digests import root_digest
from tensorhub_common.wire.commands import Retain
from tensorhub_common.wire.transfer import Refusal

ROOT = root_digest(digests_of("a"))
DRAIN_S = 5.0


def state_of(agent: OneAgent, key: Key) -> tuple[ShardState, int | None]:
    """Return what the log takes a shard for."""
    shard = agent.catalog.models[MODEL].replicas[key.replica].members[key.shard]
    return shard.state, shard.version


def read_of(agent: OneAgent, key: Key, text: str) -> int:
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


def between_versions() -> tuple[OneAgent, OneAgent, Key]:
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
    reader.core.limits = reader.core.shards[key].limits = Limits(refill_drain_s=0.0 if mapped else DRAIN_S)
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
    assert (state_of(reader, key), reader.memory(key)) == ((ShardState.READY, 1), Memory.READY)
    reader.open_lease(key, 1, ROOT, "reads-again")
    again = reader.read(key, 1)
    reader.log()
    assert reader.end_of(again) == Answer(call=again, version=1)
    if not mapped:
        for name in ("lease", "reads-again"):
            reader.do(reader.core.lease_ended(name, LeaseMove.DONE, reader.now))
        taken_back = reader.unpublish(key)
        reader.log()
        assert reader.end_of(taken_back) == Answer(call=taken_back)


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_fill_that_the_log_refuses_leaves_the_round(staged: bool) -> None:  # noqa: FBT001
    """An engine without digests has told the log a root of this layout meanwhile; others can still call."""
    trainer, _ = pair()

    def engine(name: str, *, digests: bool) -> tuple[OneAgent, Key]:
        agent = OneAgent(name, digests=digests, catalog=trainer.catalog)
        agent.join()
        key = agent.key(f"engine-{name}")
        agent.calls += 1
        call = CallRegister(call=agent.calls, session=SESSION, deadline=10.0)
        place = Place(key, 1, spot=False, layout="e" * 64, nbytes=NBYTES, staged=staged and digests)
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
    if (digest := proves.last(Digest)) is not None:
        proves.do(proves.core.on_news(Digested(key, digest.number, digests_of("a")), proves.now))
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
    opened = reader.last(AskPlan)
    assert opened is not None
    operation = reader.core.shards[key].operation
    assert operation is not None
    number = operation.transfer.sources  # type: ignore[attr-defined]  # It is a read.
    reader.do(reader.core.on_news(SourceLost(key, max(number), "killed"), reader.now))
    reader.closed(key)
    for _ in range(60):
        asked = reader.last(AskPlan)
        assert asked is not None
        refused = Refusal(error="VersionUnavailable", reason="gone")
        reader.do(reader.core.on_news(PlanCame(key, asked.number, refused), reader.now))
        reader.tick(PLAN_AGAIN_S)
    reader.log()
    end = reader.end_of(call)
    assert end is None or isinstance(end, Raise)
    agrees(reader, key)


def agrees(agent: OneAgent, key: Key) -> None:
    """Check that both take the shard for the same."""
    state, version = state_of(agent, key)
    held = agent.core.shards[key].held
    assert (state is ShardState.READY, version) == (held.memory is Memory.READY, held.version)


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
    assert reader.memory(key) is Memory.EMPTY
    again = read_of(reader, key, "b")
    assert isinstance(reader.end_of(again), Answer)


def test_a_siblings_check_of_a_registration_that_is_over_lets_nobody_in() -> None:
    agent = OneAgent()
    agent.join()
    agent.register("engine", 0, 2)
    key = agent.key("engine", 1)

    def register() -> int:
        agent.calls += 1
        call = CallRegister(call=agent.calls, session=SESSION, deadline=agent.now + 10.0)
        place = Place(key, 2, spot=False, layout="f" * 64, nbytes=NBYTES)
        agent.do(agent.core.register(place, call, agent.now))
        return agent.calls

    first = register()
    agent.log()
    agent.do(agent.core.join(2, "host", "site", agent.now))
    assert agent.error_of(first) == "AgentUnavailable"
    second = register()
    agent.do(agent.core.on_news(SiblingsChecked(key, None), agent.now))
    assert agent.end_of(second) is None
    agent.log()
    agent.do(agent.core.on_news(SiblingsChecked(key, None), agent.now))
    assert agent.end_of(second) == Answer(call=second)
    assert key in agent.core.shards


class Copies:
    """A trainer of two shards, and two agents with room for one shard of a copy each, on one log."""

    def __init__(self) -> None:
        first = OneAgent("agent-0")
        self.agents = [first, OneAgent("agent-1", catalog=first.catalog), OneAgent("agent-2", catalog=first.catalog)]
        for agent in self.agents[1:]:
            agent.core.limits = Limits(cache_bytes=sum(NBYTES))
        for agent in self.agents:
            agent.do(agent.core.join(1, f"host-{agent.core.agent}", "site", agent.now))
            self.log()
        for shard in (0, 1):
            key = first.key("trainer", shard)
            first.calls += 1
            call = CallRegister(call=first.calls, session=SESSION, deadline=10.0)
            place = Place(key, 2, spot=False, layout="f" * 64, nbytes=NBYTES)
            first.do(first.core.register(place, call, first.now))
        self.log()
        first.do(first.core.on_news(SiblingsChecked(first.key("trainer", 1), None), first.now))
        first.unsaid.append(Retain(model=MODEL, last=1))
        self.log()
        for shard in (0, 1):
            first.publish(first.key("trainer", shard), "a")
        self.log()
        self.keys = [self._made(agent) for agent in self.agents[1:]]
        self.log()

    def _made(self, agent: OneAgent) -> Key:
        wish = agent.last(MakeCopy)
        assert wish is not None
        agent.do(agent.core.copy_made(CopyMade(wish.key, wish.shards, wish.layout, nbytes=NBYTES), agent.now))
        return wish.key

    def log(self) -> None:
        """Let the log take all that was said, and everybody read what it answers."""
        catalog = self.agents[0].catalog
        while any(agent.unsaid for agent in self.agents):
            for agent in self.agents:
                if agent.unsaid:
                    for event in apply(catalog, catalog.seq + 1, agent.now, agent.unsaid.pop(0)):
                        for each in self.agents:
                            each.do(each.core.on_event(event, each.now))  # type: ignore[arg-type]  # It is any event.

    def fill(self, agent: OneAgent, key: Key) -> None:
        agent.plan(key)
        agent.opened(key, "a")
        self.log()
        agent.brought(key, "a")
        agent.closed(key)
        self.log()


def test_the_shards_of_a_copy_that_stand_join_the_one_that_reads_again() -> None:
    """One agent began anew and found its shard not whole: the copy stands again, and does not wait for an hour."""
    copies = Copies()
    for agent, key in zip(copies.agents[1:], copies.keys, strict=True):
        agent.plan(key)
        agent.opened(key, "a")
    copies.log()
    for agent, key in zip(copies.agents[1:], copies.keys, strict=True):
        assert agent.last(Post) is not None
        agent.brought(key, "a")
        agent.closed(key)
    copies.log()
    replica = copies.agents[0].catalog.models[MODEL].replicas[copies.keys[0].replica]
    assert replica.version == 1
    gone, key = copies.agents[2], copies.keys[1]
    back = OneAgent("agent-2", catalog=gone.catalog)
    back.core.limits = gone.core.limits
    back.core.adopt(Place(key, 2, spot=False, layout="f" * 64, nbytes=NBYTES), Held(partial=True))
    copies.agents[2] = back
    back.do(back.core.join(2, "host-agent-2", "site", back.now))
    copies.log()
    copies.fill(back, key)
    assert replica.version == 1
