"""A round whose sources are gone, and what an overwritten engine may answer: on with another version, or an error."""

from typing import Any

import pytest
from tests.unit.common.catalog.catalog_world import World, decided, failed, kinds, reader_of_two, refused

from tensorhub_common.catalog.state import ATTEMPTS_MAX
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.log.commands import GiveUp, Replan, VersionRequest
from tensorhub_common.protocol.log.events import Event, RoundStarted, VersionGone
from tensorhub_common.protocol.log.levels import Level

GONE = VersionUnavailable.__name__


def reading(wish: VersionRequest = "latest", *, attempt: int = 1) -> World:
    """Return an engine that reads 12, at this attempt, and another replica that holds nothing."""
    world = reader_of_two()
    world.replica_of("other", "e")
    world.start("engine", wish)
    current = world.replica("engine").round
    assert current is not None
    current.attempt = attempt
    return world


def gives_up(world: World) -> tuple[Event, ...]:
    """Let a shard of the engine say that the sources of this attempt are gone."""
    return world.give_up_attempt("engine", 0, world.attempt("engine"))


def test_latest_goes_on_with_another_version_when_its_own_went_in_good_order() -> None:
    world = reading()
    world.empty("trainer")
    assert kinds(gives_up(world)) == ["round.reopened"]
    assert decided(world.publish("trainer", 13)).version == 13


def overwritten(level: Level, left: int = 11) -> World:
    """Return an engine that held 12 and reads 13, which is unpublished meanwhile: what is `left` another one holds."""
    world = World(level=level)
    for name, agent in (("trainer", "a"), ("engine", "b"), ("elder", "c")):
        world.replica_of(name, agent)
    for version in (11, 12):
        world.publish("trainer", version)
        if version == left:
            world.fetch("elder")
        world.fetch("engine")
        world.empty("trainer")
    world.publish("trainer", 13)
    world.start("engine", "newer")
    world.empty("trainer")
    return world


def test_newer_takes_nothing_older_than_what_was_held_also_once_that_is_overwritten() -> None:
    world = overwritten(Level.NEVER_OLDER)
    assert kinds(gives_up(world)) == ["round.reopened"]
    assert decided(world.publish("trainer", 14)).version == 14


def test_what_was_held_may_be_read_again_once_it_is_overwritten() -> None:
    assert decided(gives_up(overwritten(Level.NEVER_OLDER, left=12))).version == 12


def test_below_its_level_newer_went_on_with_an_older_one() -> None:
    assert decided(gives_up(overwritten(Level.FORGETTING))).version == 11


def test_the_next_call_of_an_engine_that_was_told_that_it_holds_nothing_takes_what_there_is() -> None:
    world = overwritten(Level.NEVER_OLDER)
    gives_up(world)
    assert kinds(world.give_up("engine")) == ["round.withdrawn"]
    assert decided(world.want("engine", "newer")).version == 11


def test_a_number_does_not_go_on_with_another() -> None:
    world = reading(12)
    world.empty("trainer")
    assert failed(gives_up(world)).message == "shard 0: no source is left"


@pytest.mark.parametrize(("attempt", "ends"), [(ATTEMPTS_MAX - 1, "round.reopened"), (ATTEMPTS_MAX, "round.failed")])
def test_it_goes_on_only_so_often(attempt: int, ends: str) -> None:
    world = reading(attempt=attempt)
    world.empty("trainer")
    assert kinds(gives_up(world)) == [ends]


def test_a_crash_of_the_only_holder_fails_the_round() -> None:
    world = reading()
    world.expire("a")
    assert failed(gives_up(world)).error == GONE


def test_after_a_crash_it_goes_on_where_a_newer_version_stands() -> None:
    world = reading()
    world.publish("other", 13)
    world.expire("a")
    assert decided(gives_up(world)).version == 13


def test_it_fails_while_the_version_still_stands_as_its_newest() -> None:
    """Its sources could not be read, though the log counts them: to ask for the same again would not end."""
    assert failed(gives_up(reading())).error == GONE


def test_replan_names_its_round_and_says_why_it_is_over() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    by, number = world._shard_by("engine", 0), world.round("engine")
    refused(
        world.say(Replan(by=by, model="policy", replica="engine", shard=0, round=number + 1, attempt=1)), "BadCommand"
    )
    current = world.replica("engine").round
    assert current is not None
    current.attempt = ATTEMPTS_MAX
    failure = failed(world.replan("engine", 0))
    assert failure.message == f"no leases on version 12 could be had in {ATTEMPTS_MAX} attempts: try again"


# What the start of a round says.


def started(events: list[Event]) -> RoundStarted:
    (found,) = [event for event in events if isinstance(event, RoundStarted)]
    return found


@pytest.mark.parametrize(("staged", "stands"), [((), None), ((0,), None), ((0, 1), True)])
def test_an_engine_stands_through_a_round_in_which_every_shard_is_staged(
    staged: tuple[int, ...],
    stands: bool | None,  # noqa: FBT001
) -> None:
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    for shard in (0, 1):
        world.want("engine", "newer", shard, staged=shard in staged)
    assert started([*world.granted("engine", 0), *world.granted("engine", 1)]).stands is stands


def test_the_last_holder_that_is_refilled_has_replaced_its_version() -> None:
    """In good order: whoever reads it with "latest" goes on with another one."""
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    gone = [event for event in world.start("engine") if isinstance(event, VersionGone)]
    assert [(event.version, event.reason) for event in gone] == [(12, "replaced")]


def test_only_so_much_of_a_reason_is_passed_on() -> None:
    world = reading()
    by, number = world._shard_by("engine", 0), world.round("engine")
    about: dict[str, Any] = {"model": "policy", "replica": "engine", "shard": 0, "round": number}
    failure = failed(world.say(GiveUp(by=by, **about, error="RoundTimeout", message="x" * 5000)))
    assert failure.message == "shard 0: " + "x" * 991
