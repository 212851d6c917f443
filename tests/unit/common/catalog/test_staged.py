"""Staged fills in the fold: the old version stands until every shard is filled, and all swap in one command."""

import pytest
from tests.unit.common.catalog.catalog_world import World, failed, kinds, reader_of_two, refused, root

from tensorhub_common.errors import IntegrityError
from tensorhub_common.protocol.log.events import ReplicaReady, RoundSettled, VersionGone


def staged_over_twelve(*staged: int) -> World:
    """An engine that holds 12 reads 13; these of its two shards are staged."""
    world = reader_of_two()
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    for shard in (0, 1):
        world.want("engine", "newer", shard, staged=shard in staged)
    return world


def test_the_old_version_stands_while_the_new_one_is_filled_beside_it() -> None:
    world = staged_over_twelve(0, 1)
    world.granted("engine", 0)
    assert kinds(world.granted("engine", 1)) == ["round.started"]
    assert world.states("engine") == ["ready", "ready"]
    assert kinds(world.filled("engine", 13, 0)) == ["shard.filled"]
    assert world.replica("engine").version == 12
    assert [shard.version for shard in world.replica("engine").members.values()] == [12, 12]


def test_all_shards_swap_when_the_last_is_filled() -> None:
    world = staged_over_twelve(0, 1)
    grant_all(world)
    world.filled("engine", 13, 0)
    events = world.filled("engine", 13, 1)
    assert kinds(events) == ["shard.filled", "version.unavailable", "replica.ready"]
    assert isinstance(events[-1], ReplicaReady)
    assert isinstance(events[1], VersionGone)
    assert (events[1].version, events[1].reason) == (12, "replaced")
    assert [shard.version for shard in world.replica("engine").members.values()] == [13, 13]
    assert [shard.root for shard in world.replica("engine").members.values()] == [root(13, 0), root(13, 1)]


def grant_all(world: World) -> None:
    for shard in (0, 1):
        world.granted("engine", shard)


@pytest.mark.parametrize("filled", [0, 1])
def test_a_round_that_fails_leaves_the_old_version_untouched(filled: int) -> None:
    world = staged_over_twelve(0, 1)
    grant_all(world)
    world.filled("engine", 13, filled)
    assert failed(world.give_up("engine", 1 - filled)).error == "RoundTimeout"
    assert world.replica("engine").version == 12
    assert world.catalog.models["policy"].versions[12].holders == 1


def test_a_sibling_in_place_is_overwritten_and_a_staged_shard_is_not() -> None:
    world = staged_over_twelve(0)
    grant_all(world)
    assert world.states("engine") == ["ready", "filling"]
    world.filled("engine", 13, 0)
    assert world.states("engine") == ["ready", "filling"]
    assert isinstance(world.filled("engine", 13, 1)[-1], ReplicaReady)
    assert world.replica("engine").version == 13


def test_an_empty_shard_is_filled_beside_too_and_holds_nothing_before_the_end() -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard, staged=True)
    grant_all(world)
    world.filled("engine", 12, 0)
    assert world.states("engine") == ["empty", "empty"]
    world.filled("engine", 12, 1)
    assert world.states("engine") == ["ready", "ready"]


def test_wrong_bytes_are_refused_beside_too() -> None:
    world = staged_over_twelve(0, 1)
    grant_all(world)
    refused(world.filled("engine", 13, 0, digest=root(12, 0)), IntegrityError.__name__)
    world.filled("engine", 13, 1)
    assert world.replica("engine").version == 12


def test_a_shard_is_staged_only_once_in_a_round() -> None:
    world = staged_over_twelve(0, 1)
    grant_all(world)
    world.filled("engine", 13, 0)
    refused(world.filled("engine", 13, 0), "BadCommand")


def test_a_source_that_goes_in_good_order_lets_a_staged_engine_go_on_with_what_it_has() -> None:
    """Nothing was overwritten, so None is an answer still."""
    world = staged_over_twelve(0, 1)
    grant_all(world)
    world.empty("trainer")
    events = world.give_up_attempt("engine", 0, 1)
    assert kinds(events) == ["round.reopened"]
    assert isinstance(world.settle("engine", 1)[-1], RoundSettled)
    assert world.replica("engine").version == 12
