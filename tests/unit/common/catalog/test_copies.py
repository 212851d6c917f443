"""Copies of what is retained: where one is placed, when it has no purpose any more, and who shares room and quota."""

import pytest
from tests.unit.common.catalog.scenes import (
    FULL,
    caching,
    drain,
    emptied,
    holding,
    of,
    one,
    placed,
    republished,
    retain,
    retaining,
    standing,
)

from tensorhub_common.catalog import cache_replicas
from tensorhub_common.protocol.log.commands import NO_ROOT, Delete, Join, Pin, Quota, Ready, Release, Rewind, Sender
from tensorhub_common.protocol.log.events import CopyPlaced, Event, VersionGone, model_of
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, kinds, refused, root

FIRST, SECOND = "first", "second"


def placements(world: CatalogDriver) -> list[tuple[int, list[str]]]:
    """Name the versions of which copies were placed, and on whom."""
    return [(event.version, [member.agent for member in event.members]) for event in of(world.events, CopyPlaced)]


def publishing(*caches: tuple[str, int, str], shards: int = 1, last: int = 1) -> CatalogDriver:
    """Return a trainer on host-0 that has published 1, and caching agents by (name, room, host)."""
    world = standing(trainer="ab"[:shards])
    for name, room, host in caches:
        caching(world, name, room, host)
    retain(world, last)
    world.publish("trainer", 1)
    return world


def test_a_copy_is_placed_when_the_version_is_published_cut_as_its_holder_is_and_spread_over_the_agents() -> None:
    world = retaining()
    event = placed(world)
    assert kinds(world.events)[-4:] == ["version.published", "replica.ready", "copy.placed", "version.kept"]
    assert [(member.shard, member.agent, member.nbytes) for member in event.members] == [(0, "c", 64), (1, "d", 64)]
    assert event.replica.startswith("_cache-1-")


@pytest.mark.parametrize(
    ("caches", "chosen"),
    [
        ([("near", 1024, "host-0"), ("far", 64, "host-1")], "far"),  # Another host than the holder's.
        ([("near", 1024, "host-0"), ("far", 63, "host-1")], "near"),  # Better than none.
        ([("x", 64, "host-1"), ("y", 65, "host-1")], "y"),  # The most room.
        ([("y", 64, "host-1"), ("x", 64, "host-1")], "x"),  # The name.
    ],
)
def test_another_host_comes_before_more_room_and_that_before_the_name(
    caches: list[tuple[str, int, str]], chosen: str
) -> None:
    assert placements(publishing(*caches)) == [(1, [chosen])]


@pytest.mark.parametrize(("room", "members"), [(127, []), (128, [(1, ["x", "x"])])])
def test_all_shards_of_a_copy_have_to_fit(room: int, members: list[tuple[int, list[str]]]) -> None:
    assert placements(publishing(("x", room, "host-1"), shards=2)) == members


@pytest.mark.parametrize(("room", "versions"), [(127, [1]), (128, [1, 2])])
def test_what_an_agent_holds_already_takes_of_its_room(room: int, versions: list[int]) -> None:
    world = publishing(("x", room, "host-1"), last=2)
    emptied(world)
    world.publish("trainer", 2)
    assert [version for version, _ in placements(world)] == versions


def test_a_newer_version_is_placed_before_an_older_one() -> None:
    world = publishing(last=2)
    world.replica_of("engine", "c")
    world.fetch("engine")
    republished(world, 2)
    caching(world, "x", 64)
    assert placements(world) == [(2, ["x"])]


def test_a_copy_is_cut_like_who_was_not_copied_itself() -> None:
    world = publishing(("x", 1024, "host-1"), shards=2)
    world.fetch(placed(world).replica, 1)
    world.replica_of("spot", "c", spot=True)
    world.fetch("spot", 1)
    world.empty("trainer")
    caching(world, "y", 1024)
    drain(world, "x")
    assert placements(world)[-1] == (1, ["y"])


def test_what_was_published_without_digests_is_not_copied() -> None:
    world = one()
    caching(world, "x", 1024)
    retain(world, 1)
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


def test_a_quota_bounds_new_shards_and_copies_and_leaves_what_stands() -> None:
    world = standing(trainer="ab")
    caching(world, "c", 1024)
    world.say(Quota(nbytes=192))
    assert kinds(world.register("a", "late", 0, 2)) == ["shard.registered"], "it just fits"
    assert "quota" in refused(world.register("b", "late", 1, 2), "MemoryExhausted").message
    retain(world, 1)
    world.publish("trainer", 1)
    assert not placements(world)
    refused(world.unpublish("trainer"), FULL)
    assert kinds(world.say(Quota(nbytes=0))) == ["job.quota", "copy.placed"]


def test_a_copy_that_its_agent_can_not_hold_is_placed_elsewhere_and_not_there_again() -> None:
    world = retaining()
    copy = placed(world).replica
    world.release(copy, 0)
    assert copy not in world.catalog.models[MODEL].replicas
    assert {member.agent for member in placed(world).members} == {"d"}


def test_a_newer_version_frees_the_older_one_and_its_copy() -> None:
    world = retaining()
    old = emptied(world)
    assert "shard.released" in kinds(world.publish("trainer", 2))
    assert old not in world.catalog.models[MODEL].replicas
    assert placed(world).version == 2
    assert not world.catalog.models[MODEL].versions[1].holders


def test_a_draining_agent_takes_nothing_new_and_its_copies_move_before_it_may_stop() -> None:
    world = retaining(room=192)
    copy = emptied(world)
    assert kinds(drain(world, "c")) == ["agent.draining", "copy.placed"]
    assert {member.agent for member in placed(world).members} == {"d"}
    refused(world.register("c", "late"), "AgentUnavailable")
    assert "agent.drained" in kinds(world.fetch(placed(world).replica, 1))
    assert copy not in world.catalog.models[MODEL].replicas
    assert kinds(drain(world, "c", on=False)) == ["agent.draining"]


def test_a_second_copy_is_let_go_of_when_the_first_may_stay_after_all() -> None:
    world = retaining(room=192)
    first = emptied(world)
    drain(world, "c")
    assert placed(world).replica != first
    assert kinds(drain(world, "c", on=False)) == ["agent.draining", "shard.released", "shard.released"]
    assert set(world.catalog.models[MODEL].replicas) == {"trainer", first}


def test_a_copy_that_was_begun_on_a_lost_agent_is_begun_anew_where_only_spot_holds_the_version() -> None:
    world = one()
    world.replica_of("spot", "b", spot=True)
    world.publish("trainer", 1)
    world.fetch("spot")
    world.empty("trainer")
    retain(world, 1)
    caching(world, "x", 64)
    begun = placed(world).replica
    caching(world, "y", 64)
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
    emptied(world)
    assert [event.reason for event in of(retain(world, 0), VersionGone)] == ["released"]


def test_a_caching_agent_that_restarts_with_its_memory_is_believed_and_one_without_is_replaced() -> None:
    world = retaining()
    copy = placed(world).replica
    world.fetch(copy, 1)
    again = Join(by=Sender("c", 2, 1), host="h", site="s", holds=(world.holding(copy, 0),), cache_bytes=1024)
    assert "copy.placed" not in kinds(world.say(again))
    assert world.states(copy) == ["ready", "ready"]
    assert "copy.placed" in kinds(world.say(Join(by=Sender("c", 3, 1), host="h", site="s", cache_bytes=1024)))


def test_an_agent_that_returns_is_not_believed_that_a_copy_holds_another_version() -> None:
    """Were it, the version that the copy is for would be counted on, and the copy never filled."""
    world = retaining(last=2)
    copy = emptied(world)
    world.publish("trainer", 2)
    other = holding(2, root(2, 0), replica=copy)
    world.say(Join(by=Sender("c", 2, 1), host="host-1", site="site-0", holds=(other,), cache_bytes=1024))
    held = world.catalog.models[MODEL].replicas.get(copy)
    assert held is None or held.members[0].version is None


def test_a_model_of_which_nothing_is_retained_is_tended_no_longer() -> None:
    world = publishing(("x", 64, "host-1"))
    world.say(Pin(model=MODEL, version=1))
    retain(world, 0)
    world.replica_of("plain", "p")
    assert list(world.catalog.tended) == [MODEL], "it is pinned"
    world = publishing(("x", 64, "host-1"))
    retain(world, 0)
    assert not world.catalog.tended


def test_a_rewound_model_is_tended_until_nobody_holds_what_was_retired() -> None:
    world = one()
    world.publish("trainer", 1)
    world.say(Rewind(model=MODEL, to=0))
    assert list(world.catalog.tended) == [MODEL]
    world.empty("trainer")
    assert not world.catalog.tended
    assert not world.catalog.models[MODEL].versions


def publish(world: CatalogDriver, model: str) -> tuple[Event, ...]:
    """Publish 1 of a model, whose trainer has one shard."""
    by = world._shard_by("trainer", 0, model)
    return world.say(Ready(by=by, model=model, replica="trainer", shard=0, version=1, root=f"{model}-1"))


def copies(events: tuple[Event, ...]) -> list[str]:
    """Name the models of which copies were placed."""
    return [event.model for event in of(events, CopyPlaced)]


def two_models(room: int, *retained: str) -> CatalogDriver:
    """Return two models with a trainer each, of which one version is retained, and one agent with this room."""
    world = CatalogDriver()
    caching(world, "cache", room)
    for model, agent in ((FIRST, "a"), (SECOND, "b")):
        world.join(agent)
        world.register(agent, "trainer", model=model)
    for model in retained or (FIRST, SECOND):
        retain(world, 1, model)
    return world


@pytest.mark.parametrize(("goes", "stays"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_copy_takes_the_room_that_another_models_copy_leaves_in_the_same_command(goes: str, stays: str) -> None:
    """Nobody may say anything more for a long time, and until then the version would stand on one replica alone."""
    world = two_models(64)
    assert (copies(publish(world, goes)), copies(publish(world, stays))) == ([goes], [])
    events = retain(world, 0, goes)
    assert kinds(events)[1] == "shard.released"
    assert copies(events) == [stays]


def test_a_copy_takes_the_room_that_a_deleted_model_leaves() -> None:
    world = two_models(64)
    publish(world, FIRST)
    publish(world, SECOND)
    world.expire("a")
    events = world.say(Delete(model=FIRST))
    assert kinds(events)[0] == "model.deleted"
    assert copies(events) == [SECOND]


def test_what_is_said_of_one_model_leaves_another_alone() -> None:
    world = two_models(1024)
    publish(world, FIRST)
    assert {model_of(event) for event in publish(world, SECOND)} == {SECOND}


def test_a_copy_is_placed_where_a_shard_of_another_model_leaves_room_in_the_quota() -> None:
    world = two_models(1024, FIRST)
    world.say(Quota(nbytes=128))
    assert copies(publish(world, FIRST)) == []
    by = world._shard_by("trainer", 0, SECOND)
    assert copies(world.say(Release(by=by, model=SECOND, replica="trainer", shard=0))) == [FIRST]
