"""Agents that come back, in the fold: what they state is believed where the log vouches for it."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, decided, failed, kinds, reader_of_two, refused, root

from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.commands import NO_ROOT, HeldShard, Join, Rewind, Sender
from tensorhub_common.protocol.log.events import AgentJoined, ReplicaLost, ReplicaReady, VersionGone


def holding(version: int | None, digest: str | None, *, replica: str = "trainer", shard: int = 0) -> HeldShard:
    return HeldShard(model=MODEL, replica=replica, shard=shard, version=version, root=digest)


@pytest.fixture
def one() -> World:
    """A trainer of one shard on agent a."""
    world = World()
    world.replica_of("trainer", "a")
    return world


# ---------------------------------------------------------------------------------------------------------- coming back


def test_a_root_that_the_log_knows_makes_a_lost_shard_ready_again(one: World) -> None:
    one.publish("trainer", 12)
    one.expire("a")
    events = one.join("a", holding(12, root(12)))
    assert kinds(events) == ["agent.joined", "version.available", "replica.ready"]
    assert isinstance(events[-1], ReplicaReady)
    assert (events[-1].version, events[-1].round) == (12, None)
    assert one.catalog.agents["a"].state is AgentState.LIVE


def test_a_replica_that_returns_is_told_though_its_version_never_went(one: World) -> None:
    """`replica.lost` was said, so whoever follows the events must learn of the return."""
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    one.publish("copy", 12)
    one.expire("a")
    assert kinds(one.join("a", holding(12, root(12)))) == ["agent.joined", "replica.ready"]


def test_an_agent_that_restarts_with_its_memory_is_no_news(one: World) -> None:
    """Nothing flickers: readers of the version see neither its end nor its return."""
    one.publish("trainer", 12)
    assert kinds(one.join("a", holding(12, root(12)))) == ["agent.joined"]
    assert one.replica("trainer").version == 12


def test_an_agent_that_restarts_without_its_memory_loses_the_replica(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    one.publish("copy", 12)
    joined, lost = one.join("a", holding(None, None))
    assert isinstance(joined, AgentJoined)
    assert isinstance(lost, ReplicaLost)
    assert (lost.replica, lost.agent, lost.version) == ("trainer", "a", 12)


@pytest.mark.parametrize(
    ("version", "digest"),
    [(12, "other"), (11, root(12)), (13, root(12)), (12, None), (None, root(12)), (10**30, root(12))],
)
def test_what_the_log_can_not_vouch_for_is_not_believed(one: World, version: int | None, digest: str | None) -> None:
    one.publish("trainer", 12)
    one.expire("a")
    (joined,) = one.join("a", holding(version, digest))
    assert isinstance(joined, AgentJoined)
    assert one.states("trainer") == ["empty"]
    assert joined.kept == (holding(None, None),), "the agent must learn what the log believes"


def test_an_agent_learns_that_it_was_believed(one: World) -> None:
    one.publish("trainer", 12)
    (joined,) = one.join("a", holding(12, root(12)))
    assert isinstance(joined, AgentJoined)
    assert joined.kept == (holding(12, root(12)),)


def test_an_older_version_that_the_log_keeps_is_believed(one: World) -> None:
    one.replica_of("other", "b")
    one.publish("trainer", 12)
    one.publish("other", 13)
    one.expire("a")
    one.join("a", holding(12, root(12)))
    assert one.replica("trainer").version == 12


def test_a_shard_that_a_returning_agent_does_not_state_is_gone(one: World) -> None:
    one.publish("trainer", 12)
    one.join("a")
    assert one.catalog.models[MODEL].replicas == {}


def test_a_shard_that_was_never_registered_is_dropped(one: World) -> None:
    (joined,) = one.join("a", holding(None, None), holding(12, root(12), replica="nobody"))
    assert isinstance(joined, AgentJoined)
    assert [each.replica for each in joined.dropped] == ["nobody"]


def test_of_a_shard_that_is_stated_twice_the_last_word_counts_once(one: World) -> None:
    one.publish("trainer", 12)
    (joined, *_) = one.join("a", holding(11, "x"), holding(12, root(12)))
    assert isinstance(joined, AgentJoined)
    assert joined.kept == (holding(12, root(12)),)


def test_a_return_wakes_the_rounds_that_waited_for_the_version(one: World) -> None:
    one.replica_of("engine", "b")
    one.publish("trainer", 12)
    one.expire("a")
    one.want("engine", "latest")
    assert decided(one.join("a", holding(12, root(12)))).version == 12


@pytest.mark.parametrize("granted", [False, True])
def test_an_agent_that_restarts_in_a_decided_round_fails_it_for_all(*, granted: bool) -> None:
    world = reader_of_two()
    for shard in (0, 1):
        world.want("engine", "latest", shard)
    if granted:
        world.granted("engine", 0)
    assert "began anew" in failed(world.join("d", world.holding("engine", 1))).message


def test_a_draining_shard_that_is_restated_is_ready_again(one: World) -> None:
    """Its unpublish has not returned, so that nothing was overwritten; an agent that has drained states nothing."""
    one.publish("trainer", 12)
    one.unpublish("trainer")
    one.join("a", holding(12, root(12)))
    assert one.replica("trainer").version == 12


@pytest.mark.parametrize("host", ["", "a.b", "_x", "x" * 65])
def test_a_host_or_site_that_is_no_name_is_refused(one: World, host: str) -> None:
    refused(one.say(Join(by=Sender("b", 1, 1), host=host, site="s")), "InvalidName")
    refused(one.say(Join(by=Sender("b", 1, 2), host="h", site=host)), "InvalidName")
    assert "b" not in one.catalog.agents


def test_an_agent_may_return_on_another_host(one: World) -> None:
    one.say(Join(by=Sender("a", 2, 1), host="elsewhere", site="far", holds=(holding(None, None),)))
    assert (one.catalog.agents["a"].host, one.catalog.agents["a"].site) == ("elsewhere", "far")


def test_an_agent_may_return_in_another_rack_or_in_none_that_is_known(one: World) -> None:
    assert one.catalog.agents["a"].rack == "", "an agent that names no rack"
    [joined] = one.say(Join(by=Sender("a", 2, 1), host="h", site="s", rack="r07"))[:1]
    assert isinstance(joined, AgentJoined)
    assert joined.rack == one.catalog.agents["a"].rack == "r07"
    one.say(Join(by=Sender("a", 3, 1), host="h", site="s"))
    assert one.catalog.agents["a"].rack == ""


def test_a_version_without_digests_is_believed_by_its_own_agent(one: World) -> None:
    one.ready("trainer", 12, digest=NO_ROOT)
    one.join("a", holding(12, NO_ROOT))
    assert one.replica("trainer").version == 12


def test_an_agent_that_returns_with_a_retired_version_is_not_believed() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    world.publish("trainer", 8)
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 9)
    world.say(Rewind(model=MODEL, to=8))
    retired = world.holding("trainer")
    assert retired.version == 9
    world.join("a", retired)
    assert world.states("trainer") == ["empty"]
    assert 9 not in world.catalog.models[MODEL].versions


def test_a_version_whose_holder_began_anew_without_it_is_lost() -> None:
    """Not given up in good order: who reads it with "latest" must not go on as if it had been."""
    world = World()
    world.replica_of("trainer", "a")
    world.publish("trainer", 8)
    kept = HeldShard(model=MODEL, replica="trainer", shard=0)
    gone = [event for event in world.join("a", kept) if isinstance(event, VersionGone)]
    assert [(event.version, event.reason) for event in gone] == [(8, "lost")]
