"""A newer version comes while an older one is read: who is told, whose word turns the round, and how often."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, decided, kinds, refused

from tensorhub_common.catalog.state import ATTEMPTS_MAX, SUPERSEDED_MAX
from tensorhub_common.protocol.log.commands import Drop, Sender, VersionRequest, Want
from tensorhub_common.protocol.log.events import Event, RoundOvertaken


def want(world: World, replica: str, wish: VersionRequest = "latest", *, supersede: bool = True) -> None:
    """Let both shards of the replica join a round, as agents that know of superseding do."""
    for shard in (0, 1):
        by = world._shard_by(replica, shard)
        world.say(Want(by=by, model=MODEL, replica=replica, shard=shard, want=wish, supersede=supersede))


def drop(world: World, shard: int = 0, *, attempt: int | None = None, by: Sender | None = None) -> tuple[Event, ...]:
    """Let a shard of the engine say that it would rather read the newer version."""
    sender = by or world._shard_by("engine", shard)
    which = world.attempt("engine") if attempt is None else attempt
    number = world.round("engine")
    return world.say(Drop(by=sender, model=MODEL, replica="engine", shard=shard, round=number, attempt=which))


def reading(wish: VersionRequest = "latest", *, supersede: bool = True) -> World:
    """Return an engine of two shards that reads 1, from a replica other than the trainer."""
    world = World()
    world.replica_of("trainer", "a", "b")
    world.replica_of("engine", "c", "d")
    world.replica_of("keeper", "e", "f")
    world.publish("trainer", 1)
    world.fetch("keeper")
    world.empty("trainer")
    want(world, "engine", wish, supersede=supersede)
    for shard in (0, 1):
        world.granted("engine", shard)
    return world


def overtaken(events: tuple[Event, ...]) -> list[RoundOvertaken]:
    return [event for event in events if isinstance(event, RoundOvertaken)]


def test_who_reads_an_older_version_is_told_of_the_newer_one() -> None:
    world = reading()
    (told,) = overtaken(world.publish("trainer", 2))
    assert (told.model, told.replica, told.version) == (MODEL, "engine", 2)
    assert (told.round, told.attempt) == (world.round("engine"), world.attempt("engine"))


def test_everybody_who_reads_is_told_and_who_waits_for_leases_is_not() -> None:
    world = reading()
    for name, agents in (("waiting", ("g", "h")), ("second", ("i", "j"))):
        world.replica_of(name, *agents)
        want(world, name)
    for shard in (0, 1):
        world.granted("second", shard)
    assert [event.replica for event in overtaken(world.publish("trainer", 2))] == ["engine", "second"]


def test_one_shard_turns_the_round_to_the_newer_version() -> None:
    world = reading()
    world.publish("trainer", 2)
    decision = decided(drop(world, 1))
    assert (decision.replica, decision.version, decision.attempt) == ("engine", 2, 2)
    current = world.replica("engine").round
    assert current is not None
    assert current.superseded == 1


def test_a_word_about_another_attempt_is_refused() -> None:
    world = reading()
    world.publish("trainer", 2)
    refused(drop(world, attempt=world.attempt("engine") + 1), "BadCommand")
    refused(drop(world, attempt=world.attempt("engine") - 1), "BadCommand")
    drop(world)
    assert "is over" in refused(drop(world), "BadCommand").message  # Decided anew, and not started yet.


def test_a_word_about_a_round_that_is_over_is_refused() -> None:
    world = reading()
    old = world.round("engine")
    world.give_up("engine", 0)
    want(world, "engine")
    for shard in (0, 1):
        world.granted("engine", shard)
    world.publish("trainer", 2)
    by = world._shard_by("engine", 0)
    refused(world.say(Drop(by=by, model=MODEL, replica="engine", shard=0, round=old, attempt=1)), "BadCommand")


def test_nothing_newer_is_nothing_to_turn_to() -> None:
    world = reading()
    assert "nothing newer" in refused(drop(world), "BadCommand").message


def test_only_the_shards_own_agent_may_turn_it() -> None:
    world = reading()
    world.publish("trainer", 2)
    refused(drop(world, 0, by=world.by("d", 77)), "BadCommand")


@pytest.mark.parametrize(("wish", "supersede"), [(1, True), ("latest", False)])
def test_who_asked_for_a_number_or_knows_nothing_of_superseding_reads_to_the_end(
    wish: VersionRequest,
    supersede: bool,  # noqa: FBT001 (a column)
) -> None:
    world = reading(wish, supersede=supersede)
    assert not overtaken(world.publish("trainer", 2))
    refused(drop(world), "BadCommand")


def newer_each_time(world: World, times: int) -> None:
    """Publish a newer version and turn the engine to it, so often."""
    for number in range(2, 2 + times):
        world.publish("trainer", number)
        drop(world)
        for shard in (0, 1):
            world.granted("engine", shard)
        world.fetch("keeper", "latest")
        world.empty("trainer")


def test_a_round_is_turned_at_most_so_often_and_then_reads_to_its_end() -> None:
    world = reading()
    newer_each_time(world, SUPERSEDED_MAX)
    current = world.replica("engine").round
    assert current is not None
    assert current.superseded == SUPERSEDED_MAX
    last = current.version
    assert not overtaken(world.publish("trainer", 2 + SUPERSEDED_MAX))
    refused(drop(world), "BadCommand")
    assert last is not None
    assert kinds([*world.filled("engine", last, 0), *world.filled("engine", last, 1)])[-1] == "replica.ready"


def test_nobody_begins_with_a_version_that_is_overtaken_by_then() -> None:
    world = reading()
    world.replica_of("late", "g", "h")
    want(world, "late")
    world.granted("late", 0)
    world.publish("trainer", 2)
    assert decided(world.granted("late", 1)).version == 2
    current = world.replica("late").round
    assert current is not None
    assert (current.superseded, current.granted) == (1, set())
    for number in range(2, SUPERSEDED_MAX + 1):
        world.fetch("keeper")
        world.empty("trainer")
        world.granted("late", 0)
        world.publish("trainer", number + 1)
        assert decided(world.granted("late", 1)).version == number + 1
        assert current.superseded == number
    world.fetch("keeper")
    world.empty("trainer")
    world.granted("late", 0)
    world.publish("trainer", SUPERSEDED_MAX + 2)
    assert kinds(world.granted("late", 1)) == ["round.started"]


def test_a_round_at_its_last_attempt_is_not_turned() -> None:
    world = reading()
    current = world.replica("engine").round
    assert current is not None
    current.attempt = ATTEMPTS_MAX
    assert not overtaken(world.publish("trainer", 2))
    current.attempt = ATTEMPTS_MAX - 1
    assert decided(drop(world)).attempt == ATTEMPTS_MAX


def test_one_shard_that_knows_nothing_of_superseding_keeps_all_from_it() -> None:
    """Whichever comes first: it would not understand that the round turns."""
    for knows in ((True, False), (False, True)):
        world = World()
        for name, agents in (("trainer", "ab"), ("engine", "cd"), ("keeper", "ef")):
            world.replica_of(name, *agents)
        world.publish("trainer", 1)
        world.fetch("keeper")
        world.empty("trainer")
        for shard, supersede in enumerate(knows):
            by = world._shard_by("engine", shard)
            world.say(Want(by=by, model=MODEL, replica="engine", shard=shard, want="latest", supersede=supersede))
        for shard in (0, 1):
            world.granted("engine", shard)
        assert not overtaken(world.publish("trainer", 2))
        refused(drop(world), "BadCommand")
