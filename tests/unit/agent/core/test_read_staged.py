"""A staged read, step by step: the old version is held and served until the log has swapped, whatever ends before."""

from tests.unit.agent.core.scene import NBYTES, SESSION, OneAgent, digests_of

from tensorhub_agent.core.effects import BreakLease, CompleteCall, ReadBatch, ReportReplicaVersion, SaveManifest
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.catalog.apply import apply
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseRefusal
from tensorhub_common.protocol.log.commands import Drained, Filled, GiveUp, Rewind, Unpublish

OLD, NEW = root_digest(digests_of("a")), root_digest(digests_of("b"))


def standing() -> tuple[OneAgent, OneAgent]:
    """A trainer that has published versions 1 and 2, and a staged rollout that holds 1."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    key = reader.register("rollout", staged=True)
    publish(trainer, "a")
    reader.read(key)
    fill(reader, "a")
    reader.log()
    assert held(reader) == (MemoryState.READY, 1, OLD)
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    publish(trainer, "b")
    return trainer, reader


def publish(trainer: OneAgent, text: str) -> None:
    trainer.publish(trainer.key("trainer"), text)
    trainer.log()


def fill(reader: OneAgent, text: str) -> None:
    """Bring all pieces; `filled` is said, and the log has not taken it yet."""
    key = reader.key("rollout")
    reader.log()
    reader.plan(key)
    reader.opened(key, text)
    reader.log()
    reader.brought(key, text)
    assert isinstance(reader.unsaid[-1], Filled)


def held(reader: OneAgent) -> tuple[MemoryState, int | None, str | None]:
    now = reader.core.shards[reader.key("rollout")].contents
    return now.memory, now.version, now.root


def by_the_log(reader: OneAgent) -> int | None:
    return reader.catalog.models["policy"].replicas["rollout"].version


def test_the_old_version_is_held_and_served_until_the_swap() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    reader.open_lease(key, 1, OLD, "before")
    call = reader.read(key)
    fill(reader, "b")
    assert (held(reader), by_the_log(reader)) == ((MemoryState.READY, 1, OLD), 1)
    reader.open_lease(key, 1, OLD, "meanwhile")
    assert reader.core.leases.holds("before")
    seen = len(reader.seen)
    reader.log()
    assert (held(reader), by_the_log(reader)) == ((MemoryState.READY, 2, NEW), 2)
    broken = {effect.lease for effect in reader.seen[seen:] if isinstance(effect, BreakLease)}
    assert broken == {"before", "meanwhile"}
    assert isinstance(reader.lease(key, 1, OLD, "late"), LeaseRefusal)
    reader.open_lease(key, 2, NEW, "next")
    end = reader.end_of(call)
    assert isinstance(end, CompleteCall)
    assert end.version == 2


def test_the_manifest_says_that_it_swapped_before_anybody_is_told() -> None:
    _, reader = standing()
    reader.read(reader.key("rollout"))
    fill(reader, "b")
    seen = len(reader.seen)
    reader.log()
    told = [
        effect
        for effect in reader.seen[seen:]
        if isinstance(effect, SaveManifest | ReportReplicaVersion | CompleteCall)
    ]
    assert [type(effect) for effect in told] == [SaveManifest, ReportReplicaVersion, CompleteCall]
    assert isinstance(told[0], SaveManifest)
    assert (told[0].swap, told[0].version, told[0].root) == (True, 2, NEW)
    assert sum(effect.swap for effect in reader.seen if isinstance(effect, SaveManifest)) == 2


def test_a_read_that_fails_changes_nothing_and_what_it_verified_counts() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    reader.open_lease(key, 1, OLD)
    call = reader.read(key)
    fill(reader, "b")
    reader.unsaid.clear()
    reader.tick(10.0)
    reader.log()
    assert reader.error_of(call) == "RoundTimeout"
    assert (held(reader), by_the_log(reader)) == ((MemoryState.READY, 1, OLD), 1)
    assert not reader.core.shards[key].contents.partial
    posts = sum(isinstance(effect, ReadBatch) for effect in reader.seen)
    again = reader.read(key)
    reader.log()
    end = reader.end_of(again)
    assert isinstance(end, CompleteCall)
    assert end.report is not None
    assert (end.version, end.report.kept) == (2, 3)
    assert sum(isinstance(effect, ReadBatch) for effect in reader.seen) == posts


def test_what_was_verified_beside_does_not_count_after_a_swap() -> None:
    """The spare memory is another one then."""
    trainer, reader = standing()
    key = reader.key("rollout")
    reader.read(key)
    fill(reader, "b")
    reader.log()
    assert reader.core.shards[key].contents.kept is None
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    publish(trainer, "c")
    reader.read(key)
    fill(reader, "c")
    reader.log()
    assert held(reader) == (MemoryState.READY, 3, root_digest(digests_of("c")))


def test_a_worker_that_dies_between_fill_and_swap_leaves_the_next_one_the_new_version() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    reader.read(key)
    fill(reader, "b")
    reader.do(reader.core.worker_gone(SESSION, reader.now))
    attached = reader.attach(key, SESSION + 1)
    assert reader.end_of(attached) is None, "it waits for what is under way"
    reader.log()
    assert held(reader) == (MemoryState.READY, 2, NEW)
    assert isinstance(reader.end_of(attached), CompleteCall)


def test_an_agent_that_dies_between_the_logs_swap_and_its_own_comes_back_with_the_old_version() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    reader.read(key)
    fill(reader, "b")
    apply(reader.catalog, reader.catalog.seq + 1, reader.now, reader.unsaid.pop())
    assert by_the_log(reader) == 2
    after = OneAgent("agent-1", catalog=reader.catalog)
    manifest = ShardContents(MemoryState.READY, version=1, root=OLD, digests=digests_of("a"))
    after.core.adopt(ShardSpec(key, 1, spot=False, layout="f" * 64, nbytes=NBYTES, staged=True), manifest)
    after.join(2)
    assert (held(after), by_the_log(after)) == ((MemoryState.READY, 1, OLD), 1)
    after.read(key)
    fill(after, "b")
    after.log()
    assert (held(after), by_the_log(after)) == ((MemoryState.READY, 2, NEW), 2)


def test_an_agent_that_is_taken_for_lost_while_it_fills_keeps_what_it_held() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    call = reader.read(key)
    fill(reader, "b")
    reader.unsaid.clear()
    reader.join(2)
    assert reader.error_of(call) == "AgentUnavailable"
    assert (held(reader), by_the_log(reader)) == ((MemoryState.READY, 1, OLD), 1)


def test_without_a_word_of_the_log_it_holds_neither_version() -> None:
    """It may have swapped or not; the bytes of the old version stay where the tensors stand."""
    _, reader = standing()
    key = reader.key("rollout")
    reader.open_lease(key, 1, OLD)
    call = reader.read(key)
    fill(reader, "b")
    reader.tick(10.0)
    reader.tick(OUTCOME_S_MAX)
    assert reader.error_of(call) == "RegistryUnavailable"
    assert held(reader) == (MemoryState.EMPTY, None, None)
    assert not reader.core.leases.holds("lease")
    assert [type(command) for command in reader.unsaid[-3:]] == [GiveUp, Unpublish, Drained]
    reader.log()
    assert by_the_log(reader) is None


def test_a_reader_of_the_old_version_ends_in_order_while_the_new_one_comes() -> None:
    _, reader = standing()
    key = reader.key("rollout")
    reader.open_lease(key, 1, OLD)
    reader.read(key)
    fill(reader, "b")
    reader.do(reader.core.lease_ended("lease", LeaseTransition.DONE, reader.now))
    reader.log()
    assert held(reader) == (MemoryState.READY, 2, NEW)


def test_a_round_that_goes_back_to_what_stands_here_answers_when_nothing_is_written_any_more() -> None:
    """Only a staged shard can hold the round's version while it fills another."""
    _, reader = standing()
    key = reader.key("rollout")
    call = reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "b")
    reader.log()
    assert reader.last(ReadBatch) is not None
    reader.take(Rewind(model=key.model, to=1))
    assert reader.end_of(call) is None, "a batch is still under way"
    reader.closed(key)
    end = reader.end_of(call)
    assert isinstance(end, CompleteCall)
    assert (end.version, end.report) == (1, None)
    assert held(reader) == (MemoryState.READY, 1, OLD)


def test_a_round_that_goes_back_after_all_is_filled_swaps_to_nothing() -> None:
    """The spare memory holds a version that was retired, and the log's word is about another one."""
    _, reader = standing()
    key = reader.key("rollout")
    call = reader.read(key)
    fill(reader, "b")
    reader.unsaid.clear()
    reader.take(Rewind(model=key.model, to=1))
    end = reader.end_of(call)
    assert isinstance(end, CompleteCall)
    assert (end.version, end.report) == (1, None)
    assert held(reader) == (MemoryState.READY, 1, OLD)
