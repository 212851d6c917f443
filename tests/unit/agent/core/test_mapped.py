"""Memory that readers map, step by step: nothing says that it may be written before a probe has found it free."""

from collections.abc import Callable

import pytest

from tensorhub_agent.core.effects import (
    CopyToSpare,
    DropMapping,
    Duplicated,
    ProbeMapping,
    ReadBatch,
    SaveManifest,
)
from tensorhub_agent.core.operations.reclaim import PROBE_AGAIN_S
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal
from tensorhub_common.protocol.log.commands import Drained, Register, ShardCommand
from tensorhub_common.protocol.log.events import kind_of
from tensorhub_simulator.drivers.agent import SESSION, OneAgent, joined, pair, root_of, spec_of
from tensorhub_simulator.drivers.agent import published as published_by_one

ROOT = root_of("a")
DRAINING, EMPTY, READY = MemoryState.DRAINING, MemoryState.EMPTY, MemoryState.READY


def published(*, staged: bool = False) -> tuple[OneAgent, ShardKey]:
    """A trainer that has published version 1, which somebody has mapped."""
    agent, key = published_by_one(staged=staged)
    agent.lend(key, 1, ROOT)
    return agent, key


def draining(*, staged: bool = False) -> tuple[OneAgent, ShardKey, int]:
    """One that is unpublished, and whose memory is mapped still."""
    agent, key = published(staged=staged)
    call = agent.logged(agent.unpublish(key))
    agent.probed(lent=True)
    return agent, key, call


def freed(agent: OneAgent) -> None:
    agent.probed(lent=False)
    agent.log()


def test_at_the_bound_the_call_raises_and_the_shard_drains_on() -> None:
    """Readers that copy are broken before anything is probed. It is probed until it is free."""
    agent, key = published()
    agent.open_lease(key, 1, ROOT)
    call = agent.logged(agent.unpublish(key))
    assert agent.last(ProbeMapping) is None
    for _ in range(2):
        agent.tick(10)
        agent.probed(lent=True)
        assert agent.result(call) == "DrainTimeout"
        assert agent.memory(key) is DRAINING
        assert not agent.appended(Drained)
        call = agent.logged(agent.unpublish(key))
    before = len(agent.all(ProbeMapping))
    for number in range(1, 4):
        agent.probed(lent=True)
        assert agent.result(call) is None
        agent.tick(PROBE_AGAIN_S)
        assert len(agent.all(ProbeMapping)) == before + number
    agent.join(2)
    agent.tick(PROBE_AGAIN_S)
    freed(agent)
    assert (agent.result(call), agent.memory(key)) == ("done", EMPTY)


@pytest.mark.parametrize("waits_s", [0, 60])
def test_spare_memory_gets_the_bytes_and_is_the_shards_from_then_on(waits_s: float) -> None:
    """A copy that is under way is waited for beyond the bound."""
    agent, key, call = draining(staged=True)
    assert agent.last(CopyToSpare) is not None
    assert not agent.appended(Drained)
    agent.tick(waits_s)
    assert agent.result(call) is None
    agent.hear(Duplicated(key))
    assert agent.need(SaveManifest).swap
    agent.log()
    assert agent.result(call) == "done"
    held = agent.core.shards[key].contents
    assert (held.lent, held.spare_lent) == (False, True)


def test_both_memories_mapped_is_waited_for_and_either_one_will_do() -> None:
    agent, key = published(staged=True)
    agent.core.shards[key].contents.spare_lent = True
    call = agent.logged(agent.unpublish(key))
    for _ in range(2):
        agent.probed(lent=True)
        assert agent.need(ProbeMapping).spare
        agent.probed(lent=True)
        agent.tick(PROBE_AGAIN_S)
    asked = [(probe.spare, probe.asks_back) for probe in agent.all(ProbeMapping)]
    assert asked == [(False, False), (True, False), (False, False), (True, True), (False, False)], (
        "who maps the older version is asked to let go, and only once both are found mapped"
    )
    freed(agent)
    assert agent.result(call) == "done"
    assert agent.last(CopyToSpare) is None


def test_who_maps_the_only_memory_is_asked_to_let_go_of_it() -> None:
    agent, _, call = draining()
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=True)
    agent.tick(PROBE_AGAIN_S)
    freed(agent)
    assert agent.result(call) == "done"
    assert [probe.asks_back for probe in agent.all(ProbeMapping)] == [False, True, True]


@pytest.mark.parametrize("silent", [False, True])
def test_a_release_waits_too(*, silent: bool) -> None:
    """Without a caller as well, which has given up where the registry was silent."""
    agent, key = published()
    call = agent.release(key)
    if silent:
        agent.silence(call)
    agent.log()
    agent.probed(lent=True)
    assert key in agent.core.shards
    agent.tick(1.0 if silent else 10.0)
    assert agent.result(call) == ("RegistryUnavailable" if silent else "DrainTimeout")
    if silent:
        freed(agent)
    assert (key in agent.core.shards) is not silent


def test_an_agent_that_comes_back_hands_mapped_memory_to_nobody() -> None:
    """What was draining is as good as empty, but for those who map it."""
    agent, key = published()
    after = OneAgent(after=agent)
    after.core.adopt(spec_of(key), ShardContents(DRAINING, lent=True))
    after.join(2)
    for lent in (True, False):
        call = after.logged(after.attach(key, SESSION))
        after.probed(lent=lent)
        after.tick_and_log(10)
        assert after.result(call) == ("DrainTimeout" if lent else "done")
    assert after.memory(key) is EMPTY


def test_nothing_is_lent_before_the_log_has_taken_the_publication() -> None:
    agent = joined()
    key = agent.register("trainer")
    agent.publish(key, "a", version=1)
    assert isinstance(agent.lease(key, 1, ROOT), LeaseGrant)
    assert agent.lease(key, 1, ROOT, "mapped", mapped=True) is None
    agent.log()
    assert isinstance(agent.lease(key, 1, ROOT, "mapped", mapped=True), LeaseGrant)
    agent.unpublish(key)
    assert isinstance(agent.lease(key, 1, ROOT, "late", mapped=True), LeaseRefusal)


def test_what_an_unpublish_drains_is_not_read_into() -> None:
    agent, key, _ = draining()
    agent.tick(10)
    call = agent.logged(agent.read(key))
    assert agent.result(call) == "ReplicaConflict"
    assert "call unpublish again" in agent.why(call)
    assert agent.memory(key) is DRAINING


# Reading into what is mapped.


def to_overwrite(*, staged: bool) -> tuple[OneAgent, ShardKey, Callable[[], int]]:
    """A rollout whose memory, or spare memory, somebody maps, and what lets it get its leases on version 2."""
    trainer, agent, key = pair(staged=staged)
    agent.read_all(key, "a")
    agent.lend(key, 1, ROOT)
    if staged:
        held = agent.core.shards[key].contents
        held.lent, held.spare_lent = False, True
    trainer.publish_next("b")

    def reads() -> int:
        call = agent.read(key, "newer", patience=0.0)
        agent.begin_filling(key, "b")
        return call

    return agent, key, reads


@pytest.mark.parametrize("staged", [False, True])
def test_a_fill_waits_for_those_who_map_what_it_would_overwrite(*, staged: bool) -> None:
    agent, key, reads = to_overwrite(staged=staged)
    call = reads()
    assert agent.need(ProbeMapping).spare is staged
    agent.probed(lent=True)
    assert agent.memory(key) is READY
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.brought(key, "b")
    agent.closed(key)
    agent.log()
    assert agent.version_read(call) == agent.core.shards[key].contents.version == 2


@pytest.mark.parametrize("staged", [False, True])
def test_an_engine_whose_memory_is_mapped_may_call_again_and_again_until_it_is_let_go(*, staged: bool) -> None:
    """A fill that can't wait longer leaves what is mapped."""
    agent, key, reads = to_overwrite(staged=staged)
    written = len(agent.all(ReadBatch))
    for _ in range(2):
        call = reads()
        agent.probed(lent=True)
        agent.tick_and_log(10.0)
        agent.closed(key)
        agent.log()
        assert agent.result(call) == "DrainTimeout"
        what = f"shard 0: the memory that shard 0 of policy/{key.replica} would be filled in"
        assert agent.why(call) == f"{what} is still mapped by a reader of this host: call again"
        assert agent.memory(key) is (READY if staged else DRAINING)
    again = reads()
    agent.probed(lent=True)
    assert len(agent.all(ReadBatch)) == written
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.bring(key, "b")
    assert (agent.result(again), agent.memory(key)) == ("done", READY)


# The mapped shard itself.


def mapped() -> tuple[OneAgent, ShardKey]:
    """A mapped rollout, beside a trainer that has published version 1."""
    agent, _ = published_by_one()
    return agent, agent.register("rollout", mapped=True)


def said_of(agent: OneAgent, key: ShardKey) -> list[str]:
    """Return what is said of a replica and the log has not taken yet."""
    said = [each for each in agent.unsaid if isinstance(each, ShardCommand) and each.replica == key.replica]
    return [type(each).__name__ for each in said]


def test_what_its_worker_has_mapped_goes_with_the_worker() -> None:
    """It takes no room, serves nobody, waits for no start, and says all with one word once its lease has held."""
    agent, key = mapped()
    registered = agent.appended(Register)[-1]
    assert (registered.nbytes, registered.mapped) == (0, True)
    assert agent.result(agent.publish(key, "a")) == "NotFilled"
    assert agent.result(agent.unpublish(key)) == "NotPublished"
    call = agent.read(key)
    agent.lease_plan(key, "a")
    assert said_of(agent, key) == []
    assert agent.last(ReadBatch) is not None, "nothing is overwritten, so it maps at once"
    agent.brought(key, "a")
    assert said_of(agent, key) == []
    agent.confirmed(key)
    agent.closed(key)
    assert said_of(agent, key) == ["Filled"]
    assert [kind_of(event) for event in agent.log()] == ["replica.ready"]
    assert agent.result(call) == "done"
    assert agent.holds(key) == (READY, 1, ROOT)
    assert isinstance(agent.lease(key, 1, ROOT), LeaseRefusal)
    assert (agent.counted(key), agent.catalog.models[key.model].versions[1].holders) == (1, 1)
    agent.worker_gone()
    assert agent.said() == ["Unpublish", "Drained"]
    agent.log()
    assert (agent.memory(key), agent.counted(key)) == (EMPTY, None)


def test_what_its_worker_has_let_go_of_is_mapped_anew() -> None:
    """Else the shard would answer with the version that it is said to hold, which its tensors show no longer."""
    agent, key = mapped()

    def maps(call: int) -> int | None:
        agent.lease_plan(key, "a")
        agent.brought(key, "a")
        agent.confirmed(key)
        agent.closed(key)
        agent.log()
        assert agent.holds(key) == (READY, 1, ROOT)
        return agent.version_read(call)

    assert maps(agent.read(key)) == 1
    assert agent.version_read(agent.logged(agent.read(key))) == 1, "it holds that already"
    assert len(agent.all(ReadBatch)) == 1
    call = agent.read(key, has_let_go=True)
    assert said_of(agent, key)[:2] == ["Unpublish", "Drained"]
    assert agent.memory(key) is EMPTY
    assert maps(call) == 1
    assert len(agent.all(ReadBatch)) == 2


def test_where_a_sibling_is_missing_it_waits_for_the_start() -> None:
    agent = joined()
    for key in agent.register_all("trainer"):
        agent.publish(key, "a", 1)
    agent.log()
    rollout = agent.register_all("rollout", mapped=True)
    for key in rollout:
        agent.read(key)
    agent.lease_plan(rollout[1], "a")
    assert said_of(agent, rollout[1]) == ["Granted"]
    assert agent.last(ReadBatch) is None


def test_a_read_that_ends_without_a_swap_lets_go() -> None:
    agent, key = mapped()
    call = agent.read(key)
    agent.fill(key, "a")
    agent.tick_and_log(11)
    agent.closed(key)
    assert agent.result(call) == "RoundTimeout"
    assert agent.last(DropMapping) is not None
