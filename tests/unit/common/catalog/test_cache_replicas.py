"""Where a copy is placed, and when it has no purpose any more."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, failed, kinds, refused
from tests.unit.common.catalog.test_retention import joined, placed, retaining

from tensorhub_common.catalog import cache_replicas
from tensorhub_common.errors import RetentionFull
from tensorhub_common.protocol.log.commands import NO_ROOT, DrainAgent, Pin, Retain, Rewind
from tensorhub_common.protocol.log.events import CopyPlaced, VersionGone

FULL = RetentionFull.__name__


def placements(world: World) -> list[tuple[int, list[str]]]:
    """Name the versions of which copies were placed, and on whom."""
    found = [event for event in world.events if isinstance(event, CopyPlaced)]
    return [(event.version, [member.agent for member in event.members]) for event in found]


def publishing(*caches: tuple[str, int, str], shards: int = 1, last: int = 1) -> World:
    """Return a trainer on host-0 that has published 1, and caching agents by (name, room, host)."""
    world = World()
    world.replica_of("trainer", *"ab"[:shards])
    for name, room, host in caches:
        joined(world, name, room, host)
    world.say(Retain(model=MODEL, last=last))
    world.publish("trainer", 1)
    return world


# Where.


def test_another_host_than_the_holders_comes_before_more_room() -> None:
    assert placements(publishing(("near", 1024, "host-0"), ("far", 64, "host-1"))) == [(1, ["far"])]


def test_the_holders_host_is_better_than_none() -> None:
    assert placements(publishing(("near", 1024, "host-0"), ("far", 63, "host-1"))) == [(1, ["near"])]


def test_the_most_room_comes_first_and_then_the_name() -> None:
    assert placements(publishing(("x", 64, "host-1"), ("y", 65, "host-1"))) == [(1, ["y"])]
    assert placements(publishing(("y", 64, "host-1"), ("x", 64, "host-1"))) == [(1, ["x"])]


@pytest.mark.parametrize(("room", "fits"), [(127, False), (128, True)])
def test_all_shards_of_a_copy_have_to_fit(room: int, fits: bool) -> None:  # noqa: FBT001
    assert placements(publishing(("x", room, "host-1"), shards=2)) == ([(1, ["x", "x"])] if fits else [])


@pytest.mark.parametrize(("room", "versions"), [(127, [1]), (128, [1, 2])])
def test_what_an_agent_holds_already_takes_of_its_room(room: int, versions: list[int]) -> None:
    world = publishing(("x", room, "host-1"), last=2)
    world.fetch(placed(world).replica, 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    assert [version for version, _ in placements(world)] == versions


def test_a_newer_version_is_placed_before_an_older_one() -> None:
    world = publishing(last=2)
    world.replica_of("engine", "c")
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 2)
    joined(world, "x", 64)
    assert placements(world) == [(2, ["x"])]


def test_a_copy_is_cut_like_who_was_not_copied_itself() -> None:
    world = publishing(("x", 1024, "host-1"), shards=2)
    world.fetch(placed(world).replica, 1)
    world.replica_of("spot", "c", spot=True)
    world.fetch("spot", 1)
    world.empty("trainer")
    joined(world, "y", 1024)
    world.say(DrainAgent(agent="x"))
    assert placements(world)[-1] == (1, ["y"])


# Nowhere.


def test_what_was_published_without_digests_is_not_copied() -> None:
    world = World()
    world.replica_of("trainer", "a")
    joined(world, "x", 1024)
    world.say(Retain(model=MODEL, last=1))
    world.ready("trainer", 1, digest=NO_ROOT)
    assert not placements(world)
    refused(world.unpublish("trainer"), FULL)


def test_a_model_with_as_many_replicas_as_may_be_gets_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_replicas, "REPLICAS_MAX", 1)
    world = publishing(("x", 1024, "host-1"))
    assert not placements(world)
    refused(world.unpublish("trainer"), FULL)
    monkeypatch.setattr(cache_replicas, "REPLICAS_MAX", 2)
    world.say(Pin(model=MODEL, version=1))
    assert placements(world) == [(1, ["x"])]


# No purpose any more.


def test_a_second_copy_is_let_go_of_when_the_first_may_stay_after_all() -> None:
    world = retaining(room=192)
    first = placed(world).replica
    world.fetch(first, 1)
    world.empty("trainer")
    world.say(DrainAgent(agent="c"))
    second = placed(world).replica
    assert second != first
    events = world.say(DrainAgent(agent="c", on=False))
    assert kinds(events) == ["agent.draining", "shard.released", "shard.released"]
    assert set(world.catalog.models[MODEL].replicas) == {"trainer", first}


def test_a_copy_that_was_begun_on_a_lost_agent_is_begun_anew_where_only_spot_holds_the_version() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("spot", "b", spot=True)
    world.publish("trainer", 1)
    world.fetch("spot")
    world.empty("trainer")
    world.say(Retain(model=MODEL, last=1))
    joined(world, "x", 64)
    begun = placed(world).replica
    joined(world, "y", 64)
    world.expire("x")
    assert begun not in world.catalog.models[MODEL].replicas
    assert placements(world) == [(1, ["x"]), (1, ["y"])]


def test_a_copy_that_was_begun_of_what_nobody_holds_now_stays_for_who_comes_back() -> None:
    world = publishing(("x", 64, "host-1"), ("y", 64, "host-1"))
    begun = placed(world).replica
    world.expire("a")
    world.expire("x")
    assert begun in world.catalog.models[MODEL].replicas


def test_a_copy_that_is_let_go_of_as_the_last_holder_was_released() -> None:
    world = publishing(("x", 64, "host-1"))
    world.fetch(placed(world).replica, 1)
    world.empty("trainer")
    events = world.say(Retain(model=MODEL, last=0))
    assert [event.reason for event in events if isinstance(event, VersionGone)] == ["released"]


# What is tended.


def test_a_model_of_which_nothing_is_retained_is_tended_no_longer() -> None:
    world = publishing(("x", 64, "host-1"))
    assert list(world.catalog.tended) == [MODEL]
    world.say(Pin(model=MODEL, version=1))
    world.say(Retain(model=MODEL, last=0))
    assert list(world.catalog.tended) == [MODEL]
    world.replica_of("plain", "p")
    assert list(world.catalog.tended) == [MODEL]


def test_a_rewound_model_is_tended_until_nobody_holds_what_was_retired() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.publish("trainer", 1)
    world.say(Rewind(model=MODEL, to=0))
    assert list(world.catalog.tended) == [MODEL]
    world.empty("trainer")
    assert not world.catalog.tended
    assert not world.catalog.models[MODEL].versions


def test_a_model_whose_retention_ended_is_tended_no_longer() -> None:
    world = publishing(("x", 64, "host-1"))
    world.say(Retain(model=MODEL, last=0))
    assert not world.catalog.tended


def test_a_refill_that_waits_for_a_copy_fails_when_that_can_not_come_any_more() -> None:
    world = retaining(last=2)
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    assert kinds(world.start("engine", 2)) == ["round.held"]
    world.replica_of("other", "g")
    world.want("other", 7)
    world.expire("c")
    failure = failed(world.expire("d"))
    assert (failure.replica, failure.error) == ("engine", FULL)
    assert "version 1 of model 'policy' is retained, replica 'engine' holds its last copy" in failure.message
    assert world.states("engine") == ["ready", "ready"]
