"""Retention: who must stay because theirs is the last copy, which other copy lets them go, and what they are told."""

from collections.abc import Callable

import pytest
from tests.unit.common.catalog.scenes import (
    FULL,
    NONE,
    caching,
    drain,
    emptied,
    of,
    one,
    only,
    placed,
    republished,
    retain,
    retaining,
    standing,
)

from tensorhub_common.catalog.retention import retained
from tensorhub_common.catalog.state import SHUN_S
from tensorhub_common.protocol.log.commands import Pin, Stay, Unpin, Unpublish
from tensorhub_common.protocol.log.events import CopyPlaced, Event, ShardStays, VersionExposed, VersionKept
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, failed, kinds, refused

LAST_OF_1 = "version 1 of model 'policy' is retained, replica 'engine' holds its last copy"


def two_versions(*, last: int = 2) -> CatalogDriver:
    """Return 1 on `engine` and 2 on `trainer`, both retained, with no room for copies."""
    world = standing(trainer="a", engine="b")
    world.publish("trainer", 1)
    world.fetch("engine")
    republished(world, 2)
    retain(world, last)
    return world


def second_holder(*, spot: bool = False) -> CatalogDriver:
    """Return another replica that holds 1, too."""
    world = two_versions()
    world.replica_of("second", "c", spot=spot)
    world.fetch("second", 1)
    return world


def refilled(last: int = 2) -> CatalogDriver:
    """Return an engine that is the last holder of 1, whose copy is placed and not filled; 2 is published."""
    world = retaining(last)
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    republished(world, 2)
    return world


def test_the_last_copy_is_held_back_until_another_one_stands() -> None:
    world = retaining()
    copy = placed(world).replica
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"]
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"], "it may be said again"
    assert world.states("trainer") == ["ready", "ready"]
    refused(world.drained("trainer", 0), NONE)
    refused(world.want("trainer", "latest", 0), "ReplicaConflict")
    assert kinds(world.fetch(copy, 1)) == ["shard.filled", "replica.ready", "shard.draining"]
    assert world.states("trainer") == ["draining", "ready"]
    assert kinds(world.unpublish("trainer", 1)) == ["shard.draining"]


def test_a_held_unpublish_that_is_given_up_stays() -> None:
    world = retaining()
    world.unpublish("trainer", 0)
    stay = Stay(by=world._shard_by("trainer", 0), model=MODEL, replica="trainer", shard=0)
    assert kinds(world.say(stay)) == ["shard.stays"]
    world.fetch(placed(world).replica, 1)
    assert world.states("trainer") == ["ready", "ready"]


def test_without_room_anywhere_unpublish_is_refused_at_once_and_says_what_to_do() -> None:
    world = retaining(room=0)
    assert "TENSORHUB_CACHE_BYTES" in refused(world.unpublish("trainer"), FULL).message
    retain(world, 0)
    assert kinds(world.unpublish("trainer")) == ["shard.draining", "version.unavailable"]


def as_it_is(world: CatalogDriver) -> None:
    """Leave the second holder alone."""


def joins_for_2(world: CatalogDriver) -> None:
    world.want("second", 2)


def joins_for_3(world: CatalogDriver) -> None:
    world.want("second", 3)


def is_filled_with_2_beside(world: CatalogDriver) -> None:
    """Staged: it holds the old version up to the end, and then no more."""
    world.want("second", 2, staged=True)
    world.granted("second")
    assert world.replica("second").version == 1


def gave_up_2(world: CatalogDriver) -> None:
    is_filled_with_2_beside(world)
    assert failed(world.give_up("second")).replica == "second"


def agent_drained(world: CatalogDriver) -> None:
    drain(world, "c")


def agent_drained_no_more(world: CatalogDriver) -> None:
    drain(world, "c")
    drain(world, "c", on=False)


def unpublishes(world: CatalogDriver) -> None:
    """The two may not both go."""
    assert kinds(world.unpublish("second")) == ["shard.draining"]


def another_agent_drained(world: CatalogDriver) -> None:
    drain(world, "a")


@pytest.mark.parametrize(
    ("second", "counts"),
    [
        (as_it_is, True),
        (joins_for_2, True),
        (joins_for_3, True),
        (is_filled_with_2_beside, False),
        (gave_up_2, True),
        (agent_drained, False),
        (agent_drained_no_more, True),
        (another_agent_drained, True),
        (unpublishes, False),
    ],
)
def test_which_other_copy_lets_the_last_one_go(second: Callable[[CatalogDriver], None], *, counts: bool) -> None:
    assert LAST_OF_1 in refused(two_versions().unpublish("engine"), FULL).message
    world = second_holder()
    second(world)
    events = world.unpublish("engine")
    assert kinds(events) == (["shard.draining"] if counts else ["command.rejected"])


def test_two_replicas_that_hold_it_may_not_both_go_and_one_that_drains_does_not_count() -> None:
    """Nor one with a shard that is about to go, nor a spot replica."""
    world = retaining(room=0)
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    assert kinds(world.unpublish("trainer", 0)) == ["shard.draining"]
    refused(world.unpublish("engine"), FULL)
    world = retaining()
    world.replica_of("spot", "g", "h", spot=True)
    world.fetch("spot", 1)
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"]
    assert kinds(world.unpublish("spot", 0)) == ["shard.draining"]
    world.replica_of("engine", "e", "f")
    assert kinds(world.fetch("engine", 1))[-1] == "shard.draining"


def test_one_whose_unpublish_is_held_back_does_not_count_for_another() -> None:
    """Each would let the other go."""
    world = second_holder()
    drain(world, "c")
    world.replica_of("third", "d")
    world.start("third", 1)
    assert kinds(world.unpublish("engine")) == ["unpublish.held"]
    assert kinds(world.unpublish("second")) == ["unpublish.held"]
    assert kinds(world.filled("third", 1)).count("shard.draining") == 2


@pytest.mark.parametrize(
    ("agents", "spot", "version", "granted", "waits"),
    [
        ("c", False, 1, True, True),
        ("c", True, 1, True, False),
        ("cd", False, 1, False, False),
        ("c", False, 2, True, False),
    ],
)
def test_a_copy_that_is_being_filled_is_waited_for(
    agents: str, *, spot: bool, version: int, granted: bool, waits: bool
) -> None:
    """Not one on spot, none that is not decided, and none of another version."""
    world = two_versions()
    world.replica_of("second", *agents, spot=spot)
    world.want("second", version)
    if granted:
        world.granted("second")
    events = world.unpublish("engine")
    assert kinds(events) == (["unpublish.held"] if waits else ["command.rejected"])
    if waits:
        assert kinds(world.filled("second", 1)) == ["shard.filled", "replica.ready", "shard.draining"]


def test_who_waits_is_told_why_no_copy_comes_any_more() -> None:
    world = two_versions()
    world.replica_of("second", "c")
    world.start("second", 1)
    world.unpublish("engine")
    stays = only(world.give_up("second"), ShardStays)
    assert (stays.replica, stays.shard, stays.version, stays.error) == ("engine", 0, 1, FULL)
    assert LAST_OF_1 in stays.message
    assert not world.shard("engine").leaving


def wait_until_just_before(world: CatalogDriver, time: float) -> None:
    """Say things that change nothing until the next word comes at that time."""
    while world.catalog.time + 2 < time:
        world.say(Pin(model=MODEL, version=99))


def one_agent_that_failed(time_s: float) -> tuple[CatalogDriver, tuple[Event, ...]]:
    """Return what an unpublish of the last copy leads to so long after the only agent with room has failed."""
    world = one()
    caching(world, "c", 1024)
    retain(world, 1)
    world.publish("trainer", 1)
    world.release(placed(world).replica)
    wait_until_just_before(world, world.catalog.time + time_s)
    return world, world.unpublish("trainer")


def test_an_agent_that_failed_to_hold_a_copy_gets_one_again_only_after_a_while() -> None:
    assert kinds(one_agent_that_failed(SHUN_S - 2)[1]) == ["command.rejected"]
    world, events = one_agent_that_failed(SHUN_S)
    assert kinds(events) == ["unpublish.held", "copy.placed"]
    assert [member.agent for member in placed(world).members] == ["c"]
    assert kinds(world.fetch(placed(world).replica, 1))[-1] == "shard.draining"


def test_a_refill_of_the_last_copy_places_another_where_there_is_room_again() -> None:
    world = two_versions()
    caching(world, "c", 128)
    assert placed(world).version == 1
    world.release(placed(world).replica)
    world.want("engine", 2)
    wait_until_just_before(world, world.catalog.time + SHUN_S)
    assert kinds(world.granted("engine"))[:2] == ["round.held", "copy.placed"]
    assert kinds(world.fetch(placed(world).replica, 1))[-1] == "round.started"


def test_a_refill_of_the_last_copy_waits_for_another_one_and_fails_if_none_comes() -> None:
    world = refilled()
    first = of(world.events, CopyPlaced)[0]
    assert kinds(world.start("engine", 2)) == ["round.held"]
    failure = failed(world.give_up("engine"))
    said = "no other copy of the retained version 1 stood within the bound: allow more time"
    assert (failure.error, failure.message) == (FULL, said)
    assert world.states("engine") == ["ready", "ready"]
    world.start("engine", 2)
    assert kinds(world.fetch(first.replica, 1)) == ["shard.filled", "replica.ready", "round.started"]
    assert world.states("engine") == ["filling", "filling"]


def test_a_refill_that_waits_for_a_copy_fails_when_that_can_not_come_any_more() -> None:
    world = refilled()
    assert kinds(world.start("engine", 2)) == ["round.held"]
    world.replica_of("other", "g")
    world.want("other", 7)
    world.expire("c")
    failure = failed(world.expire("d"))
    assert (failure.replica, failure.error) == ("engine", FULL)
    assert LAST_OF_1 in failure.message
    assert world.states("engine") == ["ready", "ready"]
    failure = failed(world.start("engine", 2))
    assert failure.error == FULL
    assert LAST_OF_1 in failure.message, "nor is there room when another one begins"


def swapping() -> CatalogDriver:
    """An engine that holds 1 has begun to read 2 beside it; the cache that held 1 as well is lost since."""
    world = standing(trainer="a", engine="e")
    caching(world, "c", 64)
    retain(world, 2)
    world.publish("trainer", 1)
    world.fetch(placed(world).replica, 1)
    world.fetch("engine", 1)
    republished(world, 2)
    world.want("engine", 2, staged=True)
    assert kinds(world.granted("engine")) == ["round.started"]
    caching(world, "d", 128)
    world.expire("c")
    return world


def test_a_swap_away_from_the_last_copy_waits_for_another_one() -> None:
    """Another one counted when the round began, and a crash has taken it: a swap is an order as others are."""
    world = swapping()
    copy = [event.replica for event in of(world.events, CopyPlaced) if event.version == 1][-1]
    assert kinds(world.filled("engine", 2)) == ["shard.filled", "round.held"]
    assert world.replica("engine").version == 1
    assert kinds(world.fetch(copy, 1)) == ["shard.filled", "replica.ready", "replica.ready"]
    assert world.replica("engine").version == 2
    world = swapping()
    world.filled("engine", 2)
    assert (failed(world.give_up("engine")).error, world.replica("engine").version) == (FULL, 1), "at its bound"
    world = swapping()
    events = kinds(world.filled("engine", 2, waits=False))
    assert events[:3] == ["shard.filled", "version.unavailable", "replica.ready"], "as an older release says it"


def test_a_pin_alone_retains_its_version_and_no_other() -> None:
    world = two_versions(last=0)
    world.say(Pin(model=MODEL, version=1))
    assert retained(world.catalog.models[MODEL]) == {1}
    refused(world.unpublish("engine"), FULL)
    assert kinds(world.unpublish("trainer"))[0] == "shard.draining"


def test_a_pinned_version_outlives_the_newer_ones_until_it_is_unpinned() -> None:
    world = retaining()
    world.say(Pin(model=MODEL, version=1))
    emptied(world)
    world.publish("trainer", 2)
    assert world.catalog.models[MODEL].versions[1].holders == 1
    assert kinds(world.say(Unpin(model=MODEL, version=1)))[:2] == ["version.unpinned", "shard.released"]
    refused(world.say(Pin(model=MODEL, version=1)), "VersionUnavailable")


def test_a_version_that_comes_to_be_retained_is_told_kept() -> None:
    world = two_versions(last=1)
    assert [(event.version, event.replica) for event in of(retain(world, 2), VersionKept)] == [(1, "engine")]
    assert "version.kept" not in kinds(retain(world, 2))


def test_a_version_whose_last_safe_copy_went_is_told_exposed_with_the_reason_and_its_return_too() -> None:
    world = second_holder(spot=True)
    held = world.holding("engine")
    exposed = only(world.expire("b"), VersionExposed)
    assert (exposed.version, exposed.reason) == (1, "lost")
    void = Unpublish(by=world._shard_by("trainer", 0), model=MODEL, replica="trainer", shard=0, void=True)
    exposed = only(world.say(void), VersionExposed)
    assert (exposed.version, exposed.reason) == (2, "unpublished")
    assert kinds(world.join("b", held))[-1] == "version.kept"


def test_who_waits_for_a_copy_that_can_not_come_any_more_is_told() -> None:
    world = retaining()
    world.unpublish("trainer", 0)
    world.expire("c")
    world.expire("d")
    stays = only(world.events, ShardStays)
    assert (stays.shard, stays.error) == (0, FULL)


def test_a_publication_that_was_given_up_without_a_word_is_not_held_back_and_its_loss_is_told() -> None:
    """Its caller has the memory already, so the log must not go on counting on it."""
    world = retaining()
    by = world._shard_by("trainer", 0)
    events = world.say(Unpublish(by=by, model=MODEL, replica="trainer", shard=0, void=True))
    assert kinds(events) == ["shard.draining", "version.unavailable", "version.exposed"]
