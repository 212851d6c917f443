"""Memory that readers map, step by step: nothing says that it may be written before a probe has found it free."""

import pytest
from tests.unit.agent.core.scene import NBYTES, SESSION, OneAgent, digests_of

from tensorhub_agent.core.effects import (
    AppendCommand,
    BatchDone,
    CopyToSpare,
    DropMapping,
    Duplicated,
    ProbeMapping,
    ReadBatch,
    SaveManifest,
)
from tensorhub_agent.core.operations.reclaim import PROBE_AGAIN_S
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal
from tensorhub_common.protocol.log.commands import Drained, Filled, Register, ShardCommand, Unpublish
from tensorhub_common.protocol.log.events import kind_of

ROOT = root_digest(digests_of("one"))


def published(*, staged: bool = False) -> tuple[OneAgent, ShardKey]:
    """A trainer that has published version 1, which somebody has mapped."""
    agent = OneAgent()
    agent.join()
    key = agent.register("trainer", staged=staged)
    agent.publish(key, "one")
    agent.log()
    agent.lend(key, 1, ROOT)
    return agent, key


def drained(agent: OneAgent) -> bool:
    return any(isinstance(effect, AppendCommand) and isinstance(effect.command, Drained) for effect in agent.seen)


def test_one_memory_is_probed_again_until_it_is_free() -> None:
    agent, key = published()
    call = agent.unpublish(key)
    agent.log()
    for _ in range(3):
        agent.probed(lent=True)
        assert agent.end_of(call) is None
        before = sum(isinstance(effect, ProbeMapping) for effect in agent.seen)
        agent.tick(PROBE_AGAIN_S)
        assert sum(isinstance(effect, ProbeMapping) for effect in agent.seen) == before + 1
    agent.probed(lent=False)
    agent.log()
    assert agent.end_of(call) is not None
    assert agent.error_of(call) is None
    assert agent.memory(key) is MemoryState.EMPTY


def test_at_the_bound_the_call_raises_and_the_shard_drains_on() -> None:
    agent, key = published()
    for _ in range(2):
        call = agent.unpublish(key)
        agent.log()
        agent.probed(lent=True)
        agent.tick(10)
        assert agent.error_of(call) == "DrainTimeout"
        assert agent.memory(key) is MemoryState.DRAINING
        assert not drained(agent)
    again = agent.unpublish(key)
    agent.log()
    agent.probed(lent=False)
    agent.log()
    assert agent.error_of(again) is None
    assert agent.memory(key) is MemoryState.EMPTY


def test_readers_that_copy_are_broken_at_the_bound_before_anything_is_probed() -> None:
    agent, key = published()
    agent.open_lease(key, 1, ROOT)
    call = agent.unpublish(key)
    agent.log()
    assert agent.last(ProbeMapping) is None
    agent.tick(10)
    agent.probed(lent=True)
    assert agent.error_of(call) == "DrainTimeout"


def test_spare_memory_gets_the_bytes_and_is_the_shards_from_then_on() -> None:
    agent, key = published(staged=True)
    call = agent.unpublish(key)
    agent.log()
    agent.probed(lent=True)
    assert agent.last(CopyToSpare) is not None
    assert not drained(agent)
    agent.do(agent.core.on_outcome(Duplicated(key), agent.now))
    saved = agent.last(SaveManifest)
    assert saved is not None
    assert saved.swap
    agent.log()
    assert agent.end_of(call) is not None
    held = agent.core.shards[key].contents
    assert (held.lent, held.spare_lent) == (False, True)


def test_both_memories_mapped_is_waited_for_and_either_one_will_do() -> None:
    agent, key = published(staged=True)
    agent.core.shards[key].contents.spare_lent = True
    call = agent.unpublish(key)
    agent.log()
    for _ in range(2):
        agent.probed(lent=True)
        probe = agent.last(ProbeMapping)
        assert probe is not None
        assert probe.spare
        agent.probed(lent=True)
        assert agent.last(CopyToSpare) is None
        agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.log()
    assert agent.error_of(call) is None
    assert agent.last(CopyToSpare) is None


def test_a_copy_under_way_is_waited_for_beyond_the_bound() -> None:
    agent, key = published(staged=True)
    call = agent.unpublish(key)
    agent.log()
    agent.probed(lent=True)
    agent.tick(60)
    assert agent.end_of(call) is None
    agent.do(agent.core.on_outcome(Duplicated(key), agent.now))
    agent.log()
    assert agent.end_of(call) is not None
    assert agent.error_of(call) is None


def test_a_release_waits_too() -> None:
    agent, key = published()
    call = agent.release(key)
    agent.log()
    agent.probed(lent=True)
    agent.tick(10)
    assert agent.error_of(call) == "DrainTimeout"
    assert key in agent.core.shards


def test_an_agent_that_comes_back_hands_mapped_memory_to_nobody() -> None:
    """What was draining is as good as empty, but for those who map it."""
    agent, key = published()
    after = OneAgent(catalog=agent.catalog)
    place = ShardSpec(key, 1, spot=False, layout="f" * 64, nbytes=NBYTES)
    after.core.adopt(place, ShardContents(MemoryState.DRAINING, lent=True))
    after.join(2)
    call = after.attach(key, SESSION)
    after.log()
    after.probed(lent=True)
    after.tick(10)
    assert after.error_of(call) == "DrainTimeout"
    call = after.attach(key, SESSION)
    after.log()
    after.probed(lent=False)
    after.log()
    assert after.error_of(call) is None
    assert after.memory(key) is MemoryState.EMPTY


def test_what_the_log_does_not_know_drains_while_it_is_mapped() -> None:
    agent, key = published()
    agent.core.shards[key].believed(None, None)
    assert agent.memory(key) is MemoryState.DRAINING
    agent.core.check()


def test_a_rejoining_agent_goes_on_waiting() -> None:
    agent, key = published()
    call = agent.unpublish(key)
    agent.log()
    agent.probed(lent=True)
    agent.join(2)
    assert agent.end_of(call) is None
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.log()
    assert agent.error_of(call) is None
    assert agent.memory(key) is MemoryState.EMPTY


def test_nothing_is_lent_before_the_log_has_taken_the_publication() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("trainer")
    agent.publish(key, "one", version=1)
    assert isinstance(agent.lease(key, 1, ROOT), LeaseGrant)
    assert agent.lease(key, 1, ROOT, "mapped", mapped=True) is None
    agent.log()
    assert isinstance(agent.lease(key, 1, ROOT, "mapped", mapped=True), LeaseGrant)
    agent.unpublish(key)
    assert isinstance(agent.lease(key, 1, ROOT, "late", mapped=True), LeaseRefusal)


def reading(*, staged: bool) -> tuple[OneAgent, ShardKey]:
    """A rollout that holds version 1, mapped by somebody, and has its leases on version 2."""
    agent = OneAgent()
    agent.join()
    trainer, key = agent.register("trainer"), agent.register("rollout", staged=staged)
    agent.publish(trainer, "one")
    agent.publish(key, "one", version=1)
    agent.log()
    agent.lend(key, 1, ROOT)
    agent.unpublish(trainer)
    agent.log()
    agent.publish(trainer, "two")
    agent.log()
    return agent, key


def filling(*, staged: bool) -> tuple[OneAgent, ShardKey, int]:
    """Return one that would fill what somebody maps, in place or beside, and is to look whether they still do."""
    agent, key = reading(staged=staged)
    if staged:
        held = agent.core.shards[key].contents
        held.lent, held.spare_lent = False, True
    call = agent.read(key)
    agent.log()
    agent.plan(key)
    agent.opened(key, "two")
    agent.log()
    return agent, key, call


@pytest.mark.parametrize("staged", [False, True])
def test_a_fill_waits_for_those_who_map_what_it_would_overwrite(staged: bool) -> None:  # noqa: FBT001 (pytest's own form)
    agent, key, call = filling(staged=staged)
    probe = agent.last(ProbeMapping)
    assert probe is not None
    assert probe.spare is staged
    agent.probed(lent=True)
    assert agent.memory(key) is MemoryState.READY
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.brought(key, "two")
    agent.closed(key)
    agent.log()
    assert agent.error_of(call) is None
    assert agent.core.shards[key].contents.version == 2


@pytest.mark.parametrize("staged", [False, True])
def test_a_fill_that_can_not_wait_longer_leaves_what_is_mapped(staged: bool) -> None:  # noqa: FBT001 (pytest's own form)
    agent, key, call = filling(staged=staged)
    agent.probed(lent=True)
    agent.tick(10)
    agent.log()
    agent.closed(key)
    agent.log()
    assert agent.error_of(call) == "DrainTimeout"
    assert agent.memory(key) is (MemoryState.READY if staged else MemoryState.DRAINING)


# The mapped shard itself.


def mapped() -> tuple[OneAgent, ShardKey]:
    """A mapped rollout, and a trainer of another agent that has published version 1."""
    agent = OneAgent()
    agent.join()
    trainer = agent.register("trainer")
    agent.publish(trainer, "one")
    agent.log()
    return agent, agent.register("rollout", mapped=True)


def read_one(agent: OneAgent, key: ShardKey) -> int:
    call = agent.read(key)
    agent.log()
    agent.plan(key)
    agent.opened(key, "one")
    agent.log()
    answered = 0
    while answered < len(posts := [effect for effect in agent.seen if isinstance(effect, ReadBatch)]):
        agent.do(agent.core.on_outcome(BatchDone(key, posts[answered].source, posts[answered].batch, b""), agent.now))
        answered += 1
    return call


def test_it_takes_no_room_and_serves_nobody() -> None:
    agent, key = mapped()
    registered = [e.command for e in agent.seen if isinstance(e, AppendCommand) and isinstance(e.command, Register)][-1]
    assert (registered.nbytes, registered.mapped) == (0, True)
    read_one(agent, key)
    agent.confirmed(key)
    agent.closed(key)
    agent.log()
    assert agent.memory(key) is MemoryState.READY
    assert isinstance(agent.lease(key, 1, ROOT), LeaseRefusal)
    replica = agent.catalog.models[key.model].replicas["rollout"]
    assert (replica.version, agent.catalog.models[key.model].versions[1].holders) == (1, 1)


def test_it_counts_once_its_source_says_that_the_lease_still_holds() -> None:
    agent, key = mapped()
    call = read_one(agent, key)
    assert not any(isinstance(each, Filled) for each in agent.unsaid)
    agent.confirmed(key)
    agent.closed(key)
    agent.log()
    assert agent.error_of(call) is None
    assert agent.end_of(call) is not None


def said_of(agent: OneAgent, key: ShardKey) -> list[str]:
    """The words about the rollout that the log has not taken yet."""
    words = [each for each in agent.unsaid if isinstance(each, ShardCommand) and each.replica == key.replica]
    return [type(each).__name__ for each in words]


def test_it_waits_for_no_start_and_says_all_with_one_word() -> None:
    agent, key = mapped()
    call = agent.read(key)
    agent.log()
    agent.plan(key)
    agent.opened(key, "one")
    assert said_of(agent, key) == []
    assert isinstance(agent.last(ReadBatch), ReadBatch), "nothing is overwritten, so it maps at once"
    agent.brought(key, "one")
    agent.confirmed(key)
    agent.closed(key)
    assert said_of(agent, key) == ["Filled"]
    assert [kind_of(event) for event in agent.log()] == ["replica.ready"]
    assert agent.error_of(call) is None
    held = agent.core.shards[key].contents
    assert (held.version, held.root) == (1, ROOT)


def register_one_of_two(agent: OneAgent, replica: str, shard: int, *, mapped: bool = False) -> ShardKey:
    key = agent.register(replica, shard, 2, mapped=mapped)
    if shard > 0:
        agent.siblings_checked()
    return key


def test_where_a_sibling_is_missing_it_waits_for_the_start() -> None:
    agent = OneAgent()
    agent.join()
    trainer = [register_one_of_two(agent, "trainer", index) for index in (0, 1)]
    for key in trainer:
        agent.publish(key, "one", 1)
    agent.log()
    rollout = [register_one_of_two(agent, "rollout", index, mapped=True) for index in (0, 1)]
    for key in rollout:
        agent.read(key)
    agent.log()
    agent.plan(rollout[1])
    agent.opened(rollout[1], "one")
    assert said_of(agent, rollout[1]) == ["Granted"]
    assert agent.last(ReadBatch) is None


def test_a_read_that_ends_without_a_swap_lets_go() -> None:
    agent, key = mapped()
    call = read_one(agent, key)
    agent.tick(11)
    agent.log()
    agent.closed(key)
    assert agent.error_of(call) == "RoundTimeout"
    assert agent.last(DropMapping) is not None


def test_what_its_worker_has_mapped_goes_with_the_worker() -> None:
    agent, key = mapped()
    read_one(agent, key)
    agent.confirmed(key)
    agent.closed(key)
    agent.log()
    agent.do(agent.core.worker_gone(SESSION, agent.now))
    assert [type(each) for each in agent.unsaid] == [Unpublish, Drained]
    agent.log()
    assert agent.memory(key) is MemoryState.EMPTY
    assert agent.catalog.models[key.model].replicas["rollout"].version is None


def test_it_neither_publishes_nor_unpublishes() -> None:
    agent, key = mapped()
    assert agent.error_of(agent.publish(key, "one")) == "NotFilled"
    assert agent.error_of(agent.unpublish(key)) == "NotPublished"


def lent_engine() -> tuple[OneAgent, OneAgent, ShardKey]:
    """An engine that holds version 1 in one memory, which a reader of its host has mapped, and a trainer with 2."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    source = trainer.register("trainer")
    trainer.publish(source, "one")
    trainer.log()
    agent = OneAgent("agent-1", catalog=trainer.catalog)
    agent.join()
    key = agent.register("rollout")
    call = agent.read(key)
    filled(agent, key, "one")
    assert agent.error_of(call) is None
    agent.lend(key, 1, ROOT)
    trainer.unpublish(source)
    trainer.log()
    trainer.publish(source, "two")
    trainer.log()
    return trainer, agent, key


def filled(agent: OneAgent, key: ShardKey, text: str) -> None:
    """Let the read under way bring a version."""
    agent.log()
    agent.plan(key)
    agent.opened(key, text)
    agent.log()
    agent.brought(key, text)
    agent.log()


def test_an_engine_whose_memory_is_mapped_may_call_again_and_again_until_it_is_let_go() -> None:
    _, agent, key = lent_engine()
    for _ in range(2):
        call = agent.read(key, "newer", patience=0.0)
        agent.log()
        agent.plan(key)
        agent.opened(key, "two")
        agent.log()
        agent.probed(lent=True)
        agent.tick(10.0)
        agent.log()
        agent.closed(key)
        assert agent.error_of(call) == "DrainTimeout"
        assert agent.memory(key) is MemoryState.DRAINING
    again = agent.read(key, "newer", patience=0.0)
    agent.log()
    agent.plan(key)
    agent.opened(key, "two")
    agent.log()
    agent.probed(lent=True)
    assert agent.last(ReadBatch) is None or agent.memory(key) is not MemoryState.FILLING
    agent.tick(PROBE_AGAIN_S)
    agent.probed(lent=False)
    agent.brought(key, "two")
    agent.log()
    assert agent.error_of(again) is None
    assert agent.memory(key) is MemoryState.READY


def test_what_an_unpublish_drains_is_not_read_into() -> None:
    agent, key = published()
    agent.unpublish(key)
    agent.log()
    agent.probed(lent=True)
    agent.tick(10)
    call = agent.read(key)
    agent.log()
    assert agent.error_of(call) == "ReplicaConflict"
    end = agent.end_of(call)
    assert "call unpublish again and wait for its end" in getattr(end, "message", "")
    assert agent.memory(key) is MemoryState.DRAINING
