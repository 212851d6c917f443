"""Retention, one step at a time: what is held back, what frees it, and what is refused at once."""

from tests.unit.common.catalog.catalog_world import MODEL, World, failed, kinds, refused

from tensorhub_common.protocol.log.commands import (
    Delete,
    DrainAgent,
    Join,
    Pin,
    Quota,
    Release,
    Retain,
    Rewind,
    Sender,
    Stay,
    Unpin,
    Unpublish,
    Unreadable,
)
from tensorhub_common.protocol.log.events import CopyPlaced, RoundDecided, ShardStays, VersionExposed, VersionRetired


def joined(world: World, agent: str, cache_bytes: int, host: str = "host-1") -> None:
    world.say(Join(by=Sender(agent, 1, 1), host=host, site="site-0", cache_bytes=cache_bytes))


def retaining(last: int = 1, *, room: int = 1024) -> World:
    """Return a trainer of two shards that has published 1, two cache agents, and a retention."""
    world = World()
    world.replica_of("trainer", "a", "b")
    joined(world, "c", room)
    joined(world, "d", room)
    world.say(Retain(model=MODEL, last=last))
    world.publish("trainer", 1)
    return world


def placed(world: World) -> CopyPlaced:
    """Return the last placement."""
    return [event for event in world.events if isinstance(event, CopyPlaced)][-1]


def test_a_copy_is_placed_when_the_version_is_published_cut_as_its_holder_is_and_spread_over_the_agents() -> None:
    world = retaining()
    event = placed(world)
    assert kinds(world.events)[-4:] == ["version.published", "replica.ready", "copy.placed", "version.kept"]
    assert [(member.shard, member.agent, member.nbytes) for member in event.members] == [(0, "c", 64), (1, "d", 64)]
    assert event.replica.startswith("_cache-1-")


def test_the_last_copy_is_held_back_until_another_one_stands() -> None:
    world = retaining()
    copy = placed(world).replica
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"]
    assert world.states("trainer") == ["ready", "ready"]
    refused(world.drained("trainer", 0), "NotPublished")
    events = world.fetch(copy, 1)
    assert kinds(events) == ["shard.filled", "replica.ready", "shard.draining"]
    assert world.states("trainer") == ["draining", "ready"]
    assert kinds(world.unpublish("trainer", 1)) == ["shard.draining"]


def test_a_held_unpublish_that_is_said_again_is_held_again_and_one_that_is_given_up_stays() -> None:
    world = retaining()
    world.unpublish("trainer", 0)
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"]
    refused(world.want("trainer", "latest", 0), "ReplicaConflict")
    by = world._shard_by("trainer", 0)
    assert kinds(world.say(Stay(by=by, model=MODEL, replica="trainer", shard=0))) == ["shard.stays"]
    world.fetch(placed(world).replica, 1)
    assert world.states("trainer") == ["ready", "ready"]


def test_without_room_anywhere_unpublish_is_refused_at_once_and_says_what_to_do() -> None:
    world = retaining(room=0)
    assert "TENSORHUB_CACHE_BYTES" in refused(world.unpublish("trainer"), "RetentionFull").message
    world.say(Retain(model=MODEL, last=0))
    assert kinds(world.unpublish("trainer")) == ["shard.draining", "version.unavailable"]


def test_who_waits_for_a_copy_that_can_not_come_any_more_is_told() -> None:
    world = retaining()
    world.unpublish("trainer", 0)
    world.expire("c")
    world.expire("d")
    (stays,) = [event for event in world.events if isinstance(event, ShardStays)]
    assert (stays.shard, stays.error) == (0, "RetentionFull")


def test_a_copy_that_its_agent_can_not_hold_is_placed_elsewhere_and_not_there_again() -> None:
    world = retaining()
    copy = placed(world).replica
    by = world._shard_by(copy, 0)
    world.say(Release(by=by, model=MODEL, replica=copy, shard=0))
    assert copy not in world.catalog.models[MODEL].replicas
    assert {member.agent for member in placed(world).members} == {"d"}


def test_a_newer_version_frees_the_older_one_and_its_copy() -> None:
    world = retaining()
    old = placed(world).replica
    world.fetch(old, 1)
    world.empty("trainer")
    events = world.publish("trainer", 2)
    assert "shard.released" in kinds(events)
    assert old not in world.catalog.models[MODEL].replicas
    assert placed(world).version == 2
    assert not world.catalog.models[MODEL].versions[1].holders


def test_a_spot_replica_is_no_copy_that_counts() -> None:
    world = retaining()
    world.replica_of("spot", "e", "f", spot=True)
    world.fetch("spot", 1)
    assert kinds(world.unpublish("trainer", 0)) == ["unpublish.held"]
    assert kinds(world.unpublish("spot", 0)) == ["shard.draining"]


def test_a_refill_of_the_last_copy_waits_for_another_one_and_fails_if_none_comes() -> None:
    world = retaining(last=2)
    old = placed(world).replica
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    assert kinds(world.start("engine", 2)) == ["round.held"]
    assert kinds(world.fetch(old, 1)) == ["shard.filled", "replica.ready", "round.started"]
    assert world.states("engine") == ["filling", "filling"]


def swapping() -> World:
    """An engine that holds 1 has begun to read 2 beside it; the cache that held 1 as well is lost since."""
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "e")
    joined(world, "c", 64)
    world.say(Retain(model=MODEL, last=2))
    world.publish("trainer", 1)
    world.fetch(placed(world).replica, 1)
    world.fetch("engine", 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    world.want("engine", 2, staged=True)
    assert kinds(world.granted("engine")) == ["round.started"]
    joined(world, "d", 128)
    world.expire("c")
    return world


def test_a_swap_away_from_the_last_copy_waits_for_another_one() -> None:
    """Another one counted when the round began, and a crash has taken it: a swap is an order as others are."""
    world = swapping()
    copy = next(
        event.replica for event in reversed(world.events) if isinstance(event, CopyPlaced) and event.version == 1
    )
    assert kinds(world.filled("engine", 2)) == ["shard.filled", "round.held"]
    assert world.replica("engine").version == 1
    events = world.fetch(copy, 1)
    assert kinds(events) == ["shard.filled", "replica.ready", "replica.ready"]
    assert world.replica("engine").version == 2


def test_a_swap_that_waits_fails_at_its_bound_and_the_engine_keeps_what_it_holds() -> None:
    world = swapping()
    world.filled("engine", 2)
    assert failed(world.give_up("engine")).error == "RetentionFull"
    assert world.replica("engine").version == 1


def test_a_swap_that_an_older_release_has_said_is_folded_as_it_was() -> None:
    world = swapping()
    events = kinds(world.filled("engine", 2, waits=False))
    assert events[:3] == ["shard.filled", "version.unavailable", "replica.ready"]
    assert world.replica("engine").version == 2


def test_a_refill_at_its_bound_or_without_room_raises_retention_full() -> None:
    world = retaining(last=2)
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    world.start("engine", 2)
    assert failed(world.give_up("engine")).error == "RetentionFull"
    assert world.states("engine") == ["ready", "ready"]
    world.expire("c")
    world.expire("d")
    assert failed(world.start("engine", 2)).error == "RetentionFull"


def test_two_replicas_that_hold_it_may_not_both_go_and_one_that_drains_does_not_count() -> None:
    world = retaining(room=0)
    world.replica_of("engine", "e", "f")
    world.fetch("engine", 1)
    assert kinds(world.unpublish("trainer", 0)) == ["shard.draining"]
    refused(world.unpublish("engine"), "RetentionFull")


def test_a_pinned_version_outlives_the_newer_ones_until_it_is_unpinned() -> None:
    world = retaining(last=1)
    world.say(Pin(model=MODEL, version=1))
    world.fetch(placed(world).replica, 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    assert world.catalog.models[MODEL].versions[1].holders == 1
    assert kinds(world.say(Unpin(model=MODEL, version=1)))[:2] == ["version.unpinned", "shard.released"]
    refused(world.say(Pin(model=MODEL, version=1)), "VersionUnavailable")


def test_a_crash_of_the_only_holder_is_told_and_its_return_too() -> None:
    world = retaining(room=0)
    holding = world.holding("trainer", 0)
    assert [type(event) for event in world.expire("a")][-1] is VersionExposed
    assert kinds(world.join("a", holding))[-1] == "version.kept"


def test_a_caching_agent_that_restarts_with_its_memory_is_believed_and_one_without_is_replaced() -> None:
    world = retaining()
    copy = placed(world).replica
    world.fetch(copy, 1)
    kept = world.holding(copy, 0)
    joined_again = Join(by=Sender("c", 2, 1), host="host-1", site="site-0", holds=(kept,), cache_bytes=1024)
    assert "copy.placed" not in kinds(world.say(joined_again))
    assert world.states(copy) == ["ready", "ready"]
    empty_again = Join(by=Sender("c", 3, 1), host="host-1", site="site-0", cache_bytes=1024)
    assert "copy.placed" in kinds(world.say(empty_again))


def test_a_draining_agent_takes_nothing_new_and_its_copies_move_before_it_may_stop() -> None:
    world = retaining(room=192)
    copy = placed(world).replica
    world.fetch(copy, 1)
    world.empty("trainer")
    events = world.say(DrainAgent(agent="c"))
    assert kinds(events) == ["agent.draining", "copy.placed"]
    assert {member.agent for member in placed(world).members} == {"d"}
    refused(world.register("c", "late"), "AgentUnavailable")
    ended = world.fetch(placed(world).replica, 1)
    assert "agent.drained" in kinds(ended)
    assert copy not in world.catalog.models[MODEL].replicas
    assert kinds(world.say(DrainAgent(agent="c", on=False))) == ["agent.draining"]


def test_a_rewind_retires_what_came_later_and_counting_goes_on_above() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    for number in (8, 9):
        world.publish("trainer", number)
        world.fetch("engine")
        world.empty("trainer")
    world.replica_of("keeper", "c")
    events = world.say(Rewind(model=MODEL, to=8))
    assert [event.version for event in events if isinstance(event, VersionRetired)] == [9]
    assert world.states("engine") == ["ready"]
    refused(world.publish("trainer", 9), "VersionConflict")
    assert kinds(world.publish("trainer", None))[0] == "version.published"
    assert world.catalog.models[MODEL].last == 10
    assert kinds(world.fetch("engine", "newer"))[-1] == "replica.ready"
    assert 9 not in world.catalog.models[MODEL].versions


def test_a_rewind_leads_an_engine_back_to_the_version_before() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    world.replica_of("old", "c")
    world.publish("trainer", 8)
    world.fetch("old")
    world.empty("trainer")
    world.publish("trainer", 9)
    world.fetch("engine")
    world.say(Rewind(model=MODEL, to=8))
    world.fetch("engine", "newer")
    assert world.replica("engine").version == 8


def test_a_rewind_ends_what_is_under_way_with_retired_versions() -> None:
    world = World()
    for name, agent in (("trainer", "a"), ("second", "b"), ("engine", "c"), ("other", "d")):
        world.replica_of(name, agent)
    world.publish("trainer", 8)
    world.fetch("second")
    world.empty("trainer")
    world.publish("trainer", 9)
    world.start("engine", "latest")
    world.want("other", 9)
    events = world.say(Rewind(model=MODEL, to=8))
    assert failed(events).replica == "other"
    assert "retired" in failed(events).message
    assert [event.version for event in events if isinstance(event, RoundDecided)] == [8]


def test_offers_of_the_old_line_fail_at_a_rewind() -> None:
    world = World()
    world.replica_of("trainer", "a", "b")
    for number in (1, 2):
        world.publish("trainer", number)
        world.empty("trainer")
    world.ready("trainer", None, 0)
    assert "publish.failed" in kinds(world.say(Rewind(model=MODEL, to=1)))


def test_a_pinned_version_can_not_be_rewound_away() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.publish("trainer", 1)
    world.empty("trainer")
    world.publish("trainer", 2)
    world.say(Pin(model=MODEL, version=2))
    assert "unpin" in refused(world.say(Rewind(model=MODEL, to=1)), "VersionConflict").message


def test_a_model_is_deleted_once_nobody_stands_in_it() -> None:
    world = retaining()
    assert "release them first" in refused(world.say(Delete(model=MODEL)), "ReplicaConflict").message
    world.fetch(placed(world).replica, 1)
    world.empty("trainer")
    world.release("trainer", 0)
    world.release("trainer", 1)
    events = world.say(Delete(model=MODEL))
    assert kinds(events) == ["model.deleted", "shard.released", "shard.released"]
    assert MODEL not in world.catalog.models
    assert world.catalog.agents["c"].cached_bytes == 0


def test_a_quota_bounds_new_shards_and_copies_and_leaves_what_stands() -> None:
    world = World()
    world.replica_of("trainer", "a", "b")
    joined(world, "c", 1024)
    world.say(Quota(nbytes=200))
    world.register("a", "late", 0, 2)
    assert "quota" in refused(world.register("b", "late", 1, 2), "MemoryExhausted").message
    world.say(Retain(model=MODEL, last=1))
    world.publish("trainer", 1)
    assert not [event for event in world.events if isinstance(event, CopyPlaced)]
    refused(world.unpublish("trainer"), "RetentionFull")
    assert kinds(world.say(Quota(nbytes=0))) == ["job.quota", "copy.placed"]


def test_nonsense_is_refused_and_changes_nothing() -> None:
    world = retaining()
    refused(world.say(Retain(model=MODEL, last=33)), "RetentionFull")
    refused(world.say(Retain(model="other", last=1)), "VersionUnavailable")
    refused(world.say(Rewind(model=MODEL, to=7)), "VersionUnavailable")
    refused(world.say(DrainAgent(agent="nobody")), "AgentUnavailable")
    refused(world.say(Quota(nbytes=-1)), "BadCommand")
    refused(world.say(Unreadable("retain", "no command")), "BadCommand")


def test_a_publication_that_was_given_up_without_a_word_is_not_held_back_and_its_loss_is_told() -> None:
    """Its caller has the memory already, so the log must not go on counting on it."""
    world = retaining()
    by = world._shard_by("trainer", 0)
    events = world.say(Unpublish(by=by, model=MODEL, replica="trainer", shard=0, void=True))
    assert kinds(events) == ["shard.draining", "version.unavailable", "version.exposed"]
