"""Agents and their shards: registered and released, lost, back again with what they state, and forgotten."""

from collections.abc import Callable

import msgspec
import pytest
from tests.unit.common.catalog.scenes import holding, of, one, only, standing, two, two_lines

from tensorhub_common.catalog.handlers import membership
from tensorhub_common.catalog.handlers.membership import NEIGHBOURS_MAX
from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_common.catalog.state import LOST_KEPT_S, SPOT_KEPT_S
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log import codec, commands
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    RegistryLeads,
    ReplicaLost,
    ReplicaReady,
    ShardRegistered,
    Sibling,
    VersionGone,
)
from tensorhub_common.protocol.log.levels import Level
from tensorhub_simulator.drivers.catalog import (
    MODEL,
    CatalogDriver,
    decided,
    failed,
    kinds,
    reader_of_two,
    refused,
    root,
)


def copied() -> CatalogDriver:
    """Return 12 on a trainer and on a copy of it."""
    world = standing(trainer="a", copy="b", late="c")
    world.publish("trainer", 12)
    world.publish("copy", 12)
    return world


def published() -> CatalogDriver:
    world = one()
    world.publish("trainer", 12)
    return world


def test_a_shard_of_many_is_compared_with_its_neighbours_and_with_some_at_powers_of_two() -> None:
    """So the events of a replica of thousands of shards don't grow with each of them."""
    world, shards, mine = CatalogDriver(), 256, 128
    world.join("a")
    for index in range(shards):
        if index != mine:
            world.register("a", "trainer", index, shards)
    registered = only(world.register("a", "trainer", mine, shards), ShardRegistered)
    far = [*range(1, NEIGHBOURS_MAX + 1), 64]
    expected = sorted([0, *(mine - each for each in far), *(mine + each for each in far)])
    assert registered.siblings == tuple(Sibling(each, "L") for each in expected)
    again = only(world.register("a", "trainer", mine, shards), ShardRegistered)
    assert again.siblings == registered.siblings, "it is none of its own"


def test_the_largest_replica_has_events_that_fit_into_a_message() -> None:
    """Its siblings' layouts in one event, and the shards that are missing in another. The driver measures both."""
    world = CatalogDriver()
    world.join("a")
    world.register("a", "trainer", 0, commands.SHARDS_MAX, layout="0" * 64)
    members = world.replica("trainer").members
    for index in range(1, commands.SHARDS_MAX - 1):
        members[index] = type(members[0])(index, "a", f"{index:064x}", 64)
        world.catalog.agents["a"].shards[MODEL, "trainer", index] = None
    world.register("a", "trainer", commands.SHARDS_MAX - 1, commands.SHARDS_MAX, layout="f" * 64)
    world.want("trainer", "latest", 0)
    world.ready("trainer", 1, 1, digest="f" * 64)
    assert len(world.catalog.agents["a"].shards) == commands.SHARDS_MAX


@pytest.mark.parametrize("how", ["lost", "released"])
def test_a_shard_moves_once_its_agent_is_lost_or_it_is_released(how: str) -> None:
    world = one()
    world.join("b")
    assert kinds(world.expire("a") if how == "lost" else world.release("trainer"))
    assert kinds(world.register("b", "trainer", layout="K")) == ["shard.registered"]
    assert world.shard("trainer").agent == "b"


def test_an_agent_that_returns_learns_that_its_shard_has_moved() -> None:
    world = published()
    world.join("b")
    world.expire("a")
    world.register("b", "trainer")
    joined = only(world.join("a", holding(12, root(12))), AgentJoined)
    assert (joined.kept, joined.dropped) == ((), (holding(12, root(12)),))
    assert world.shard("trainer").agent == "b"


@pytest.mark.parametrize("bound", ["AGENTS_MAX", "MODELS_MAX", "REPLICAS_MAX"])
def test_what_exceeds_a_bound_is_refused_and_what_stands_may_come_again(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(membership, bound, 1)
    world = one()
    more = {
        "AGENTS_MAX": lambda: world.join("b"),
        "MODELS_MAX": lambda: world.register("a", "trainer", model="other"),
        "REPLICAS_MAX": lambda: world.register("a", "other"),
    }
    refused(more[bound](), "BadCommand")
    assert kinds(world.register("a", "trainer")) == ["shard.registered"]
    assert kinds(world.join("a", holding(None, None))) == ["agent.joined"]


def test_the_last_shard_that_is_released_takes_the_replica_along() -> None:
    world = one()
    assert kinds(world.release("trainer")) == ["shard.released"]
    assert (world.catalog.models[MODEL].replicas, world.catalog.agents["a"].shards) == ({}, {})
    assert kinds(world.register("a", "trainer", 0, 3)) == ["shard.registered"], "with another count"


@pytest.mark.parametrize("how", ["released", "lost"])
def test_a_shard_that_goes_before_the_decision_only_leaves_the_round(how: str) -> None:
    world = reader_of_two(published=None)
    world.want_all("engine")
    if how == "lost":
        assert "round.failed" not in kinds(world.expire("d"))
        world.publish("trainer", 1)
        world.join("d", world.holding("engine", 1))
    else:
        assert kinds(world.release("engine", 1)) == ["shard.released"]
        world.publish("trainer", 1)
        world.register("d", "engine", 1, 2)
    assert decided(world.want("engine", "latest", 1)).version == 1


def test_what_a_release_ends() -> None:
    """An offer, a round that counted on the shard, and a drain, whose readers the agent has ended before it says so."""
    world = two()
    world.ready("trainer", 12, 0)
    world.release("trainer", 0)
    assert world.replica("trainer").offers == {}
    world = reader_of_two()
    world.start("engine")
    assert kinds(world.release("engine", 1)) == ["shard.released", "round.failed"]
    assert world.states("engine") == ["empty"]
    world.unpublish("trainer")
    assert kinds(world.release("trainer")) == ["shard.released"]


def test_an_agent_that_is_lost_ends_its_replicas_and_the_versions_that_only_they_held() -> None:
    world = published()
    events = world.expire("a", term=3)
    assert kinds(events) == ["agent.lost", "replica.lost", "version.unavailable"]
    lost, replica = only(events, AgentLost), only(events, ReplicaLost)
    assert (lost.agent, lost.incarnation, lost.term) == ("a", 1, 3)
    assert (replica.replica, replica.agent, replica.version) == ("trainer", "a", 12)
    assert only(events, VersionGone).reason == "lost"
    assert world.states("trainer") == ["empty"]
    assert kinds(copied().expire("a")) == ["agent.lost", "replica.lost"], "a version outlives one of its holders"


@pytest.mark.parametrize(("agents", "states"), [("ab", ["empty", "ready"]), ("aa", ["empty", "empty"])])
def test_lost_shards_end_the_whole_replicas_version_and_it_is_told_once(agents: str, states: list[str]) -> None:
    world = standing(trainer=agents)
    world.publish("trainer", 12)
    assert kinds(world.expire("a")) == ["agent.lost", "replica.lost", "version.unavailable"]
    assert world.states("trainer") == states


def test_a_shard_that_was_filled_stays_ready_when_its_sibling_is_lost() -> None:
    world = reader_of_two()
    world.start("engine")
    world.filled("engine", 12, 0)
    assert "d" in failed(world.expire("d")).message
    assert world.states("engine") == ["ready", "empty"]


def test_a_root_that_the_log_knows_makes_a_lost_shard_ready_again() -> None:
    world = published()
    world.expire("a")
    events = world.join("a", holding(12, root(12)))
    assert kinds(events) == ["agent.joined", "version.available", "replica.ready"]
    ready = only(events, ReplicaReady)
    assert (ready.version, ready.round) == (12, None)
    assert world.catalog.agents["a"].state is AgentState.LIVE


def test_an_agent_that_restarts_with_its_memory_is_no_news() -> None:
    """Nothing flickers: readers of the version see neither its end nor its return."""
    world = published()
    joined = world.join("a", holding(11, "x"), holding(12, root(12)))
    assert kinds(joined) == ["agent.joined"]
    assert only(joined, AgentJoined).kept == (holding(12, root(12)),), "of a shard stated twice, the last word counts"
    assert world.replica("trainer").version == 12


def test_an_agent_that_restarts_without_its_memory_loses_the_replica() -> None:
    world = copied()
    joined, lost = world.join("a", holding(None, None))
    assert isinstance(joined, AgentJoined)
    assert isinstance(lost, ReplicaLost)
    assert (lost.replica, lost.agent, lost.version) == ("trainer", "a", 12)
    (gone,) = of(world.join("b", holding(None, None, replica="copy")), VersionGone)
    assert (gone.version, gone.reason) == (12, "lost"), 'not in good order: who reads "latest" must not just go on'


@pytest.mark.parametrize(
    ("version", "digest"),
    [(12, "other"), (11, root(12)), (13, root(12)), (12, None), (None, root(12)), (10**30, root(12))],
)
def test_what_the_log_can_not_vouch_for_is_not_believed(version: int | None, digest: str | None) -> None:
    world = published()
    world.expire("a")
    joined = only(world.join("a", holding(version, digest)), AgentJoined)
    assert world.states("trainer") == ["empty"]
    assert joined.kept == (holding(None, None),), "the agent must learn what the log believes"


def test_a_shard_that_a_returning_agent_does_not_state_is_gone_and_one_that_nobody_knows_is_dropped() -> None:
    world = published()
    joined = only(world.join("a", holding(12, root(12), replica="nobody")), AgentJoined)
    assert [each.replica for each in joined.dropped] == ["nobody"]
    assert world.catalog.models[MODEL].replicas == {}


def test_an_agent_that_returns_is_believed_what_it_may_still_hold_and_wakes_the_rounds_that_waited_for_it() -> None:
    """`replica.lost` was said, so whoever follows the events must learn of the return, also of a version that stood."""
    world = copied()
    world.expire("a")
    assert kinds(world.join("a", holding(12, root(12)))) == ["agent.joined", "replica.ready"]
    world.publish("late", 13)
    world.join("a", holding(12, root(12)))
    assert world.replica("trainer").version == 12, "an older one that the log keeps"
    world.unpublish("trainer")
    world.join("a", holding(12, root(12)))
    assert world.replica("trainer").version == 12, "its unpublish has not returned, so nothing was overwritten"
    assert kinds(world.register("a", "trainer")) == ["shard.registered"]
    assert world.replica("trainer").version == 12, "a worker comes back to it, and the memory stays"
    world = one()
    world.ready("trainer", 12, digest=commands.NO_ROOT)
    world.join("a", holding(12, commands.NO_ROOT))
    assert world.replica("trainer").version == 12, "without digests its own agent vouches for it"
    world.replica_of("engine", "b")
    world.expire("a")
    world.want("engine", "latest")
    assert decided(world.join("a", holding(12, commands.NO_ROOT))).version == 12


@pytest.mark.parametrize("granted", [False, True])
def test_an_agent_that_restarts_in_a_decided_round_fails_it_for_all(*, granted: bool) -> None:
    world = reader_of_two()
    world.want_all("engine")
    if granted:
        world.granted("engine", 0)
    assert "began anew" in failed(world.join("d", world.holding("engine", 1))).message


def test_an_agent_may_return_on_another_host_in_another_rack_or_in_none_that_is_known() -> None:
    world = one()
    assert world.catalog.agents["a"].rack == "", "an agent that names no rack"
    events = world.say(commands.Join(by=commands.Sender("a", 2, 1), host="elsewhere", site="far", rack="r07"))
    agent = world.catalog.agents["a"]
    assert (agent.host, agent.site, agent.rack, of(events, AgentJoined)[0].rack) == ("elsewhere", "far", "r07", "r07")
    world.say(commands.Join(by=commands.Sender("a", 3, 1), host="h", site="s"))
    assert world.catalog.agents["a"].rack == ""


def test_an_agent_that_returns_with_a_retired_version_is_not_believed() -> None:
    world = two_lines()
    world.say(commands.Rewind(model=MODEL, to=8))
    retired = world.holding("trainer")
    assert retired.version == 9
    world.join("a", retired)
    assert world.states("trainer") == ["empty"]
    assert 9 not in world.catalog.models[MODEL].versions


STEP_S = 2
"""So much later the next command is."""


def lost(waits_s: float, *, spot: bool = True) -> CatalogDriver:
    """Return a trainer, and an engine on two agents of which one was lost so long ago."""
    world = one()
    world.replica_of("engine", "b", "c", spot=spot)
    world.publish("trainer", 1)
    world.fetch("engine")
    world.expire("b")
    assert world.catalog.agents["b"].lost_at == world.catalog.time
    world.catalog.agents["b"].lost_at -= waits_s
    return world


@pytest.mark.parametrize(("spot", "kept_s"), [(False, LOST_KEPT_S), (True, SPOT_KEPT_S)])
def test_once_its_time_is_over_nothing_of_it_is_left(*, spot: bool, kept_s: float) -> None:
    world = lost(kept_s - 60, spot=spot)
    assert refused(world.forget("b"), "BadCommand").message.endswith(f"and is remembered for {kept_s:.0f} s: wait")
    world.join("b")
    assert world.catalog.agents["b"].lost_at == 0.0
    world = lost(kept_s - STEP_S, spot=spot)
    assert kinds(world.forget("b")) == ["agent.forgotten", "shard.released"]
    assert "b" not in world.catalog.agents
    assert list(world.replica("engine").members) == [1]
    assert not [lane for lane in world.catalog.lanes if lane.partition("/")[0] == "b"]
    assert kinds(world.join("b")) == ["agent.joined"], "its name begins anew"
    assert kinds(world.register("b", "engine", 0, 2, spot=spot)) == ["shard.registered"]


def test_a_replica_of_which_nothing_is_left_goes_with_it() -> None:
    world = lost(SPOT_KEPT_S)
    world.expire("c")
    world.catalog.agents["c"].lost_at -= SPOT_KEPT_S
    world.forget("b")
    world.forget("c")
    assert list(world.catalog.models[MODEL].replicas) == ["trainer"]
    assert list(world.catalog.agents) == ["a"]


def test_siblings_that_wait_for_it_are_told() -> None:
    """One that has joined a round goes on waiting for all shards; whoever brings the one that went ends that."""
    world = lost(SPOT_KEPT_S)
    world.want("engine", "latest", 1)
    world.forget("b")
    assert world.replica("engine").round is not None
    world.join("d")
    world.register("d", "engine", 0, 2, spot=True)
    assert kinds(world.want("engine", "latest", 0)) == ["round.joined", "round.decided"]


def test_below_the_level_there_is_no_such_command_and_all_stay() -> None:
    world = CatalogDriver(level=Level.WAKING_ONCE)
    world.replica_of("trainer", "a")
    world.expire("a")
    assert world.catalog.agents["a"].lost_at == 0.0
    said = commands.ForgetAgent(by=commands.Sender("_registry", 1, 999), agent="a", incarnation=1, term=1)
    unknown = codec.decode_command("forget_agent", "_registry", codec.encode(said), Level.WAKING_ONCE)
    assert isinstance(unknown, commands.Unreadable)
    refused(world.say(unknown), "BadCommand")
    world.join("b")
    lead = commands.Lead(by=commands.Sender("_registry", 9, 0), registry="r-9", term=9, level=Level.FORGETTING)
    assert only(world.say(lead), RegistryLeads).level == Level.FORGETTING
    since = world.catalog.time
    world.say(msgspec.structs.replace(lead, by=commands.Sender("_registry", 10, 0), term=10))
    assert world.catalog.agents["a"].lost_at == since, "it has all of its time from where that began"
    assert world.catalog.agents["b"].lost_at == 0.0, "it lives"
    world.expire("b", term=10)
    assert world.catalog.agents["b"].lost_at == world.catalog.time
    world.catalog.agents["a"].lost_at -= LOST_KEPT_S
    world.forget("a", term=10)
    assert list(world.catalog.agents) == ["b"]


def test_a_snapshot_keeps_when_it_was_lost() -> None:
    world = lost(10)
    again = decode("run-7", encode(Snapshot(world.catalog.seq, 1.0, world.catalog)))
    assert again.catalog.agents["b"].lost_at == world.catalog.agents["b"].lost_at > 0
    assert msgspec.to_builtins(again.catalog) == msgspec.to_builtins(world.catalog)


def test_register_never_waits_for_other_shards_and_learns_which_layouts_they_have() -> None:
    world = CatalogDriver()
    world.join("a")
    first = only(world.register("a", "trainer", 1, 2), ShardRegistered)
    assert (first.shards, first.agent, first.siblings) == (2, "a", ())
    second = only(world.register("a", "trainer", 0, 2), ShardRegistered)
    assert second.siblings == (Sibling(1, "L"),)
    assert kinds(world.register("a", "copy", layout="K")) == ["shard.registered"], "another replica, another layout"


@pytest.mark.parametrize("state", ["offered", "draining", "joined", "decided", "filling", "filled"])
def test_an_agent_may_be_lost_in_any_state_of_its_shard(state: str) -> None:
    world = reader_of_two()
    agent, replica = ("a", "trainer") if state == "draining" else ("c", "engine")
    steps: dict[str, list[Callable[[], object]]] = {
        "offered": [lambda: world.ready("engine", 13, 0)],
        "draining": [lambda: world.unpublish("trainer", 0)],
        "joined": [lambda: world.want("engine", "latest", 0)],
        "decided": [lambda: world.want_all("engine")],
        "filling": [lambda: world.start("engine")],
        "filled": [lambda: world.start("engine"), lambda: world.filled("engine", 12, 0)],
    }
    for step in steps[state]:
        step()
    assert ("round.failed" in kinds(world.expire(agent))) == (state not in ("offered", "draining"))
    assert world.states(replica)[0] == "empty"
    assert (world.replica(replica).round, world.replica(replica).offers) == (None, {})
