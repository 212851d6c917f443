"""Rounds: one answer for all shards of a replica, decided once; then leases, then the writing, and every way to end."""

from collections.abc import Callable

import pytest
from tests.unit.common.catalog.scenes import BAD, GONE, holding, of, only, republished, round_of, standing, updatable

from tensorhub_common.catalog.state import ATTEMPTS_MAX, Model
from tensorhub_common.catalog.version_selection import CannotDecide, NothingNewer, WaitForVersion, select_version
from tensorhub_common.protocol.log.commands import GiveUp, VersionRequest
from tensorhub_common.protocol.log.events import (
    ReplicaReady,
    RoundDecided,
    RoundJoined,
    RoundReopened,
    RoundWithdrawn,
    ShardFilled,
)
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_simulator.drivers.catalog import CatalogDriver, decided, failed, kinds, reader_of_two, refused, root


def decided_12() -> CatalogDriver:
    """Return an engine whose round is decided, and has no leases yet."""
    world = reader_of_two()
    world.want_all("engine")
    return world


def filling_12() -> CatalogDriver:
    world = reader_of_two()
    world.start("engine")
    return world


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
    world = standing(old="a", eleven="b", twelve="c")
    for name, version in (("old", 10), ("eleven", 11), ("twelve", 12)):
        world.publish(name, version)
    world.empty("old")
    verdict = select_version(world.catalog.models["policy"], wants, patient, held)
    assert verdict == expected if isinstance(expected, int) else isinstance(verdict, expected)


@pytest.mark.parametrize(("wants", "patient"), [({0: "latest"}, False), ({0: 1}, False), ({0: "newer"}, True)])
def test_where_nothing_was_ever_published_a_round_waits(wants: dict[int, VersionRequest], *, patient: bool) -> None:
    assert isinstance(select_version(Model("m"), wants, patient, None), WaitForVersion)


def test_one_answer_for_all_is_decided_when_the_last_has_joined() -> None:
    world = reader_of_two()
    joined = only(world.want("engine", "latest", 0), RoundJoined)
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
        assert (round_of(world).decided, last.attempt) == (last.cmd, attempt)
        world.granted("engine", 0)
        assert round_of(world).decided == last.cmd, "a lease decides nothing"


@pytest.mark.parametrize(("wish", "version"), [("latest", 13), (12, 12)])
def test_latest_is_the_newest_available_when_the_last_shard_joins(wish: VersionRequest, version: int) -> None:
    """And yields to a number."""
    world = reader_of_two()
    world.want("engine", "latest", 0)
    world.replica_of("other", "e", "f")
    world.publish("other", 13)
    assert decided(world.want("engine", wish, 1)).version == version


def test_two_numbers_fail_the_round_at_once_for_all() -> None:
    world = standing(engine="abc")
    world.want("engine", 11, 0)
    failure = failed(world.want("engine", 12, 2))
    assert failure.error == "VersionConflict"
    assert "[11, 12]" in failure.message
    assert world.replica("engine").round is None


@pytest.mark.parametrize("patient", [True, False])
def test_none_yet_waits_also_for_a_model_nobody_published_whatever_the_patience(*, patient: bool) -> None:
    world = reader_of_two(published=None)
    assert kinds(world.want_all("engine", patient=patient)) == ["round.joined"]
    assert kinds(world.settle("engine", 0)) == ["round.joined"]
    events = world.publish("trainer", 1)
    assert kinds(events) == ["version.published", "replica.ready", "round.decided"]
    assert decided(events).version == 1


def test_a_number_that_was_skipped_fails_when_a_higher_one_is_published() -> None:
    """One that is still to come is waited for."""
    for published in (13, 14):
        world = reader_of_two()
        world.want_all("engine", 13)
        events = republished(world, published)
        assert decided(events).version == 13 if published == 13 else failed(events).error == GONE


def test_who_asks_for_what_is_gone_learns_what_can_be_had() -> None:
    world = standing(late="a", gone="b", eleven="c", engine="de")
    for name, version in (("late", 9), ("gone", 10), ("eleven", 11)):
        world.publish(name, version)
    world.empty("gone")
    assert kinds(world.want("engine", 10, 0)) == ["round.joined"]
    failure = failed(world.want("engine", 10, 1))
    assert failure.error == GONE
    assert failure.message == "version 10 of model 'policy' has no live holder; available now: [9, 11]"
    world.empty("late")
    world.empty("eleven")
    assert failed(world.want_all("engine", 10)).message.endswith("available now: none")


def test_patience_that_ends_settles_the_round_for_all_once_all_have_joined() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.want_all("engine", "newer")
    assert kinds(world.settle("engine", 1)) == ["round.joined", "round.settled"]
    world.want("engine", "newer", 0)
    assert kinds(world.settle("engine", 0)) == ["round.joined"]
    assert kinds(world.want("engine", "newer", 1)) == ["round.joined", "round.settled"]
    world.want("engine", "newer", 0, patient=False)
    assert kinds(world.want("engine", "newer", 1)) == ["round.joined", "round.settled"]
    assert world.replica("engine").version == 12


def test_a_shard_that_holds_the_answer_is_not_filled_again() -> None:
    """One agent came back without its memory; the other one's bytes count."""
    world = reader_of_two()
    world.fetch("engine")
    world.want("engine", "latest", 0)
    assert kinds(world.want("engine", 12, 1)) == ["round.joined", "replica.ready"], "all of them hold it"
    assert world.replica("engine").round is None
    world.join("d", holding(None, None, replica="engine", shard=1))
    assert decided(world.want_all("engine")).held == (0,)
    assert kinds(world.granted("engine", 1)) == ["round.started"]
    assert world.states("engine") == ["ready", "filling"]
    assert kinds(world.filled("engine", 12, 1)) == ["shard.filled", "replica.ready"]


@pytest.mark.parametrize("level", [Level.TOLERANT, NEWEST_LEVEL])
def test_whoever_waits_first_is_decided_first_and_each_once(level: Level) -> None:
    world = CatalogDriver(level=level)
    for name, agent in (("trainer", "a"), ("late", "b"), ("early", "c")):
        world.replica_of(name, agent)
    world.want("early", "latest")
    world.want("late", "latest")
    assert [event.replica for event in of(world.publish("trainer", 1), RoundDecided)] == ["early", "late"]


def test_nothing_is_drained_or_written_before_the_leases_of_all_shards() -> None:
    world = updatable()
    world.want_all("engine")
    assert only(world.granted("engine", 0), RoundJoined).missing == (1,)
    assert (world.states("engine"), world.replica("engine").version) == (["ready", "ready"], 12)
    assert kinds(world.granted("engine", 1)) == ["round.started", "version.unavailable"]
    assert world.states("engine") == ["filling", "filling"]
    assert [version.holders for version in world.catalog.models["policy"].versions.values()] == [0, 1]


def test_the_replica_is_ready_only_when_all_shards_are_filled() -> None:
    world = filling_12()
    assert kinds(world.settle("engine", 0)) == ["round.joined"], "patience that ends by now changes nothing"
    filled = only(world.filled("engine", 12, 0), ShardFilled)
    assert world.replica("engine").version is None
    ready = only(world.filled("engine", 12, 1), ReplicaReady)
    assert (ready.version, ready.round) == (12, filled.round)


@pytest.mark.parametrize("wish", [12, "latest", "newer"])
def test_a_decision_that_can_not_be_leased_is_made_again(wish: VersionRequest) -> None:
    world = reader_of_two()
    world.want_all("engine", wish)
    world.granted("engine", 0)
    assert decided(world.replan("engine", 1)).attempt == 2
    refused(world.granted("engine", 0, attempt=1), BAD)
    refused(world.replan("engine", 0, attempt=1), BAD)
    world.granted("engine", 1)
    assert kinds(world.granted("engine", 0)) == ["round.started"]


def test_a_round_is_planned_again_at_most_so_often() -> None:
    world = decided_12()
    for _ in range(ATTEMPTS_MAX - 1):
        assert kinds(world.replan("engine", 0)) == ["round.decided"]
    failure = failed(world.replan("engine", 0))
    said = f"no leases on version 12 could be had in {ATTEMPTS_MAX} attempts: try again"
    assert (failure.error, failure.message) == (GONE, said)


def test_an_orderly_unpublish_before_the_leases_reopens_the_round() -> None:
    """Or has it decided with what is there by then; of a number that was asked for it fails the round."""
    world = decided_12()
    world.empty("trainer")
    assert only(world.replan("engine", 0), RoundReopened).version == 12
    assert decided(world.publish("trainer", 13)).attempt == 2
    world = decided_12()
    republished(world, 13)
    assert decided(world.replan("engine", 0)).version == 13
    world = reader_of_two()
    world.want_all("engine", 12)
    world.empty("trainer")
    assert failed(world.replan("engine", 0)).error == GONE


def test_a_reopened_round_without_patience_is_settled() -> None:
    """Nothing was written yet, so that the engine still holds what it held."""
    world = updatable()
    world.want_all("engine", "newer", patient=False)
    world.empty("trainer")
    assert kinds(world.replan("engine", 0)) == ["round.reopened", "round.settled"]
    assert world.replica("engine").version == 12


def test_an_update_never_answers_none_once_its_memory_is_overwritten() -> None:
    """None means: go on with what you hold. After `round.started` the engine holds nothing, so it waits on."""
    world = updatable()
    world.start("engine", "newer", patient=False)
    world.empty("trainer")
    assert kinds(world.give_up("engine", 0, GONE)) == ["round.reopened"]
    assert kinds(world.settle("engine", 1)) == ["round.joined"]
    assert decided(world.publish("trainer", 14)).version == 14


def test_the_first_shard_of_a_new_layout_sets_the_root_for_the_next() -> None:
    world = reader_of_two()
    for name, agent in (("one", "e"), ("two", "f")):
        world.join(agent)
        world.register(agent, name, layout="K")
        world.start(name)
    refused(world.filled("one", 12, digest="x" * 100_000), BAD)
    world.filled("one", 12, digest="K-12")
    refused(world.filled("two", 12, digest="other"), "IntegrityError")
    assert kinds(world.filled("two", 12, digest="K-12")) == ["shard.filled", "replica.ready"]


@pytest.mark.parametrize("goes", ["in good order", "lost"])
def test_a_fill_that_ends_after_the_last_holder_left_brings_the_version_back(goes: str) -> None:
    """The reader finds other sources, or gives up: that is its own word."""
    world = filling_12()
    if goes == "lost":
        assert kinds(world.expire("a")) == ["agent.lost", "replica.lost", "version.unavailable"]
    else:
        world.empty("trainer")
    world.filled("engine", 12, 0)
    number, events = world.round("engine"), world.filled("engine", 12, 1)
    assert kinds(events) == ["shard.filled", "version.available", "replica.ready"]
    assert (only(events, ReplicaReady).version, only(events, ReplicaReady).round) == (12, number)


def test_before_the_decision_a_shard_leaves_alone_and_learns_who_was_missing() -> None:
    world = reader_of_two()
    world.want("engine", "latest", 0)
    assert only(world.give_up("engine", 0), RoundWithdrawn).missing == (1,)
    assert world.replica("engine").round is None
    world.want("engine", "latest", 0)
    assert kinds(world.give_up_unnumbered("engine", 0)) == ["round.withdrawn"]
    refused(world.give_up_unnumbered("engine", 0), BAD)
    world = reader_of_two(published=None)
    world.want_all("engine")
    world.give_up("engine", 0)
    assert kinds(world.publish("trainer", 1)) == ["version.published", "replica.ready"]
    assert decided(world.want("engine", "latest", 0)).version == 1, "those who stay wait for the one that left"


@pytest.mark.parametrize("scene", [decided_12, filling_12])
@pytest.mark.parametrize(
    ("said", "error"), [("IntegrityError", "IntegrityError"), ("Nonsense" * 100, "TensorHubError")]
)
def test_after_the_decision_the_round_fails_for_all(scene: Callable[[], CatalogDriver], said: str, error: str) -> None:
    world = scene()
    failure = failed(world.give_up("engine", 1, said))
    assert (failure.error, failure.message) == (error, "shard 1: too late")
    assert world.states("engine") == ["empty", "empty"]


def test_only_so_much_of_a_reason_is_passed_on() -> None:
    world = filling_12()
    by, number = world._shard_by("engine", 0), world.round("engine")
    long = GiveUp(by=by, model="policy", replica="engine", shard=0, round=number, error="X", message="x" * 5000)
    assert failed(world.say(long)).message == "shard 0: " + "x" * 991


def test_what_a_failed_round_has_filled_stays_ready_and_counts_in_the_next() -> None:
    world = filling_12()
    world.filled("engine", 12, 0)
    world.give_up("engine", 1)
    assert world.states("engine") == ["ready", "empty"]
    assert decided(world.want_all("engine")).held == (0,)


def test_a_version_given_up_in_good_order_lets_latest_go_on_with_a_newer_one() -> None:
    world = filling_12()
    world.filled("engine", 12, 0)
    republished(world, 13)
    decision = decided(world.give_up("engine", 1, GONE))
    assert (decision.version, decision.attempt, decision.held) == (13, 2, ())
    assert world.states("engine") == ["ready", "filling"]
    world.grant_all("engine")
    assert world.states("engine") == ["filling", "filling"]
    world.filled("engine", 13, 0)
    assert kinds(world.filled("engine", 13, 1)) == ["shard.filled", "replica.ready"]
    world = reader_of_two()
    world.start("engine", 12)
    republished(world, 13)
    assert failed(world.give_up("engine", 0, GONE)).error == GONE, "a number does not go on with another"


def test_the_second_word_about_one_attempt_does_not_end_the_next() -> None:
    """Both shards lose their source at once; the first word has the log decide again, the second comes too late."""
    world = filling_12()
    republished(world, 13)
    assert decided(world.give_up_attempt("engine", 0, 1)).attempt == 2
    refused(world.give_up_attempt("engine", 1, 1), BAD)
    assert "round.started" in kinds(world.grant_all("engine"))


def test_a_word_about_an_attempt_takes_no_shard_out_of_a_round_that_waits_again() -> None:
    """The version went in good order, so the round waits for the next one, with both of its shards."""
    world = filling_12()
    world.empty("trainer")
    assert "round.reopened" in kinds(world.give_up_attempt("engine", 0, 1))
    refused(world.give_up_attempt("engine", 1, 1), BAD)
    assert decided(world.publish("trainer", 13)).version == 13
