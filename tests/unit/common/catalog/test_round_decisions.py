"""Rounds in the fold, up to the decision: one answer for all shards of a replica, decided once."""

import pytest
from tests.unit.common.catalog.catalog_world import World, decided, failed, kinds, reader_of_two, refused, root

from tensorhub_common.catalog.state import Model
from tensorhub_common.catalog.version_selection import CannotDecide, NothingNewer, WaitForVersion, select_version
from tensorhub_common.errors import VersionConflict, VersionUnavailable
from tensorhub_common.protocol.log.commands import VERSION_MAX, VersionRequest
from tensorhub_common.protocol.log.events import RoundDecided, RoundJoined, RoundSettled

# --------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("wants", "patient", "held", "expected"),
    [
        ({0: "latest", 1: "latest"}, True, None, 12),
        ({0: "latest", 1: 11}, True, None, 11),
        ({0: 11, 1: "newer"}, True, 12, 11),
        ({0: 11, 1: 12}, True, None, CannotDecide),
        ({0: 12, 1: 12}, True, None, 12),
        ({0: 13, 1: "latest"}, True, None, WaitForVersion),
        ({0: 10, 1: 10}, True, None, CannotDecide),
        ({0: "newer", 1: "newer"}, True, 11, 12),
        ({0: "newer", 1: "newer"}, True, 12, WaitForVersion),
        ({0: "newer", 1: "newer"}, False, 12, NothingNewer),
        ({0: "newer", 1: "newer"}, False, None, 12),
        ({0: "newer", 1: "latest"}, False, 12, 12),
    ],
)
def test_the_wishes_of_all_shards_are_judged_together(
    wants: dict[int, VersionRequest], *, patient: bool, held: int | None, expected: int | type
) -> None:
    """Available are 11 and 12; 10 was there and has no holder any more."""
    world = World()
    for name, agent, version in (("old", "a", 10), ("eleven", "b", 11), ("twelve", "c", 12)):
        world.replica_of(name, agent)
        world.publish(name, version)
    world.empty("old")
    verdict = select_version(world.catalog.models["policy"], wants, patient, held)
    assert verdict == expected if isinstance(expected, int) else isinstance(verdict, expected)


@pytest.mark.parametrize(("wants", "patient"), [({0: "latest"}, False), ({0: 1}, False), ({0: "newer"}, True)])
def test_where_nothing_was_ever_published_a_round_waits(wants: dict[int, VersionRequest], *, patient: bool) -> None:
    assert isinstance(select_version(Model("m"), wants, patient, None), WaitForVersion)


# -------------------------------------------------------------------------------------------------------------- joining


def test_one_answer_for_all_is_decided_when_the_last_has_joined() -> None:
    world = reader_of_two()
    (joined,) = world.want("engine", "latest", 0)
    assert isinstance(joined, RoundJoined)
    assert (joined.round, joined.missing) == (joined.cmd, (1,))
    events = world.want("engine", "latest", 1)
    assert kinds(events) == ["round.joined", "round.decided"]
    decision = decided(events)
    assert (decision.round, decision.attempt, decision.version) == (joined.round, 1, 12)
    assert decision.roots == (root(12, 0), root(12, 1))


def test_a_turn_is_the_command_that_decided_last() -> None:
    """Agents that hear the event, and those that read a snapshot, must put the readers in one order."""
    world = reader_of_two()
    world.want("engine", "latest", 0)
    for attempt in (1, 2):
        last = decided(world.want("engine", "latest", 1) if attempt == 1 else world.replan("engine"))
        current = world.replica("engine").round
        assert current is not None
        assert (current.decided, last.attempt) == (last.cmd, attempt)
        world.granted("engine", 0)
        assert current.decided == last.cmd, "a lease decides nothing"


def test_latest_is_the_newest_available_when_the_last_shard_joins() -> None:
    world = reader_of_two()
    world.want("engine", "latest", 0)
    world.empty("trainer")
    world.publish("trainer", 13)
    assert decided(world.want("engine", "latest", 1)).version == 13


def test_latest_yields_to_a_number() -> None:
    world = reader_of_two()
    world.replica_of("other", "e", "f")
    world.publish("other", 13)
    world.want("engine", "latest", 0)
    assert decided(world.want("engine", 12, 1)).version == 12


def test_two_numbers_fail_the_round_at_once_for_all() -> None:
    world = World()
    world.replica_of("engine", "a", "b", "c")
    world.want("engine", 11, 0)
    failure = failed(world.want("engine", 12, 2))
    assert failure.error == VersionConflict.__name__
    assert "[11, 12]" in failure.message
    assert world.replica("engine").round is None


def test_none_yet_waits_also_for_a_model_nobody_published() -> None:
    world = reader_of_two(published=None)
    world.want("engine", "latest", 0)
    assert kinds(world.want("engine", "latest", 1)) == ["round.joined"]
    events = world.publish("trainer", 1)
    assert kinds(events) == ["version.published", "replica.ready", "round.decided"]
    assert decided(events).version == 1


def test_a_number_that_is_still_to_come_waits_for_exactly_that_number() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", 13, shard)
    world.empty("trainer")
    assert decided(world.publish("trainer", 13)).version == 13


def test_a_number_that_was_skipped_fails_when_a_higher_one_is_published() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", 13, shard)
    world.empty("trainer")
    assert failed(world.publish("trainer", 14)).error == VersionUnavailable.__name__


def test_a_number_without_a_live_holder_fails_when_the_last_has_joined() -> None:
    world = reader_of_two()
    world.empty("trainer")
    assert kinds(world.want("engine", 12, 0)) == ["round.joined"]
    assert "available now: none" in failed(world.want("engine", 12, 1)).message


def test_who_asks_for_what_is_gone_learns_what_can_be_had() -> None:
    world = World()
    for name, agent, version in (("late", "c", 9), ("gone", "a", 10), ("eleven", "b", 11)):
        world.replica_of(name, agent)
        world.publish(name, version)
    world.empty("gone")
    world.replica_of("engine", "d")
    failure = failed(world.want("engine", 10))
    assert failure.error == VersionUnavailable.__name__
    assert failure.message == "version 10 of model 'policy' has no live holder; available now: [9, 11]"


@pytest.mark.parametrize("number", [-1, VERSION_MAX + 1, 10**30])
def test_a_number_that_no_version_has_is_refused(number: int) -> None:
    refused(reader_of_two().want("engine", number), "VersionUnavailable")


def test_newer_may_be_none_for_all() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.want("engine", "newer", 0, patient=False)
    events = world.want("engine", "newer", 1)
    assert isinstance(events[-1], RoundSettled)
    assert world.replica("engine").version == 12


def test_patience_that_ends_settles_the_round_for_all() -> None:
    world = reader_of_two()
    world.fetch("engine")
    for shard in (0, 1):
        world.want("engine", "newer", shard)
    assert kinds(world.settle("engine", 1)) == ["round.joined", "round.settled"]


def test_patience_that_ends_before_all_have_joined_settles_nothing_yet() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.want("engine", "newer", 0)
    assert kinds(world.settle("engine", 0)) == ["round.joined"]
    assert kinds(world.want("engine", "newer", 1)) == ["round.joined", "round.settled"]


def test_patience_that_ends_after_the_decision_changes_nothing() -> None:
    world = reader_of_two()
    world.start("engine", "newer")
    assert kinds(world.settle("engine", 0)) == ["round.joined"]
    assert kinds(world.filled("engine", 12, 0)) == ["shard.filled"]


def test_patience_means_nothing_to_latest_and_to_a_number() -> None:
    world = reader_of_two(published=None)
    for shard in (0, 1):
        world.want("engine", "latest", shard, patient=False)
    assert world.replica("engine").round is not None
    world.settle("engine", 0)
    assert decided(world.publish("trainer", 1)).version == 1


def test_a_late_settle_is_refused() -> None:
    world = reader_of_two()
    world.fetch("engine")
    refused(world.settle("engine", 0, number=8), "BadCommand")


def test_whoever_waits_first_is_decided_first() -> None:
    world = World()
    world.replica_of("trainer", "a")
    for name, agent in (("late", "b"), ("early", "c")):
        world.replica_of(name, agent)
    world.want("early", "latest")
    world.want("late", "latest")
    events = world.publish("trainer", 1)
    assert [event.replica for event in events if isinstance(event, RoundDecided)] == ["early", "late"]


@pytest.mark.parametrize("published", [None, 12])
def test_a_second_call_on_a_shard_is_refused_while_the_first_is_under_way(published: int | None) -> None:
    world = reader_of_two(published=published)
    world.want("engine", "latest", 0)
    refused(world.want("engine", "latest", 0), "ReplicaConflict")
    world.want("engine", "latest", 1)
    refused(world.want("engine", "latest", 1), "ReplicaConflict")


def test_a_shard_that_is_being_published_can_not_join() -> None:
    world = reader_of_two()
    world.ready("engine", 13, 0)
    refused(world.want("engine", "latest", 0), "ReplicaConflict")


def test_a_draining_shard_can_not_join() -> None:
    world = reader_of_two()
    world.unpublish("trainer", 0)
    refused(world.want("trainer", "latest", 0), "ReplicaConflict")


def test_a_replica_that_holds_the_answer_is_ready_at_once() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.want("engine", "latest", 0)
    events = world.want("engine", 12, 1)
    assert kinds(events) == ["round.joined", "replica.ready"]
    assert world.replica("engine").round is None


def test_a_shard_that_holds_the_answer_is_not_filled_again() -> None:
    """One agent came back without its memory; the other one's bytes count."""
    world = reader_of_two()
    world.fetch("engine")
    world.join("d", world.holding("engine", 1).__class__(model="policy", replica="engine", shard=1))
    world.want("engine", "latest", 0)
    assert decided(world.want("engine", "latest", 1)).held == (0,)
    assert kinds(world.granted("engine", 1)) == ["round.started"]
    assert world.states("engine") == ["ready", "filling"]
    assert kinds(world.filled("engine", 12, 1)) == ["shard.filled", "replica.ready"]
