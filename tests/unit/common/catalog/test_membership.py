"""Shards that are registered and released, and agents that are lost, in the fold."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, decided, failed, kinds, reader_of_two, refused, root

from tensorhub_common.catalog.handlers.membership import NEIGHBOURS_MAX
from tensorhub_common.protocol.log.commands import (
    SHARDS_MAX,
    Drained,
    HeldShard,
    Register,
    Release,
    Sender,
    Unpublish,
    Withdraw,
)
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    ReplicaLost,
    RoundFailed,
    ShardRegistered,
    ShardReleased,
    Sibling,
    VersionGone,
)


def holding(version: int | None, digest: str | None, *, replica: str = "trainer", shard: int = 0) -> HeldShard:
    return HeldShard(model=MODEL, replica=replica, shard=shard, version=version, root=digest)


@pytest.fixture
def one() -> World:
    """A trainer of one shard on agent a."""
    world = World()
    world.replica_of("trainer", "a")
    return world


# ------------------------------------------------------------------------------------------------------------- register


def test_register_never_waits_for_other_shards() -> None:
    world = World()
    world.join("a")
    (registered,) = world.register("a", "trainer", 1, 2)
    assert isinstance(registered, ShardRegistered)
    assert (registered.shards, registered.agent, registered.siblings) == (2, "a", ())


def test_a_shard_learns_which_layouts_its_siblings_have() -> None:
    world = World()
    world.replica_of("trainer", "a", "b")
    world.join("c")
    (registered,) = world.register("a", "trainer", 0, 2)
    assert isinstance(registered, ShardRegistered)
    assert registered.siblings == (Sibling(1, "L"),)


def test_a_shard_of_many_is_compared_with_its_neighbours_and_with_some_at_powers_of_two() -> None:
    """So the events of a replica of thousands of shards don't grow with each of them."""
    world, shards, mine = World(), 256, 128
    world.join("a")
    for index in range(shards):
        if index != mine:
            world.register("a", "trainer", index, shards)
    (registered,) = world.register("a", "trainer", mine, shards)
    assert isinstance(registered, ShardRegistered)
    far = {abs(sibling.shard - mine) for sibling in registered.siblings}
    assert far == {*range(1, NEIGHBOURS_MAX + 1), 64, 128}


def test_what_older_incarnations_lanes_have_said_is_forgotten_when_the_agent_joins_again() -> None:
    world = World()
    for name in ("a", "a-b", "b"):
        world.join(name)
        world.register(name, name)
    lanes = set(world.catalog.lanes)
    assert any(lane.startswith("a/") or lane == "a" for lane in lanes)
    world.join("a", incarnation=2)
    assert {lane for lane, last in world.catalog.lanes.items() if last.incarnation == 1} == {
        lane for lane in lanes if lane.partition("/")[0] != "a"
    }


@pytest.mark.parametrize(("shards", "spot", "layout"), [(2, False, "L"), (1, True, "L"), (1, False, "K")])
def test_another_layout_or_shard_count_than_before_is_a_mismatch(
    one: World, shards: int, *, spot: bool, layout: str
) -> None:
    refused(one.register("a", "trainer", 0, shards, spot=spot, layout=layout), "LayoutMismatch")


def test_another_shard_count_than_its_siblings_is_a_mismatch(one: World) -> None:
    one.join("b")
    refused(one.register("b", "trainer", 1, 2), "LayoutMismatch")


def test_other_replicas_may_have_other_layouts(one: World) -> None:
    assert kinds(one.register("a", "copy", layout="K")) == ["shard.registered"]


@pytest.mark.parametrize(("shard", "shards"), [(-1, 1), (1, 1), (0, 0), (0, -1), (0, SHARDS_MAX + 1)])
def test_a_shard_out_of_range_is_refused(one: World, shard: int, shards: int) -> None:
    refused(one.register("a", "copy", shard, shards), "LayoutMismatch")


@pytest.mark.parametrize("name", ["", "_x", "a.b", "x" * 65, "ü", "*"])
def test_names_that_can_not_stand_in_a_subject_are_refused(one: World, name: str) -> None:
    refused(one.register("a", name), "InvalidName")
    refused(one.register("a", "trainer", model=name), "InvalidName")


@pytest.mark.parametrize("layout", ["", "x" * 65, "\x00" * 60, "ü", "a b"])
def test_a_layout_that_is_no_digest_is_refused(one: World, layout: str) -> None:
    """An event names the layouts of up to 4,096 siblings, so each must be short."""
    refused(one.register("a", "copy", layout=layout), "BadCommand")


@pytest.mark.parametrize("nbytes", [-1, 10**30])
def test_a_size_out_of_range_is_refused(one: World, nbytes: int) -> None:
    by = Sender("a/9", 1, 1)
    register = Register(by=by, model=MODEL, replica="copy", shard=0, shards=1, layout="L", nbytes=nbytes)
    refused(one.say(register), "BadCommand")


def test_a_worker_comes_back_to_a_ready_shard_and_the_memory_stays(one: World) -> None:
    one.publish("trainer", 12)
    assert kinds(one.register("a", "trainer")) == ["shard.registered"]
    assert one.replica("trainer").version == 12


def test_a_shard_on_another_live_agent_can_not_be_taken(one: World) -> None:
    one.join("b")
    refused(one.register("b", "trainer"), "ReplicaConflict")


def test_a_shard_moves_once_its_agent_is_lost(one: World) -> None:
    one.join("b")
    one.expire("a")
    assert kinds(one.register("b", "trainer", layout="K")) == ["shard.registered"]
    assert one.shard("trainer").agent == "b"


def test_a_shard_moves_once_it_is_released(one: World) -> None:
    one.join("b")
    one.release("trainer")
    assert kinds(one.register("b", "trainer")) == ["shard.registered"]


def test_an_agent_that_returns_learns_that_its_shard_has_moved(one: World) -> None:
    one.publish("trainer", 12)
    one.join("b")
    one.expire("a")
    one.register("b", "trainer")
    (joined,) = one.join("a", holding(12, root(12)))
    assert isinstance(joined, AgentJoined)
    assert (joined.kept, joined.dropped) == ((), (holding(12, root(12)),))
    assert one.shard("trainer").agent == "b"


def test_an_agent_that_has_not_joined_can_not_register() -> None:
    world = World()
    by = Sender("a/0", 1, 1)
    register = Register(by=by, model=MODEL, replica="trainer", shard=0, shards=1, layout="L", nbytes=1)
    refused(world.say(register), "StaleSender")
    assert world.catalog.models == {}


# -------------------------------------------------------------------------------------------------------------- release


def test_the_last_shard_that_is_released_takes_the_replica_along(one: World) -> None:
    (released,) = one.release("trainer")
    assert isinstance(released, ShardReleased)
    assert one.catalog.models[MODEL].replicas == {}
    assert one.catalog.agents["a"].shards == {}


def test_a_replica_that_is_gone_may_come_again_with_another_count(one: World) -> None:
    one.release("trainer")
    assert kinds(one.register("a", "trainer", 0, 3)) == ["shard.registered"]


def test_a_published_shard_must_be_unpublished_before_its_release(one: World) -> None:
    one.publish("trainer", 12)
    refused(one.release("trainer"), "ReplicaConflict")


def test_a_draining_shard_may_be_released(one: World) -> None:
    """The agent has ended its readers before it says so."""
    one.publish("trainer", 12)
    one.unpublish("trainer")
    assert kinds(one.release("trainer")) == ["shard.released"]


def test_a_release_fails_the_round_that_counted_on_the_shard() -> None:
    world = reader_of_two()
    world.start("engine")
    assert kinds(world.release("engine", 1)) == ["shard.released", "round.failed"]
    assert world.states("engine") == ["empty"]


def test_a_release_before_the_decision_takes_only_that_shard_out_of_the_round() -> None:
    world = reader_of_two(published=None)
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    assert kinds(world.release("engine", 1)) == ["shard.released"]
    world.publish("trainer", 1)
    world.register("d", "engine", 1, 2)
    assert decided(world.want("engine", "latest", 1)).version == 1


def test_a_release_takes_an_offer_back() -> None:
    world = World()
    world.replica_of("trainer", "a", "b")
    world.ready("trainer", 12, 0)
    world.release("trainer", 0)
    assert world.replica("trainer").offers == {}


@pytest.mark.parametrize("kind", [Release, Unpublish, Withdraw, Drained])
def test_a_shard_of_another_agent_can_not_be_spoken_for(
    one: World, kind: type[Release | Unpublish | Withdraw | Drained]
) -> None:
    one.join("b")
    refused(one.say(kind(by=one.by("b", 0), model=MODEL, replica="trainer", shard=0)), "BadCommand")


# ----------------------------------------------------------------------------------------------------------- being lost


def test_an_agent_that_is_lost_ends_its_replicas_and_the_versions_that_only_they_held(one: World) -> None:
    one.publish("trainer", 12)
    lost, replica, gone = one.expire("a", term=3)
    assert isinstance(lost, AgentLost)
    assert (lost.agent, lost.incarnation, lost.term) == ("a", 1, 3)
    assert isinstance(replica, ReplicaLost)
    assert (replica.replica, replica.agent, replica.version) == ("trainer", "a", 12)
    assert isinstance(gone, VersionGone)
    assert gone.reason == "lost"
    assert one.states("trainer") == ["empty"]


def test_a_version_outlives_one_of_its_holders(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    one.publish("copy", 12)
    assert kinds(one.expire("a")) == ["agent.lost", "replica.lost"]


def test_one_lost_shard_ends_the_whole_replicas_version() -> None:
    world = reader_of_two()
    assert kinds(world.expire("a")) == ["agent.lost", "replica.lost", "version.unavailable"]
    assert world.states("trainer") == ["empty", "ready"]


def test_a_replica_with_two_shards_on_the_lost_agent_is_told_once() -> None:
    world = World()
    world.replica_of("trainer", "a", "a")
    world.publish("trainer", 12)
    assert kinds(world.expire("a")) == ["agent.lost", "replica.lost", "version.unavailable"]


@pytest.mark.parametrize("state", ["offered", "draining", "joined", "decided", "filling", "filled"])
def test_an_agent_may_be_lost_in_any_state_of_its_shard(state: str) -> None:
    world = reader_of_two()
    if state == "offered":
        world.ready("engine", 13, 0)
    elif state == "draining":
        world.unpublish("trainer", 0)
    else:
        world.want("engine", "latest", 0)
    if state in ("decided", "filling", "filled"):
        world.want("engine", "latest", 1)
    if state in ("filling", "filled"):
        world.granted("engine", 0)
        world.granted("engine", 1)
    if state == "filled":
        world.filled("engine", 12, 0)
    agent = "a" if state == "draining" else "c"
    events = world.expire(agent)
    assert ("round.failed" in kinds(events)) == (state in ("joined", "decided", "filling", "filled"))
    replica = "trainer" if state == "draining" else "engine"
    assert world.states(replica)[0] == "empty"
    assert world.replica(replica).round is None
    assert world.replica(replica).offers == {}


def test_a_shard_that_is_lost_before_the_decision_only_leaves_the_round() -> None:
    world = reader_of_two(published=None)
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    assert "round.failed" not in kinds(world.expire("d"))
    world.publish("trainer", 1)
    world.join("d", world.holding("engine", 1))
    assert decided(world.want("engine", "latest", 1)).version == 1


def test_a_shard_that_was_filled_stays_ready_when_its_sibling_is_lost() -> None:
    world = reader_of_two()
    world.start("engine")
    world.filled("engine", 12, 0)
    assert "d" in failed(world.expire("d")).message
    assert world.states("engine") == ["ready", "empty"]


def test_the_loss_of_a_source_leaves_the_readers_round_alone() -> None:
    """The reader finds other sources, or gives up: that is its own word."""
    world = reader_of_two()
    world.start("engine")
    assert not any(isinstance(event, RoundFailed) for event in world.expire("a"))
    world.filled("engine", 12, 0)
    assert kinds(world.filled("engine", 12, 1)) == ["shard.filled", "version.available", "replica.ready"]
