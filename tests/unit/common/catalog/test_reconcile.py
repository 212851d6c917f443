"""What the catalog does by itself after a command about one model for another one: room and quota are shared."""

import pytest
from tests.unit.common.catalog.catalog_world import World, kinds
from tests.unit.common.catalog.test_retention import joined

from tensorhub_common.protocol.log.commands import Delete, Quota, Ready, Release, Retain
from tensorhub_common.protocol.log.events import CopyPlaced, Event, model_of

FIRST, SECOND = "first", "second"


def publish(world: World, model: str, version: int) -> list[Event]:
    """Publish a version of a model, whose trainer has one shard."""
    by = world._shard_by("trainer", 0, model)
    root = f"{model}-{version}"
    return list(world.say(Ready(by=by, model=model, replica="trainer", shard=0, version=version, root=root)))


def placements(events: list[Event]) -> list[tuple[str, int]]:
    """Name what copies were placed of."""
    return [(event.model, event.version) for event in events if isinstance(event, CopyPlaced)]


def two_models(room: int) -> World:
    """Return two models with a trainer each, of which one version is retained, and one agent with this room."""
    world = World()
    joined(world, "cache", room)
    for model, agent in ((FIRST, "a"), (SECOND, "b")):
        world.join(agent)
        world.register(agent, "trainer", model=model)
        world.say(Retain(model=model, last=1))
    return world


@pytest.mark.parametrize(("goes", "stays"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_copy_takes_the_room_that_another_models_copy_leaves_in_the_same_command(goes: str, stays: str) -> None:
    """Nobody may say anything more for a long time, and until then the version would stand on one replica alone."""
    world = two_models(64)
    assert placements(publish(world, goes, 1)) == [(goes, 1)]
    assert placements(publish(world, stays, 1)) == []
    events = list(world.say(Retain(model=goes, last=0)))
    assert kinds(events)[1] == "shard.released"
    assert placements(events) == [(stays, 1)]


def test_a_copy_takes_the_room_that_a_deleted_model_leaves() -> None:
    world = two_models(64)
    publish(world, FIRST, 1)
    publish(world, SECOND, 1)
    world.expire("a")
    events = list(world.say(Delete(model=FIRST)))
    assert kinds(events)[0] == "model.deleted"
    assert placements(events) == [(SECOND, 1)]


def test_what_is_said_of_one_model_leaves_another_alone() -> None:
    world = two_models(1024)
    publish(world, FIRST, 1)
    events = publish(world, SECOND, 1)
    assert {model_of(event) for event in events} == {SECOND}


def test_a_copy_is_placed_where_a_shard_of_another_model_leaves_room_in_the_quota() -> None:
    world = World()
    joined(world, "cache", 1024)
    for model, agent in ((FIRST, "a"), (SECOND, "b")):
        world.join(agent)
        world.register(agent, "trainer", model=model)
    world.say(Retain(model=FIRST, last=1))
    world.say(Quota(nbytes=128))
    assert placements(publish(world, FIRST, 1)) == []
    by = world._shard_by("trainer", 0, SECOND)
    assert placements(list(world.say(Release(by=by, model=SECOND, replica="trainer", shard=0)))) == [(FIRST, 1)]
