"""Holds: a version that somebody needs has a copy meanwhile, no trainer waits for that, and it ends by itself."""

from tests.unit.common.catalog.scenes import (
    caching,
    drain,
    of,
    one,
    only,
    placed,
    republished,
    retain,
    standing,
)

from tensorhub_common.catalog import snapshot
from tensorhub_common.catalog.retention import held, retained
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.protocol.log.commands import HOLD_S_MAX, Quota, Rewind
from tensorhub_common.protocol.log.events import CopyPlaced, HoldStated, VersionGone, VersionKept
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.queries import VersionState
from tensorhub_simulator.drivers.catalog import JOB, MODEL, CatalogDriver, kinds, refused


def published(*, room: int = 1024, level: int = max(Level)) -> CatalogDriver:
    """Return a trainer that has published 1, and an agent with room for copies."""
    world = CatalogDriver(level)
    world.replica_of("trainer", "a")
    caching(world, "c", room)
    world.publish("trainer", 1)
    return world


def copied(world: CatalogDriver) -> str:
    """Let 1 be held, and its copy be filled; the copy's name."""
    world.hold(1)
    copy = placed(world).replica
    world.fetch(copy, 1)
    return copy


def state_of(world: CatalogDriver, version: int) -> VersionState:
    return world.catalog.models[MODEL].versions[version].state


def test_what_is_held_has_a_copy_which_outlives_all_others_and_goes_with_the_hold() -> None:
    world = published()
    assert kinds(world.hold(1)) == ["hold.stated", "copy.placed"]
    copy = placed(world).replica
    world.fetch(copy, 1)
    republished(world, 2)
    assert state_of(world, 1) is VersionState.AVAILABLE
    assert kinds(world.hold()) == ["hold.stated", "shard.released", "version.unavailable"]
    assert copy not in world.catalog.models[MODEL].replicas
    assert MODEL not in world.catalog.tended


def test_no_act_of_a_trainer_waits_for_a_copy_that_is_only_held() -> None:
    world = published()
    world.hold(1)
    assert kinds(world.unpublish("trainer"))[0] == "shard.draining"
    assert of(world.drained("trainer"), VersionGone) or state_of(world, 1) is VersionState.UNAVAILABLE
    assert kinds(world.say(Rewind(model=MODEL, to=0)))[0] == "model.rewound"
    assert not held(world.catalog.models[MODEL])


def test_a_hold_that_is_not_stated_again_is_ended_by_the_registry_and_not_before_its_time() -> None:
    world = published()
    copy = copied(world)
    republished(world, 2)
    world.hold(1, lasts_s=10)
    until = world.catalog.models[MODEL].holds["rollouts"].until
    assert until == world.catalog.time + 10
    refused(world.end_hold(), "BadCommand")
    world.hold(1, lasts_s=20)
    while world.catalog.time < until:
        world.say(Quota(nbytes=0))
    refused(world.end_hold(), "BadCommand")
    while world.catalog.time < world.catalog.models[MODEL].holds["rollouts"].until:
        world.say(Quota(nbytes=0))
    assert kinds(world.end_hold())[0] == "hold.ended"
    assert copy not in world.catalog.models[MODEL].replicas


def test_a_late_word_never_takes_the_place_of_a_later_one() -> None:
    world = published()
    copy = copied(world)
    world.hold(1, term=2, n=4)
    for term, n in ((1, 99), (2, 3), (2, 4)):
        refused(world.hold(term=term, n=n), "StaleSender")
    assert copy in world.catalog.models[MODEL].replicas
    world.hold(term=2, n=5)
    assert copy not in world.catalog.models[MODEL].replicas


def test_what_two_hold_has_one_copy_until_the_second_lets_go() -> None:
    world = published()
    copy = copied(world)
    assert kinds(world.hold(1, holder="other")) == ["hold.stated"]
    world.hold()
    assert copy in world.catalog.models[MODEL].replicas
    world.hold(holder="other")
    assert copy not in world.catalog.models[MODEL].replicas


def test_a_copy_that_is_only_held_makes_room_for_one_of_a_retained_version() -> None:
    world = published(room=64)
    copy = copied(world)
    republished(world, 2)
    assert kinds(retain(world, 1)) == [
        "model.retention",
        "shard.released",
        "version.unavailable",
        "copy.placed",
        "version.kept",
    ]
    assert copy not in world.catalog.models[MODEL].replicas
    assert placed(world).version == 2


def test_nothing_that_is_held_goes_where_that_would_not_give_room_enough() -> None:
    world = published(room=64)
    copy = copied(world)
    world.say(Quota(nbytes=64))
    republished(world, 2)
    for _ in range(2):
        assert kinds(retain(world, 1))[:1] == ["model.retention"]
        assert copy in world.catalog.models[MODEL].replicas


def test_versions_that_are_not_there_are_passed_over_and_the_others_held() -> None:
    world = published()
    stated = only(world.hold(1, 7), HoldStated)
    assert (stated.versions, stated.until) == ((1,), world.catalog.time + 60)
    assert only(world.hold(7), HoldStated).versions == ()
    assert not world.catalog.models[MODEL].holds


def test_a_held_copy_counts_for_no_retention_event() -> None:
    world = published()
    copied(world)
    assert not of(world.events, VersionKept)
    assert retained(world.catalog.models[MODEL]) == set()


def test_a_held_copy_moves_where_its_agent_is_drained() -> None:
    world = published()
    caching(world, "d", 64)
    copied(world)
    before = len(of(world.events, CopyPlaced))
    drain(world, next(iter(placed(world).members)).agent)
    assert len(of(world.events, CopyPlaced)) == before + 1


def test_below_its_level_it_is_no_command_and_a_snapshot_names_nothing_of_it() -> None:
    world = published(level=Level.HOLDING - 1)
    assert "there is no verb 'hold'" in refused(world.hold(1), "BadCommand").message
    fields = snapshot.fields_at(Level.HOLDING - 1)
    assert "holds" not in fields["Model"]
    assert fields["VersionHold"] == ()


def test_a_snapshot_goes_on_with_the_holds() -> None:
    world = published()
    world.hold(1, lasts_s=HOLD_S_MAX)
    read = snapshot.decode(JOB, snapshot.encode(Snapshot(world.catalog.seq, world.catalog.time, world.catalog)))
    assert read.catalog == world.catalog


def test_a_model_without_copies_and_room_is_held_all_the_same_and_copied_once_an_agent_has_room() -> None:
    world = one()
    world.publish("trainer", 1)
    assert kinds(world.hold(1)) == ["hold.stated"]
    caching(world, "c", 64)
    assert placed(world).version == 1


def test_the_pattern_is_a_holder_of_all_shards() -> None:
    world = standing(trainer="ab")
    caching(world, "c", 1024)
    world.publish("trainer", 1)
    world.hold(1)
    assert [each.shard for each in placed(world).members] == [0, 1]
