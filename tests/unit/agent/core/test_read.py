"""Reading as one shard of a round: when it writes, what its caller is told, and what stands there afterwards.

From whom it reads is in test_read_sources.py.
"""

import pytest

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    BreakLease,
    CompleteCall,
    Digested,
    DigestMemory,
    Keep,
    ReadBatch,
    ReportReplicaVersion,
    RequestLease,
    RequestPlan,
    SaveManifest,
)
from tensorhub_agent.core.operations.read import is_better_dropped
from tensorhub_agent.core.shard_state import MemoryState, ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.transitions import ShardState
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseRefusal
from tensorhub_common.protocol.log.commands import Drop, Filled, Replan, Rewind, VersionRequest
from tensorhub_common.protocol.plans import Refusal
from tensorhub_simulator.drivers.agent import (
    MODEL,
    NBYTES,
    SESSION,
    OneAgent,
    digests_of,
    joined,
    pair,
    ready,
    root_of,
    spec_of,
)

OLD, NEW = root_of("a"), root_of("b")
READY, EMPTY, FILLING = MemoryState.READY, MemoryState.EMPTY, MemoryState.FILLING
STOOD = (READY, 1, OLD)
SWAPPED = (READY, 2, NEW)


def filling() -> tuple[OneAgent, OneAgent, ShardKey, int]:
    trainer, reader, key = pair()
    call = reader.read(key)
    reader.lease_plan(key, "a")
    assert reader.last(ReadBatch) is None, "nothing may be asked for before every shard has its leases"
    reader.log()
    assert reader.memory(key) is FILLING
    return trainer, reader, key, call


# Its end.


def test_a_failed_round_answers_only_when_nothing_can_be_written_any_more() -> None:
    """What a later one has verified is not read again."""
    _, reader, key, call = filling()
    reader.tick_and_log(10.0)
    assert reader.result(call) is None, "a batch is still under way"
    reader.closed(key)
    assert reader.result(call) == "RoundTimeout"
    assert reader.why(call) == "shard 0: policy/rollout could not be filled within the bound: allow more time"
    assert (reader.memory(key), reader.core.shards[key].contents.partial) == (EMPTY, True)
    reader.read(key)
    reader.fill(key, "a")
    reader.unsaid.clear()
    reader.tick_and_log(10.0)
    again = reader.logged(reader.read(key))
    reader.log()
    assert reader.report(again).kept == 3


def test_a_round_that_was_taken_up_again_after_giving_up_is_left_for_good_by_a_fence() -> None:
    """The log answers a giving-up by a new attempt, and the caller has heard RegistryUnavailable: none may stay."""
    trainer, reader, key, call = filling()
    reader.lose_source(key)
    reader.refuse_plan(key)
    reader.tick(1.5)
    reader.refuse_plan(key)
    assert reader.said() == ["GiveUp"]
    reader.silence(call)
    trainer.publish_next("b")
    reader.log()
    assert reader.round_of(key) is None


def test_a_fill_that_nobody_was_told_of_is_taken_back() -> None:
    _, reader, key, call = filling()
    reader.brought(key, "a")
    reader.silence(call)
    assert reader.why(call) == (
        "the registry did not say what became of the read of shard 0 of policy/rollout; it is given up: "
        "see 'tensorhub status', then call again"
    )
    assert reader.said()[-2:] == ["Unpublish", "Drained"]
    reader.log()
    assert reader.counted(key) is None


def test_a_repeat_that_the_log_refuses_as_late_ends_no_call() -> None:
    """A delayed copy of the want comes after a later word of the lane: its refusal is not the want's outcome."""
    _, reader, key = pair()
    call = reader.read(key)
    want = reader.unsaid[0]
    reader.begin_filling(key, "a")
    reader.take(want)
    assert (reader.result(call), reader.memory(key)) == (None, FILLING)


def test_a_worker_that_dies_before_anything_is_written_leaves_the_round() -> None:
    _, reader, key = pair()
    reader.logged(reader.read(key))
    reader.worker_gone()
    reader.log()
    assert reader.core.shards[key].operation is None
    assert reader.round_of(key) is None


def test_what_was_filled_stands_though_a_sibling_was_not_and_the_round_failed() -> None:
    """The log goes on counting the shard as ready, and may answer the next read by it: it must not be forgotten."""
    trainer = joined("elsewhere")
    sources = trainer.register_all("trainer")
    reader = joined("agent-1", beside=trainer)
    late, whole = reader.register_all("rollout")
    for source in sources:
        trainer.publish(source, "a")
    trainer.log()
    calls = [reader.read(late), reader.read(whole)]
    for key in (late, whole):
        reader.log()
        reader.seen.append(next(each for each in reader.all(RequestPlan) if each.key == key))
        reader.plan(key)
        reader.opened(key, "a")
    reader.log()
    reader.bring(whole, "a")
    assert reader.memory(whole) is READY
    reader.tick_and_log(10.0)
    reader.closed(late)
    assert [reader.result(call) for call in calls] == ["RoundTimeout", "RoundTimeout"]
    shard = trainer.catalog.models[MODEL].replicas["rollout"].members[1]
    assert (shard.state, shard.version) == (ShardState.READY, 1)
    assert reader.holds(whole) == STOOD


# What its caller is told who waited in vain.


def waiting(shards: int, came: int, want: VersionRequest = "latest") -> tuple[OneAgent, list[int]]:
    """Shards of a replica that ask for a version of a model of which nothing is published."""
    agent = joined()
    calls = [agent.read(key, want, patience=10.0) for key in agent.register_all("rollout", shards)[:came]]
    agent.log()
    return agent, calls


@pytest.mark.parametrize(
    ("came", "want", "at_once", "error", "message"),
    [
        (3, "latest", True, "VersionUnavailable", "no version of model 'policy' was to be had within the bound"),
        (3, "latest", False, "VersionUnavailable", "no version of model 'policy' was to be had within the bound"),
        (3, 12, True, "VersionUnavailable", "version 12 of model 'policy' has no live holder within the bound"),
        (2, "latest", True, "RoundTimeout", "shards [2] of the replica did not join the round within the bound"),
        (2, "latest", False, "RoundTimeout", "shards [2] of the replica did not join the round within the bound"),
    ],
)
def test_all_shards_are_told_alike_who_or_what_was_missing(
    *, came: int, want: VersionRequest, at_once: bool, error: str, message: str
) -> None:
    """Whoever ends last doesn't wait for those who have left at the same bound, and is not told that it did."""
    agent, calls = waiting(3, came, want)
    agent.tick(10.0)
    while agent.unsaid:
        agent.log(3 if at_once else 1)
    assert [agent.result(call) for call in calls] == [error] * came
    for shard, call in enumerate(calls):
        where = f"shard {shard} of policy/rollout: " if error == "RoundTimeout" else ""
        assert agent.why(call).startswith(where + message)


def test_who_left_before_the_last_one_came_is_named() -> None:
    """They were never there together, so that nothing is published is not why."""
    agent, (first,) = waiting(shards=2, came=1)
    agent.tick_and_log(10.0)
    second = agent.logged(agent.read(agent.key("rollout", 1)))
    agent.tick_and_log(10.0)
    assert "shards [1] of the replica did not join" in agent.why(first)
    assert "shards [0] of the replica did not join" in agent.why(second)


# Its manifest.


def keeping() -> tuple[OneAgent, ShardKey, int, Keep]:
    """A reader to which all bytes have come, its call, and the manifest that is to be written."""
    _, reader, key, call = filling()
    reader.keeps = False
    reader.brought(key, "a")
    reader.closed(key)
    return reader, key, call, reader.need(Keep)


@pytest.mark.parametrize("failure", [None, "no room"])
def test_the_log_is_told_once_the_manifest_stands(failure: str | None) -> None:
    """No room for it costs a worker's read nothing now, and one more at the agent's next start."""
    reader, key, call, effect = keeping()
    reader.log()
    assert (effect.key, effect.version, effect.root) == (key, 1, OLD)
    assert (reader.said(), reader.result(call)) == ([], None)
    reader.kept(effect, failure)
    [filled] = reader.unsaid
    assert isinstance(filled, Filled)
    assert (filled.version, filled.root) == (1, OLD)
    reader.log()
    assert reader.version_read(call) == 1


def test_a_manifest_that_comes_too_late_is_none_of_a_later_fill() -> None:
    """The disk stands still until the call has ended, and the next one is whole; what was filled is a part."""
    reader, key, call, first = keeping()
    reader.tick_and_log(10.0)
    assert reader.result(call) == "RoundTimeout"
    assert "manifest is not written" in reader.why(call)
    assert (reader.memory(key), reader.core.shards[key].contents.partial) == (EMPTY, True)
    again = reader.logged(reader.read(key))
    reader.log()
    second = reader.need(Keep)
    assert second.number != first.number
    reader.kept(first)
    assert reader.said() == []
    reader.kept(second)
    reader.log()
    assert reader.result(again) == "done"


def test_without_a_registry_either_the_call_still_ends() -> None:
    reader, _, call, effect = keeping()
    reader.silence(call)
    before = reader.said()
    reader.kept(effect)
    assert reader.said() == before
    assert "Filled" not in before


# A holder that stands still, and one that is gone.

HELD = Refusal(error="VersionUnavailable", reason="its holder failed this read", is_held=True)
BOUND_S = 10.0


def waits_for_plan(want: VersionRequest = "latest") -> tuple[OneAgent, OneAgent, ShardKey, int]:
    trainer, reader, key = pair()
    call = reader.logged(reader.read(key, want, patience=0.0 if want == "newer" else 1e9))
    return trainer, reader, key, call


def stalls(reader: OneAgent, key: ShardKey, seconds: float, *, awake: bool = False) -> list[float]:
    """The only holder answers nothing for so long, unless it is `awake`, and the log counts it all the while.

    Returns when the log was asked to decide anew.
    """
    until, seen, replans = reader.now + seconds, 0, list[float]()
    while reader.now < until:
        effects, seen = reader.seen[seen:], len(reader.seen)
        for effect in effects:
            if isinstance(effect, RequestPlan):
                reader.seen.append(effect)
                if effect.demand.avoid:
                    reader.refuse_plan(key, HELD)
                else:
                    reader.plan(key)
            elif isinstance(effect, RequestLease) and awake:
                reader.opened(key, "a")
            elif isinstance(effect, ReadBatch):
                reader.brought(key, "a")
            elif isinstance(effect, RequestLease):
                reader.lose_source(key, "it does not answer")
        replans += [reader.now for command in reader.unsaid if isinstance(command, Replan)]
        reader.log()
        reader.tick(0.05)
    return replans


@pytest.mark.long
def test_a_read_whose_only_holder_stands_still_goes_on_and_ends_when_that_wakes() -> None:
    """While it waits the log is asked for a newer version now and then."""
    _, reader, key, call = waits_for_plan()
    replans = stalls(reader, key, BOUND_S - 3.0)
    assert 2 <= len(replans) <= 4
    assert reader.result(call) is None
    stalls(reader, key, 2.5, awake=True)
    assert reader.result(call) == "done"


def test_at_its_deadline_it_says_who_stood_still_and_an_update_is_put_off() -> None:
    """An update that can't have the newer version now returns none, and says why."""
    _, reader, key, call = waits_for_plan()
    stalls(reader, key, BOUND_S + 0.2)
    reader.log()
    assert reader.result(call) == "RoundTimeout"
    assert "the last source, on elsewhere, was left because it does not answer" in reader.why(call)
    _, reader, key, call = waits_for_plan("newer")
    stalls(reader, key, BOUND_S + 0.2)
    reader.log()
    assert reader.version_read(call) is None
    assert "was left because it does not answer" in reader.report(call).failure


def test_an_update_that_has_begun_to_overwrite_raises() -> None:
    """What the shard held is gone, so its worker must not go on with it."""
    _, reader, key, call = waits_for_plan("newer")
    reader.begin_filling(key, "a")
    reader.lose_source(key)
    reader.refuse_plan(key, Refusal(error="VersionUnavailable", reason="nobody has it", is_held=False))
    reader.log()
    assert reader.result(call) == "VersionUnavailable"


# A newer version that comes while one is read.


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "dropped"),
    [
        (0, 100, 0.0, True),
        (10, 100, 10.0, True),
        (49, 100, 100.0, True),
        (50, 100, 100.0, False),
        (40, 100, 0.1, False),
        (1, 2_000_000, 0.5 / 2_000_000, False),
    ],
)
def test_what_is_far_from_its_end_is_dropped_and_what_is_near_is_finished(
    *, done: int, total: int, elapsed_s: float, dropped: bool
) -> None:
    assert is_better_dropped(done, total, elapsed_s, 0.5) is dropped


def overtaken(want: VersionRequest, *, begun: bool) -> tuple[OneAgent, ShardKey, int]:
    """An engine that reads version 1, where another trainer publishes 2; `begun`: it writes already."""
    trainer, agent, key = pair()
    second = trainer.register("second")
    call = agent.logged(agent.read(key, want))
    if begun:
        agent.begin_filling(key, "a")
        assert agent.memory(key) is FILLING
    trainer.logged(trainer.publish(second, "b", 2))
    return agent, key, call


def test_a_read_of_which_nothing_has_come_takes_up_the_newer_version() -> None:
    agent, key, call = overtaken("latest", begun=True)
    assert isinstance(agent.unsaid[-1], Drop)
    agent.log()
    agent.closed(key)
    agent.fill(key, "b")
    agent.closed(key)
    agent.log()
    assert agent.version_read(call) == 2
    assert agent.holds(key) == SWAPPED
    agent, _, _ = overtaken(1, begun=True)
    assert agent.unsaid == [], "it was asked for by number"


def test_a_version_that_is_overtaken_before_the_leases_stand_is_not_begun() -> None:
    agent, key, _ = overtaken("latest", begun=False)
    agent.begin_filling(key, "a")
    assert agent.memory(key) is EMPTY
    current = agent.round_of(key)
    assert current is not None
    assert (current.version, current.superseded) == (2, 1)


# A staged read: the old version is held and served until the log has swapped, whatever ends before.


def standing() -> tuple[OneAgent, OneAgent, ShardKey]:
    """A trainer that has published versions 1 and 2, and a staged rollout that holds 1."""
    trainer, reader, key = pair(staged=True)
    reader.read_all(key, "a")
    assert reader.holds(key) == STOOD
    assert reader.last(Keep) is None, "what swaps has no manifest of its own until it has swapped"
    trainer.publish_next("b")
    return trainer, reader, key


def staged(reader: OneAgent, key: ShardKey) -> int:
    """Bring all of version 2; `filled` is said, and the log has not taken it yet."""
    call = reader.read(key)
    reader.fill(key, "b")
    assert isinstance(reader.unsaid[-1], Filled)
    return call


def test_the_old_version_is_held_and_served_until_the_swap() -> None:
    """The manifest says that it swapped before anybody is told; what was verified beside does not count afterwards."""
    trainer, reader, key = standing()
    for name in ("before", "ends"):
        reader.open_lease(key, 1, OLD, name)
    call = staged(reader, key)
    assert (reader.holds(key), reader.counted(key)) == (STOOD, 1)
    reader.open_lease(key, 1, OLD, "meanwhile")
    assert reader.core.leases.holds("before")
    reader.end_lease("ends")
    reader.seen.clear()
    reader.log()
    assert (reader.holds(key), reader.counted(key)) == (SWAPPED, 2)
    assert {effect.lease for effect in reader.all(BreakLease)} == {"before", "meanwhile"}
    assert isinstance(reader.lease(key, 1, OLD, "late"), LeaseRefusal)
    reader.open_lease(key, 2, NEW, "next")
    assert reader.version_read(call) == 2
    told = (SaveManifest, ReportReplicaVersion, CompleteCall)
    assert [type(effect) for effect in reader.seen if isinstance(effect, told)] == list(told)
    [manifest] = reader.all(SaveManifest)
    assert (manifest.swap, manifest.version, manifest.root) == (True, 2, NEW)
    assert reader.core.shards[key].contents.kept is None
    trainer.publish_next("c")
    reader.read_all(key, "c")
    assert reader.holds(key) == (READY, 3, root_of("c"))


def test_a_staged_read_that_fails_changes_nothing_and_what_it_verified_counts() -> None:
    _, reader, key = standing()
    reader.open_lease(key, 1, OLD)
    call = staged(reader, key)
    reader.unsaid.clear()
    reader.tick_and_log(10.0)
    assert reader.result(call) == "RoundTimeout"
    assert (reader.holds(key), reader.counted(key)) == (STOOD, 1)
    assert not reader.core.shards[key].contents.partial
    posts = len(reader.all(ReadBatch))
    again = reader.logged(reader.read(key))
    assert (reader.version_read(again), reader.report(again).kept) == (2, 3)
    assert len(reader.all(ReadBatch)) == posts


def test_a_worker_that_dies_between_fill_and_swap_leaves_the_next_one_the_new_version() -> None:
    _, reader, key = standing()
    staged(reader, key)
    reader.worker_gone()
    attached = reader.attach(key, SESSION + 1)
    assert reader.result(attached) is None, "it waits for what is under way"
    reader.log()
    assert reader.holds(key) == SWAPPED
    assert reader.result(attached) == "done"


def test_an_agent_that_dies_between_the_logs_swap_and_its_own_comes_back_with_the_old_version() -> None:
    _, reader, key = standing()
    staged(reader, key)
    apply(reader.catalog, reader.catalog.seq + 1, reader.now, reader.unsaid.pop())
    assert reader.counted(key) == 2
    after = OneAgent("agent-1", after=reader)
    after.core.adopt(spec_of(key, staged=True), ready())
    after.join(2)
    assert (after.holds(key), after.counted(key)) == (STOOD, 1)
    staged(after, key)
    after.log()
    assert (after.holds(key), after.counted(key)) == (SWAPPED, 2)


def test_an_agent_that_is_taken_for_lost_while_it_fills_keeps_what_it_held() -> None:
    _, reader, key = standing()
    call = staged(reader, key)
    reader.unsaid.clear()
    reader.join(2)
    assert reader.result(call) == "AgentUnavailable"
    assert (reader.holds(key), reader.counted(key)) == (STOOD, 1)


def test_without_a_word_of_the_log_it_holds_neither_version() -> None:
    """It may have swapped or not; the bytes of the old version stay where the tensors stand."""
    _, reader, key = standing()
    reader.open_lease(key, 1, OLD)
    reader.silence(staged(reader, key))
    assert reader.holds(key) == (EMPTY, None, None)
    assert not reader.core.leases.holds("lease")
    assert reader.said()[-3:] == ["GiveUp", "Unpublish", "Drained"]
    reader.log()
    assert reader.counted(key) is None


@pytest.mark.parametrize("filled", [False, True])
def test_a_round_that_goes_back_to_what_stands_here_answers_when_nothing_is_written_any_more(*, filled: bool) -> None:
    """Only a staged shard can hold the round's version while it fills another; what is filled swaps to nothing."""
    _, reader, key = standing()
    if filled:
        call = staged(reader, key)
        reader.unsaid.clear()
    else:
        call = reader.read(key)
        reader.begin_filling(key, "b")
    reader.take(Rewind(model=key.model, to=1))
    if not filled:
        assert reader.result(call) is None, "a batch is still under way"
        reader.closed(key)
    assert reader.end_of(call) == CompleteCall(call=call, version=1)
    assert reader.holds(key) == STOOD


# What the log and an agent take a shard for, after a call that ended in between: calling again must help.


def agrees(agent: OneAgent, key: ShardKey) -> bool:
    """Tell whether both take the shard for the same."""
    shard = agent.catalog.models[MODEL].replicas[key.replica].members[key.shard]
    memory, version, _ = agent.holds(key)
    return (shard.state is ShardState.READY, shard.version) == (memory is READY, version)


def between_versions() -> tuple[OneAgent, ShardKey]:
    """A rollout that holds version 1, where the trainer has gone on to 2."""
    trainer, reader, key = pair()
    reader.read_all(key, "a")
    trainer.publish_next("b")
    return reader, key


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_a_read_that_waits_for_readers_when_its_agent_joins_anew_leaves_what_it_stated(*, mapped: bool) -> None:
    """The log restates the old version, which nobody has touched: it is served, and the next calls go on from it."""
    reader, key = between_versions()
    reader.core.config = reader.core.shards[key].config = CoreConfig(refill_drain_s=0.0 if mapped else 5.0)
    if mapped:
        reader.lend(key, 1, OLD)
    else:
        reader.open_lease(key, 1, OLD)
    call = reader.read(key, "newer")
    reader.begin_filling(key, "b")
    if mapped:
        reader.probed(lent=True)
    reader.joins(2)
    reader.closed(key)
    reader.log()
    assert reader.result(call) == "AgentUnavailable"
    assert agrees(reader, key)
    assert reader.holds(key) == STOOD
    reader.open_lease(key, 1, OLD, "reads-again")
    again = reader.logged(reader.read(key, 1))
    assert reader.end_of(again) == CompleteCall(call=again, version=1)
    if not mapped:
        for name in ("lease", "reads-again"):
            reader.end_lease(name)
        taken_back = reader.logged(reader.unpublish(key))
        assert reader.result(taken_back) == "done"


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_fill_that_the_log_refuses_leaves_the_round(*, staged: bool) -> None:
    """An engine without digests has told the log a root of this layout meanwhile; others can still call."""
    trainer, _, _ = pair()

    def engine(name: str, *, digests: bool) -> tuple[OneAgent, ShardKey, int]:
        agent = joined(name, digests=digests, beside=trainer)
        key = agent.key(f"engine-{name}")
        agent.logged(
            agent.begin_register(
                ShardSpec(key, 1, spot=False, layout="e" * 64, nbytes=NBYTES, staged=staged and digests)
            )
        )
        return agent, key, agent.read(key)

    proves, key, call = engine("on", digests=True)
    proves.log()
    trusts, other, _ = engine("off", digests=False)
    for agent, its in ((proves, key), (trusts, other)):
        agent.begin_filling(its, "a")
    trusts.brought(other, "a")
    trusts.confirmed(other)
    trusts.closed(other)
    trusts.log()
    proves.brought(key, "a")
    if (digest := proves.last(DigestMemory)) is not None:
        proves.hear(Digested(key, digest.number, digests_of("a")))
    proves.closed(key)
    proves.log()
    assert proves.result(call) == "IntegrityError"
    assert proves.round_of(key) is None
    assert proves.memory(key) is EMPTY
    assert agrees(proves, key)
    again = proves.logged(proves.read(key))
    assert proves.result(again) is None, "it is read again, and not refused"


def test_what_the_log_gave_up_for_a_read_that_failed_in_that_moment_is_not_held() -> None:
    """The sources go after they had granted: nothing is written, and the old version counts nowhere."""
    reader, key = between_versions()
    call = reader.read(key)
    reader.lease_plan(key, "b")
    reader.lose_source(key, "killed")
    for _ in range(60):
        reader.refuse_plan(key)
        reader.tick(PLAN_AGAIN_S)
    reader.log()
    assert reader.result(call) != "done"
    assert agrees(reader, key)


def test_what_the_log_gave_up_for_a_read_that_had_given_up_is_not_held() -> None:
    """The log is silent until the call has ended, and starts its round then."""
    reader, key = between_versions()
    call = reader.read(key, "newer")
    reader.lease_plan(key, "b")
    reader.tick(10.0)
    reader.tick(OUTCOME_S_MAX)
    reader.closed(key)
    assert reader.result(call) == "RegistryUnavailable"
    reader.log()
    assert agrees(reader, key)
    assert reader.memory(key) is EMPTY
    again = reader.read_all(key, "b")
    assert reader.result(again) == "done"


def test_a_start_that_comes_after_the_agent_has_begun_to_join_anew_gives_nothing_up() -> None:
    """The join fails the round, and the log takes what is stated in it."""
    reader, key = between_versions()
    reader.read(key, "newer")
    reader.lease_plan(key, "b")
    [granted] = reader.unsaid
    started = apply(reader.catalog, reader.catalog.seq + 1, reader.now, granted)
    reader.unsaid.clear()
    reader.joins(2)
    reader.closed(key)
    for event in started:
        reader.do(reader.core.on_event(event, reader.now))  # type: ignore[arg-type]  # It is any event.
    reader.log()
    assert agrees(reader, key)
    assert reader.holds(key) == STOOD
    reader.open_lease(key, 1, OLD)
