"""Unpublishing in the fold, sentence by sentence of the design."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, kinds, refused, root

from tensorhub_common.catalog.transitions import ShardState
from tensorhub_common.protocol.log.commands import Ready
from tensorhub_common.protocol.log.events import ShardDraining, VersionGone
from tensorhub_common.protocol.queries import VersionState


@pytest.fixture
def one() -> World:
    """A trainer of one shard."""
    world = World()
    world.replica_of("trainer", "a")
    return world


@pytest.fixture
def two() -> World:
    """A trainer of two shards on two agents."""
    world = World()
    world.replica_of("trainer", "a", "b")
    return world


# ------------------------------------------------------------------------------------------------------------ unpublish


def test_unpublish_ends_the_version_and_the_memory_is_free_only_when_drained(one: World) -> None:
    one.publish("trainer", 12)
    draining, gone = one.unpublish("trainer")
    assert isinstance(draining, ShardDraining)
    assert isinstance(gone, VersionGone)
    assert gone.reason == "unpublished"
    assert one.states("trainer") == ["draining"]
    assert kinds(one.drained("trainer")) == ["shard.drained"]
    assert one.states("trainer") == ["empty"]


def test_a_version_stays_available_while_another_replica_holds_it(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    one.publish("copy", 12)
    assert kinds(one.unpublish("trainer")) == ["shard.draining"]
    assert one.catalog.models[MODEL].versions[12].state is VersionState.AVAILABLE


def test_one_shard_that_leaves_ends_the_whole_replicas_version(two: World) -> None:
    two.publish("trainer", 12)
    assert kinds(two.unpublish("trainer", 1)) == ["shard.draining", "version.unavailable"]
    assert two.states("trainer") == ["ready", "draining"]
    assert kinds(two.unpublish("trainer", 0)) == ["shard.draining"]


def test_nothing_published_is_said_so(one: World) -> None:
    refused(one.unpublish("trainer"), "NotPublished")
    refused(one.drained("trainer"), "NotPublished")


def test_a_repeated_unpublish_of_a_draining_shard_is_refused_and_leaves_it_draining(one: World) -> None:
    one.publish("trainer", 12)
    one.unpublish("trainer")
    refused(one.unpublish("trainer"), "NotPublished")
    assert one.shard("trainer").state is ShardState.DRAINING


@pytest.mark.parametrize("version", [12, 13])
def test_a_draining_shard_can_not_be_published(one: World, version: int) -> None:
    one.publish("trainer", 12)
    one.unpublish("trainer")
    refused(one.ready("trainer", version), "ReplicaConflict")


def test_a_shard_in_a_round_can_not_be_unpublished(one: World) -> None:
    one.publish("trainer", 12)
    one.want("trainer", "newer")
    refused(one.unpublish("trainer"), "ReplicaConflict")


def test_an_unpublished_version_may_be_published_again_with_the_same_bytes(one: World) -> None:
    one.publish("trainer", 12)
    one.empty("trainer")
    assert kinds(one.publish("trainer", 12)) == ["version.available", "replica.ready"]


def test_a_late_offer_of_an_old_lane_word_publishes_nothing(one: World) -> None:
    """A `Ready` that was lost and comes after its withdrawal is older than the lane's last word."""
    late = Ready(by=one.by("a", 0), model=MODEL, replica="trainer", shard=0, version=12, root=root(12))
    refused(one.withdraw("trainer"), "NotPublished")
    assert "too late" in refused(one.say(late), "BadCommand").message
