"""Agents that were lost long ago are forgotten, with what they had, on the leader's word."""

import msgspec
import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, kinds, refused

from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_common.catalog.state import LOST_KEPT_S, SPOT_KEPT_S
from tensorhub_common.protocol.log.codec import decode_command
from tensorhub_common.protocol.log.codec import encode as encode_command
from tensorhub_common.protocol.log.commands import ForgetAgent, Lead, Sender, Unreadable
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level


def lost(*, spot: bool, waits_s: float) -> World:
    """Return a trainer, and an engine on two agents of which one was lost so long ago."""
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b", "c", spot=spot)
    world.publish("trainer", 1)
    world.fetch("engine")
    world.expire("b")
    world.catalog.agents["b"].lost_at -= waits_s
    return world


@pytest.mark.parametrize(("spot", "kept_s"), [(False, LOST_KEPT_S), (True, SPOT_KEPT_S)])
def test_once_its_time_is_over_nothing_of_it_is_left(spot: bool, kept_s: float) -> None:  # noqa: FBT001 (pytest's own form)
    world = lost(spot=spot, waits_s=kept_s)
    assert kinds(world.forget("b")) == ["agent.forgotten", "shard.released"]
    assert "b" not in world.catalog.agents
    assert list(world.replica("engine").members) == [1]
    assert not [lane for lane in world.catalog.lanes if lane.partition("/")[0] == "b"]


@pytest.mark.parametrize(("spot", "kept_s"), [(False, LOST_KEPT_S), (True, SPOT_KEPT_S)])
def test_before_that_it_may_come_back(spot: bool, kept_s: float) -> None:  # noqa: FBT001 (pytest's own form)
    world = lost(spot=spot, waits_s=kept_s - 60)
    message = refused(world.forget("b"), "BadCommand").message
    assert message.endswith(f"s ago, and is remembered for {kept_s:.0f} s: wait")
    world.join("b")
    assert world.catalog.agents["b"].lost_at == 0.0


def test_a_replica_of_which_nothing_is_left_goes_with_it() -> None:
    world = lost(spot=True, waits_s=SPOT_KEPT_S)
    world.expire("c")
    world.catalog.agents["c"].lost_at -= SPOT_KEPT_S
    world.forget("b")
    world.forget("c")
    assert list(world.catalog.models[MODEL].replicas) == ["trainer"]
    assert list(world.catalog.agents) == ["a"]


def test_siblings_that_wait_for_it_are_told() -> None:
    """One that has joined a round goes on waiting for all shards; whoever brings the one that went ends that."""
    world = lost(spot=True, waits_s=SPOT_KEPT_S)
    world.want("engine", "latest", 1)
    world.forget("b")
    assert world.replica("engine").round is not None
    world.join("d")
    world.register("d", "engine", 0, 2, spot=True)
    assert kinds(world.want("engine", "latest", 0)) == ["round.joined", "round.decided"]


def test_its_name_begins_anew() -> None:
    world = lost(spot=True, waits_s=SPOT_KEPT_S)
    world.forget("b")
    assert kinds(world.join("b")) == ["agent.joined"]
    assert kinds(world.register("b", "engine", 0, 2, spot=True)) == ["shard.registered"]


def test_nobody_else_may_say_so_and_a_live_one_is_not_forgotten() -> None:
    world = lost(spot=True, waits_s=SPOT_KEPT_S)
    said = ForgetAgent(by=Sender("a", 1, 999), agent="b", incarnation=1, term=1)
    assert refused(world.say(said)).message == "only a registry may say that an agent is forgotten"
    refused(world.forget("a"), "BadCommand")
    refused(world.forget("nobody"), "BadCommand")
    world.say(Lead(by=Sender("_registry", 9, 0), registry="r-9", term=9, level=NEWEST_LEVEL))
    late = ForgetAgent(by=Sender("_registry", 9, 1), agent="b", incarnation=1, term=1)
    assert refused(world.say(late)).message == "term 1 is over: term 9 has spoken"
    wrong = ForgetAgent(by=Sender("_registry", 9, 999), agent="b", incarnation=2, term=9)
    assert refused(world.say(wrong)).message == "agent 'b' has no lost incarnation 2"
    world.skip(1000)
    assert kinds(world.forget("b", term=9)) == ["agent.forgotten", "shard.released"]


def test_below_the_level_there_is_no_such_command_and_all_stay() -> None:
    world = World(level=Level.WAKING_ONCE)
    world.replica_of("trainer", "a")
    world.expire("a")
    assert world.catalog.agents["a"].lost_at == 0.0
    said = ForgetAgent(by=Sender("_registry", 1, 999), agent="a", incarnation=1, term=1)
    unknown = decode_command("forget_agent", "_registry", encode_command(said), Level.WAKING_ONCE)
    assert isinstance(unknown, Unreadable)
    refused(world.say(unknown), "BadCommand")
    world.say(Lead(by=Sender("_registry", 9, 0), registry="r-9", term=9, level=Level.FORGETTING))
    assert world.catalog.agents["a"].lost_at == world.catalog.time, "it has all of its time from here on"
    world.catalog.agents["a"].lost_at -= LOST_KEPT_S
    world.forget("a", term=9)
    assert world.catalog.agents == {}


def test_a_snapshot_keeps_when_it_was_lost() -> None:
    world = lost(spot=True, waits_s=10)
    again = decode("run-7", encode(Snapshot(world.catalog.seq, 1.0, world.catalog)))
    assert again.catalog.agents["b"].lost_at == world.catalog.agents["b"].lost_at > 0
    assert msgspec.to_builtins(again.catalog) == msgspec.to_builtins(world.catalog)
