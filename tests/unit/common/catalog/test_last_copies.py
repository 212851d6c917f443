"""Which other copy lets the last one go: one that stands and stays, or is on its way, and no other."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, failed, kinds, refused, root
from tests.unit.common.catalog.test_retention import joined, placed, retaining

from tensorhub_common.catalog.retention import retained
from tensorhub_common.catalog.state import SHUN_S
from tensorhub_common.errors import RetentionFull
from tensorhub_common.protocol.log.commands import DrainAgent, HeldShard, Join, Pin, Release, Retain, Sender, Unpublish
from tensorhub_common.protocol.log.events import Event, ShardStays, VersionExposed, VersionKept

FULL = RetentionFull.__name__


def two_versions(*, last: int = 2) -> World:
    """Return 1 on `engine` and 2 on `trainer`, both retained, with no room for copies."""
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    world.publish("trainer", 1)
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 2)
    world.say(Retain(model=MODEL, last=last))
    return world


def second_holder_of_1(world: World, *, spot: bool = False) -> None:
    """Let another replica hold 1, too."""
    world.replica_of("second", "c", spot=spot)
    world.fetch("second", 1)


def release_copy(world: World) -> None:
    """Let the first shard's agent of the last copy say that it can't hold it."""
    copy = placed(world).replica
    world.say(Release(by=world._shard_by(copy, 0), model=MODEL, replica=copy, shard=0))


# What is retained.


def test_a_pin_alone_retains_its_version_and_no_other() -> None:
    world = two_versions(last=0)
    world.say(Pin(model=MODEL, version=1))
    assert retained(world.catalog.models[MODEL]) == {1}
    refused(world.unpublish("engine"), FULL)
    assert kinds(world.unpublish("trainer"))[0] == "shard.draining"


# What counts.


def test_another_whole_copy_lets_the_last_one_go() -> None:
    world = two_versions()
    assert "version 1 of model 'policy' is retained" in refused(world.unpublish("engine"), FULL).message
    second_holder_of_1(world)
    assert kinds(world.unpublish("engine")) == ["shard.draining"]


def test_one_that_is_filled_with_another_version_beside_this_one_does_not_count() -> None:
    """Staged: it holds the old version up to the end, and then no more."""
    world = two_versions()
    second_holder_of_1(world)
    world.want("second", 2, staged=True)
    world.granted("second")
    assert world.replica("second").version == 1
    refused(world.unpublish("engine"), FULL)
    assert failed(world.give_up("second")).replica == "second"
    assert kinds(world.unpublish("engine")) == ["shard.draining"]


@pytest.mark.parametrize("granted", [False, True])
def test_one_that_has_only_joined_or_been_decided_still_counts(granted: bool) -> None:  # noqa: FBT001
    world = two_versions()
    second_holder_of_1(world)
    world.want("second", 2 if granted else 3)
    assert kinds(world.unpublish("engine")) == ["shard.draining"]


def test_one_whose_agent_is_drained_does_not_count_and_one_on_another_agent_does() -> None:
    world = two_versions()
    second_holder_of_1(world)
    world.say(DrainAgent(agent="a"))
    assert kinds(world.unpublish("engine")) == ["shard.draining"]
    world = two_versions()
    second_holder_of_1(world)
    world.say(DrainAgent(agent="c"))
    refused(world.unpublish("engine"), FULL)
    world.say(DrainAgent(agent="c", on=False))
    assert kinds(world.unpublish("engine")) == ["shard.draining"]


def test_one_with_a_shard_that_is_about_to_go_does_not_count() -> None:
    world = retaining(last=1)
    world.unpublish("trainer", 0)
    world.replica_of("engine", "e", "f")
    assert kinds(world.fetch("engine", 1))[-1] == "shard.draining"


def test_one_whose_unpublish_is_held_back_does_not_count_for_another() -> None:
    """Each would let the other go."""
    world = two_versions()
    second_holder_of_1(world)
    world.say(DrainAgent(agent="c"))
    world.replica_of("third", "d")
    world.start("third", 1)
    assert kinds(world.unpublish("engine")) == ["unpublish.held"]
    assert kinds(world.unpublish("second")) == ["unpublish.held"]
    assert kinds(world.filled("third", 1)).count("shard.draining") == 2


# What is coming.


def reading_1(world: World, *, spot: bool = False, joined_only: bool = False) -> None:
    """Let another replica be filled with 1."""
    world.replica_of("second", "c", *(["d"] if joined_only else []), spot=spot)
    world.want("second", 1)
    if not joined_only:
        world.granted("second")


def test_a_copy_that_is_being_filled_is_waited_for() -> None:
    world = two_versions()
    reading_1(world)
    assert kinds(world.unpublish("engine")) == ["unpublish.held"]
    assert kinds(world.filled("second", 1)) == ["shard.filled", "replica.ready", "shard.draining"]


def test_who_waits_is_told_why_no_copy_comes_any_more() -> None:
    world = two_versions()
    reading_1(world)
    world.unpublish("engine")
    stays = [event for event in world.give_up("second") if isinstance(event, ShardStays)]
    assert [(each.replica, each.shard, each.version, each.error) for each in stays] == [("engine", 0, 1, FULL)]
    assert "version 1 of model 'policy' is retained, replica 'engine' holds its last copy" in stays[0].message
    assert not world.shard("engine").leaving


def test_a_spot_replica_that_is_being_filled_is_not_waited_for() -> None:
    world = two_versions()
    reading_1(world, spot=True)
    refused(world.unpublish("engine"), FULL)


def test_a_round_that_is_not_decided_is_not_waited_for() -> None:
    world = two_versions()
    reading_1(world, joined_only=True)
    refused(world.unpublish("engine"), FULL)


def test_a_round_for_another_version_is_not_waited_for() -> None:
    world = two_versions()
    world.replica_of("second", "c")
    world.start("second", 2)
    refused(world.unpublish("engine"), FULL)


# What is placed only now.


def wait_until_just_before(world: World, time: float) -> None:
    """Say things that change nothing until the next word comes at that time."""
    while world.catalog.time + 2 < time:
        world.say(Pin(model=MODEL, version=99))


def one_agent_that_failed(time_s: float) -> tuple[World, list[Event]]:
    """Return what an unpublish of the last copy leads to so long after the only agent with room has failed."""
    world = World()
    world.replica_of("trainer", "a")
    joined(world, "c", 1024)
    world.say(Retain(model=MODEL, last=1))
    world.publish("trainer", 1)
    release_copy(world)
    wait_until_just_before(world, world.catalog.time + time_s)
    return world, list(world.unpublish("trainer"))


def test_an_agent_that_failed_to_hold_a_copy_gets_one_again_only_after_a_while() -> None:
    world, events = one_agent_that_failed(SHUN_S - 2)
    assert kinds(events) == ["command.rejected"]
    world, events = one_agent_that_failed(SHUN_S)
    assert kinds(events) == ["unpublish.held", "copy.placed"]
    assert [member.agent for member in placed(world).members] == ["c"]
    assert kinds(world.fetch(placed(world).replica, 1))[-1] == "shard.draining"


def test_a_refill_of_the_last_copy_places_another_where_there_is_room_again() -> None:
    world = two_versions()
    joined(world, "c", 128)
    assert placed(world).version == 1
    release_copy(world)
    world.want("engine", 2)
    wait_until_just_before(world, world.catalog.time + SHUN_S)
    events = world.granted("engine")
    assert kinds(events)[:2] == ["round.held", "copy.placed"]
    assert kinds(world.fetch(placed(world).replica, 1))[-1] == "round.started"


def test_a_refill_of_the_last_copy_without_room_fails_and_says_which_version_stays() -> None:
    world = two_versions()
    failure = failed(world.start("engine", 2))
    assert (failure.error, failure.replica) == (FULL, "engine")
    assert "version 1 of model 'policy' is retained, replica 'engine' holds its last copy" in failure.message


def test_a_refill_that_no_copy_came_for_in_time_says_which_version_it_waited_with() -> None:
    world = two_versions()
    reading_1(world)
    assert kinds(world.start("engine", 2)) == ["round.held"]
    failure = failed(world.give_up("engine"))
    said = "no other copy of the retained version 1 stood within the bound: allow more time"
    assert (failure.error, failure.message) == (FULL, said)


# What is told.


def test_a_version_that_comes_to_be_retained_is_told_kept() -> None:
    world = two_versions(last=1)
    kept = [event for event in world.say(Retain(model=MODEL, last=2)) if isinstance(event, VersionKept)]
    assert [(event.version, event.replica) for event in kept] == [(1, "engine")]
    assert "version.kept" not in kinds(world.say(Retain(model=MODEL, last=2)))


def test_a_version_whose_last_safe_copy_went_is_told_exposed_with_the_reason() -> None:
    world = two_versions()
    world.replica_of("spot", "c", spot=True)
    world.fetch("spot", 1)
    assert [(event.version, event.reason) for event in exposed(world.expire("b"))] == [(1, "lost")]
    by = world._shard_by("trainer", 0)
    void = Unpublish(by=by, model=MODEL, replica="trainer", shard=0, void=True)
    assert [(event.version, event.reason) for event in exposed(world.say(void))] == [(2, "unpublished")]


def exposed(events: tuple[Event, ...]) -> list[VersionExposed]:
    return [event for event in events if isinstance(event, VersionExposed)]


def test_an_agent_that_returns_is_not_believed_that_a_copy_holds_another_version() -> None:
    """Were it, the version that the copy is for would be counted on, and the copy never filled."""
    world = retaining(last=2)
    copy = placed(world).replica
    world.fetch(copy, 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    other = HeldShard(model=MODEL, replica=copy, shard=0, version=2, root=root(2, 0))
    world.say(Join(by=Sender("c", 2, 1), host="host-1", site="site-0", holds=(other,), cache_bytes=1024))
    held = world.catalog.models[MODEL].replicas.get(copy)
    assert held is None or held.members[0].version is None
