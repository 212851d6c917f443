"""Rounds in the fold, from the decision on: leases, then the writing, and every way to end."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, decided, failed, kinds, reader_of_two, refused, root

from tensorhub_common.catalog.state import ATTEMPTS_MAX
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.log.commands import Granted, VersionRequest
from tensorhub_common.protocol.log.events import (
    ReplicaReady,
    RoundJoined,
    RoundReopened,
    RoundStarted,
    RoundWithdrawn,
    ShardFilled,
)

# --------------------------------------------------------------------------------------------- leases, then the writing


def test_nothing_is_drained_or_written_before_the_leases_of_all_shards() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    (joined,) = world.granted("engine", 0)
    assert isinstance(joined, RoundJoined)
    assert joined.missing == (1,)
    assert world.states("engine") == ["ready", "ready"]
    assert world.replica("engine").version == 12
    events = world.granted("engine", 1)
    assert kinds(events) == ["round.started", "version.unavailable"]
    assert isinstance(events[0], RoundStarted)
    assert world.states("engine") == ["filling", "filling"]


def test_refilling_what_is_ready_is_an_unpublish_of_it() -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    world.start("engine")
    assert [version.holders for version in world.catalog.models["policy"].versions.values()] == [0, 1]


def test_the_replica_is_ready_only_when_all_shards_are_filled() -> None:
    world = reader_of_two()
    world.start("engine")
    (filled,) = world.filled("engine", 12, 0)
    assert isinstance(filled, ShardFilled)
    assert world.replica("engine").version is None
    events = world.filled("engine", 12, 1)
    assert isinstance(events[-1], ReplicaReady)
    assert (events[-1].version, events[-1].round) == (12, filled.round)


@pytest.mark.parametrize("wish", [12, "latest", "newer"])
def test_a_decision_that_can_not_be_leased_is_made_again(wish: VersionRequest) -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", wish, shard)
    world.granted("engine", 0)
    assert decided(world.replan("engine", 1)).attempt == 2
    refused(world.granted("engine", 0, attempt=1), "BadCommand")
    refused(world.replan("engine", 0, attempt=1), "BadCommand")
    world.granted("engine", 1)
    assert kinds(world.granted("engine", 0)) == ["round.started"]


def test_a_decision_made_again_takes_the_newest_that_is_there_by_then() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    world.empty("trainer")
    world.publish("trainer", 13)
    assert decided(world.replan("engine", 0)).version == 13


def test_a_word_of_replan_that_crosses_the_start_is_refused() -> None:
    world = reader_of_two()
    world.start("engine")
    refused(world.replan("engine", 1), "BadCommand")
    assert world.states("engine") == ["filling", "filling"]


def test_a_round_is_planned_again_at_most_so_often() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    for _ in range(ATTEMPTS_MAX - 1):
        assert kinds(world.replan("engine", 0)) == ["round.decided"]
    assert failed(world.replan("engine", 0)).error == VersionUnavailable.__name__


def test_an_orderly_unpublish_before_the_leases_reopens_the_round() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    world.empty("trainer")
    (reopened,) = world.replan("engine", 0)
    assert isinstance(reopened, RoundReopened)
    assert reopened.version == 12
    assert decided(world.publish("trainer", 13)).attempt == 2


def test_an_orderly_unpublish_of_the_number_asked_for_fails_the_round() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", 12, shard)
    world.empty("trainer")
    assert failed(world.replan("engine", 0)).error == VersionUnavailable.__name__


def test_a_reopened_round_without_patience_is_settled() -> None:
    """Nothing was written yet, so that the engine still holds what it held."""
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    for shard in (0, 1):
        world.want("engine", "newer", shard, patient=False)
    world.empty("trainer")
    assert kinds(world.replan("engine", 0)) == ["round.reopened", "round.settled"]
    assert world.replica("engine").version == 12


def test_an_update_never_answers_none_once_its_memory_is_overwritten() -> None:
    """None means: go on with what you hold. After `round.started` the engine holds nothing, so it waits on."""
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    world.start("engine", "newer", patient=False)
    world.empty("trainer")
    assert kinds(world.give_up("engine", 0, "VersionUnavailable")) == ["round.reopened"]
    assert kinds(world.settle("engine", 1)) == ["round.joined"]
    assert world.replica("engine").round is not None
    assert decided(world.publish("trainer", 14)).version == 14


@pytest.mark.parametrize(
    "command", ["granted", "replan", "filled", "settle", "give_up"], ids=lambda name: f"a late {name}"
)
def test_a_word_about_a_round_that_is_over_is_refused(command: str) -> None:
    world = reader_of_two()
    world.start("engine")
    number = world.round("engine")
    world.give_up("engine", 0)
    world.want("engine", "latest", 0)
    if command == "filled":
        refused(world.filled("engine", 12, 0, number=number), "BadCommand")
    elif command == "settle":
        refused(world.settle("engine", 0, number=number), "BadCommand")
    elif command == "give_up":
        refused(world.give_up("engine", 0, number=number), "BadCommand")
    elif command == "granted":
        refused(world.granted("engine", 0, attempt=1), "BadCommand")
    else:
        refused(world.replan("engine", 0, attempt=1), "BadCommand")


def test_a_shard_that_has_not_joined_has_no_word_in_the_round() -> None:
    world = reader_of_two()
    world.want("engine", "latest", 0)
    for events in (world.settle("engine", 1), world.give_up("engine", 1), world.granted("engine", 1, attempt=0)):
        refused(events, "BadCommand")


# --------------------------------------------------------------------------------------------------------------- filled


def test_a_shard_filled_with_another_root_than_the_logs_is_refused() -> None:
    world = reader_of_two()
    world.start("engine")
    assert root(12, 0) in refused(world.filled("engine", 12, 0, digest="other"), "IntegrityError").message
    assert world.states("engine") == ["filling", "filling"]


def test_the_first_shard_of_a_new_layout_sets_the_root_for_the_next() -> None:
    world = reader_of_two()
    for name, agent in (("one", "e"), ("two", "f")):
        world.join(agent)
        world.register(agent, name, layout="K")
        world.want(name, "latest")
        assert world.catalog.models["policy"].replicas[name].round is not None
        world.granted(name)
    world.filled("one", 12, digest="K-12")
    refused(world.filled("two", 12, digest="other"), "IntegrityError")
    assert kinds(world.filled("two", 12, digest="K-12")) == ["shard.filled", "replica.ready"]


@pytest.mark.parametrize("version", [11, 13])
def test_a_shard_filled_with_another_version_is_refused(version: int) -> None:
    world = reader_of_two()
    world.start("engine")
    refused(world.filled("engine", version, 0), "BadCommand")


def test_a_shard_is_filled_once() -> None:
    world = reader_of_two()
    world.start("engine")
    world.filled("engine", 12, 0)
    refused(world.filled("engine", 12, 0), "BadCommand")


def test_a_shard_is_not_filled_before_the_round_has_started() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    refused(world.filled("engine", 12, 0), "BadCommand")


def test_a_root_of_a_new_layout_must_be_a_digest() -> None:
    world = reader_of_two()
    world.join("e")
    world.register("e", "one", layout="K")
    world.start("one")
    refused(world.filled("one", 12, digest="x" * 100_000), "BadCommand")


def test_a_fill_that_ends_after_the_last_holder_left_brings_the_version_back() -> None:
    world = reader_of_two()
    world.start("engine")
    world.empty("trainer")
    world.filled("engine", 12, 0)
    assert kinds(world.filled("engine", 12, 1)) == ["shard.filled", "version.available", "replica.ready"]


# ------------------------------------------------------------------------------------------------------------ giving up


def test_before_the_decision_a_shard_leaves_alone_and_learns_who_was_missing() -> None:
    world = reader_of_two()
    world.want("engine", "latest", 0)
    (withdrawn,) = world.give_up("engine", 0)
    assert isinstance(withdrawn, RoundWithdrawn)
    assert withdrawn.missing == (1,)
    assert world.replica("engine").round is None


def test_those_who_stay_wait_for_the_one_that_left() -> None:
    world = reader_of_two(published=None)
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    world.give_up("engine", 0)
    assert kinds(world.publish("trainer", 1)) == ["version.published", "replica.ready"]
    assert decided(world.want("engine", "latest", 0)).version == 1


@pytest.mark.parametrize("started", [False, True])
def test_after_the_decision_the_round_fails_for_all(*, started: bool) -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    if started:
        for shard in (0, 1):
            world.granted("engine", shard)
    failure = failed(world.give_up("engine", 1, "IntegrityError"))
    assert (failure.error, failure.message) == ("IntegrityError", "shard 1: too late")
    assert world.states("engine") == ["empty", "empty"]


def test_an_error_that_nobody_knows_becomes_the_root_class() -> None:
    world = reader_of_two()
    world.start("engine")
    assert failed(world.give_up("engine", 0, "Nonsense" * 100)).error == "TensorHubError"


def test_what_a_failed_round_has_filled_stays_ready_and_counts_in_the_next() -> None:
    world = reader_of_two()
    world.start("engine")
    world.filled("engine", 12, 0)
    world.give_up("engine", 1)
    assert world.states("engine") == ["ready", "empty"]
    world.want("engine", "latest", 0)
    assert decided(world.want("engine", "latest", 1)).held == (0,)


def test_a_version_given_up_in_good_order_lets_latest_go_on_with_a_newer_one() -> None:
    world = reader_of_two()
    world.start("engine")
    world.filled("engine", 12, 0)
    world.empty("trainer")
    world.publish("trainer", 13)
    decision = decided(world.give_up("engine", 1, "VersionUnavailable"))
    assert (decision.version, decision.attempt, decision.held) == (13, 2, ())
    assert world.states("engine") == ["ready", "filling"]
    world.granted("engine", 0)
    world.granted("engine", 1)
    assert world.states("engine") == ["filling", "filling"]
    world.filled("engine", 13, 0)
    assert kinds(world.filled("engine", 13, 1)) == ["shard.filled", "replica.ready"]


def test_a_version_that_was_lost_fails_the_round() -> None:
    """Its last copy is gone: that is said, not papered over with another version."""
    world = reader_of_two()
    world.start("engine")
    world.expire("a")
    assert failed(world.give_up("engine", 0, "VersionUnavailable")).error == "VersionUnavailable"


def test_a_number_given_up_in_good_order_fails_the_round() -> None:
    world = reader_of_two()
    world.start("engine", 12)
    world.empty("trainer")
    world.publish("trainer", 13)
    assert failed(world.give_up("engine", 0, "VersionUnavailable")).error == "VersionUnavailable"


def test_a_shard_that_never_learnt_its_rounds_number_may_give_it_up() -> None:
    world = reader_of_two()
    world.want("engine", "latest", 0)
    events = world.give_up_unnumbered("engine", 0)
    assert kinds(events) == ["round.withdrawn"]
    refused(world.give_up_unnumbered("engine", 0), "BadCommand")


def test_the_second_word_about_one_attempt_does_not_end_the_next() -> None:
    """Both shards lose their source at once; the first word has the log decide again, the second comes too late."""
    world = reader_of_two()
    world.start("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    assert decided(world.give_up_attempt("engine", 0, 1)).attempt == 2
    refused(world.give_up_attempt("engine", 1, 1), "BadCommand")
    world.granted("engine", 0)
    assert "round.started" in kinds(world.granted("engine", 1))


def test_a_word_about_an_attempt_takes_no_shard_out_of_a_round_that_waits_again() -> None:
    """The version went in good order, so the round waits for the next one, with both of its shards."""
    world = reader_of_two()
    world.start("engine")
    world.empty("trainer")
    assert "round.reopened" in kinds(world.give_up_attempt("engine", 0, 1))
    refused(world.give_up_attempt("engine", 1, 1), "BadCommand")
    assert decided(world.publish("trainer", 13)).version == 13


def test_what_was_filled_in_a_round_that_is_over_does_not_count_in_the_next() -> None:
    """The word is late: since then the memory has been given up, and may hold half of the new read."""
    world = reader_of_two()
    world.start("engine", 12)
    old = world.round("engine")
    world.give_up("engine")
    world.start("engine", 12)
    assert "is over" in refused(world.filled("engine", 12, 0, number=old), "BadCommand").message
    assert world.states("engine") == ["filling", "filling"]


def test_a_root_that_is_no_digest_is_refused_and_called_by_its_name() -> None:
    world = reader_of_two()
    world.start("engine", 12)
    assert refused(world.filled("engine", 12, 0, digest="no digest"), "BadCommand").message.startswith("root 'no dig")


def test_leases_of_a_round_that_is_over_start_no_other() -> None:
    """The word is late: the next round's attempt has the same number, and no leases yet."""
    world = reader_of_two()
    world.want("engine", 12, 0)
    world.want("engine", 12, 1)
    old = world.round("engine")
    world.give_up("engine")
    world.want("engine", 12, 0)
    world.want("engine", 12, 1)
    world.granted("engine", 1)
    by = world._shard_by("engine", 0)
    late = Granted(by=by, model=MODEL, replica="engine", shard=0, round=old, attempt=1)
    assert "is over" in refused(world.say(late), "BadCommand").message
    assert world.states("engine") == ["empty", "empty"]


def test_a_refused_wish_names_its_shard() -> None:
    world = reader_of_two()
    world.ready("engine", 13, 1)
    said = refused(world.want("engine", "latest", 1), "ReplicaConflict").message
    assert said == "shard 1 of policy/engine is being published: wait until that call has ended"
