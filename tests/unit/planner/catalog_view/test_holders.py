"""What the catalog says to a planner: which shards can serve a request, and the programs that will be requested."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.planner.given import TOPOLOGY, holder, register_replica, wait_for_latest

from tensorhub_common.protocol.log.commands import NO_ROOT, Join, Sender
from tensorhub_common.protocol.plans import PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_planner.catalog_view import holders
from tensorhub_planner.catalog_view.holders import (
    ABSENT_MAX,
    Candidates,
    HoldersCache,
    HolderSet,
    ReplicaHolders,
    RollKey,
    find_candidates,
    is_held,
    replica_layouts,
)
from tensorhub_planner.catalog_view.upcoming_programs import UpcomingProgram, upcoming_programs
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import AgentPlace
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, decided, root


def demand(
    replica: str = "rollout", version: int = 12, shard: int = 0, agent: str = "me", model: str = MODEL
) -> PlanRequest:
    return PlanRequest(
        model=model, version=version, replica=replica, shard=shard, agent=agent, root=root(version, shard), at_seq=1
    )


def found(world: CatalogDriver, wants: PlanRequest | None = None, **more: Any) -> Candidates:
    result = find_candidates(world.catalog, wants or demand(), pipelining=False, **more)
    assert isinstance(result, Candidates), result
    return result


def able(world: CatalogDriver, wants: PlanRequest | None = None) -> str:
    """Name the agents of those that can serve."""
    return "".join(holder.source.agent for holder in found(world, wants).holders.able)


def half(world: CatalogDriver) -> list[tuple[str, ReadPriority | None, str | None, bool]]:
    """Name the half-filled holders of version 12, with their turns and roots, and whether their rounds have begun."""
    result = find_candidates(world.catalog, demand(), pipelining=True)
    assert isinstance(result, Candidates)
    assert not any(each.asked for each in result.holders.able if each.turn is None)
    return [
        (each.source.agent, each.turn, each.root, each.asked) for each in result.holders.able if each.turn is not None
    ]


@pytest.fixture
def world() -> CatalogDriver:
    """A trainer on `a` has published version 12, a replica on `me` wants it, and another one on `b` has nothing."""
    made = CatalogDriver()
    made.replica_of("trainer", "a")
    made.replica_of("rollout", "me")
    made.replica_of("other", "b")
    made.publish("trainer", 12)
    return made


def test_who_is_to_be_filled_is_a_half_filled_holder_and_who_has_fetched_it_one_too(world: CatalogDriver) -> None:
    """From the decision on, with the turn that its agent was told of, that of the last decision."""
    first, told = decided(world.want("other", "latest")), decided(world.replan("other"))
    assert told.cmd > first.cmd
    turn = ReadPriority(told.cmd, told.round)
    assert half(world) == [("b", turn, root(12), False)]
    world.granted("other")
    assert half(world) == [("b", turn, root(12), True)]
    assert able(world) == "a"
    assert found(world).holders.absent == ("other/0 on b is filling",)
    world.filled("other", 12)
    assert (half(world), able(world)) == ([], "ab")


def test_who_is_to_be_filled_with_another_version_is_no_half_filled_holder(world: CatalogDriver) -> None:
    world.replica_of("newer", "c")
    world.publish("newer", 13)
    assert decided(world.want("other", "latest")).version == 13
    assert half(world) == []


def test_without_a_root_what_is_being_filled_gives_nothing() -> None:
    """With digests off, or in a layout that the log has no root of, nothing vouches for a piece before all stand."""
    world = CatalogDriver()
    world.replica_of("trainer", "a")
    world.replica_of("other", "b")
    world.join("c")
    world.register("c", "odd", layout="M")
    world.ready("trainer", 12, digest=NO_ROOT)
    decided(world.want("other", "latest"))
    decided(world.want("odd", "latest"))
    world.replica_of("rollout", "me")
    assert half(world) == []
    world.granted("other")
    world.filled("other", 12, digest=NO_ROOT)
    assert able(world) == "ab"


def test_a_staged_shard_gives_nothing_of_what_is_filled_beside_it(world: CatalogDriver) -> None:
    """It serves what it holds until all swap, whatever its round was decided for: then it is a ready holder."""
    decided(world.want("other", "latest", staged=True))
    world.granted("other")
    assert (half(world), able(world)) == ([], "a")
    world.filled("other", 12)
    assert able(world) == "ab"


def test_a_draining_shard_of_the_version_is_none_and_told_apart_from_any_other_that_is_absent(
    world: CatalogDriver,
) -> None:
    """While it drains, those that read from it go on, so chains still end there: of this version, and of no other."""
    world.catalog.agents["a"].rack = "r7"
    world.fetch("rollout")
    assert not found(world).holders.draining
    world.publish("other", 13)
    world.unpublish("trainer")
    assert found(world, demand("trainer", agent="a")).holders.able[0].source.agent == "me"
    assert (able(world), found(world).holders.draining, found(world).holders.draining_on) == ("", True, ("a",))
    assert found(world).topology.places["a"] == AgentPlace("host-0", "site-0", "r7")
    assert "trainer/0 on a is draining version 12" in found(world).holders.absent
    assert not found(world, demand(version=13)).holders.draining
    world.drained("trainer")
    assert not found(world).holders.draining


def test_a_replica_that_maps_is_neither_a_holder_nor_absent(world: CatalogDriver) -> None:
    """It has no memory of its own. Whoever registered after it is looked at all the same."""
    world.join("v")
    world.register("v", "viewer", mapped=True)
    world.replica_of("last", "c")
    world.fetch("last")
    world.fetch("other")
    assert able(world) == "abc"
    assert found(world).holders.absent == ()


def test_each_shard_finds_its_own_by_its_index_and_its_layout(world: CatalogDriver) -> None:
    """Of a replica of two, shard 1 reads from shard 1s, and is told of another cut where it has no counterpart."""
    world.replica_of("pair", "p", "q")
    world.replica_of("pair-reader", "d", "e")
    other_cut = found(world, demand("pair-reader", shard=1, agent="e"))
    (holder,) = other_cut.holders.able
    assert holder.key != other_cut.seat.key
    assert (holder.source, holder.shards) == (SourceId("a", 1, "trainer", 0), 1)
    assert other_cut.topology.places.keys() == {"a", "e"}
    world.publish("pair", 13)
    second = found(world, demand("pair-reader", 13, shard=1, agent="e"))
    same = [each.source for each in second.holders.able if each.key == second.seat.key]
    assert same == [SourceId("q", 1, "pair", 1)]
    world.join("o")
    world.register("o", "odd", layout="M")
    seen = found(world, demand("odd", agent="o"))
    assert [each.key == seen.seat.key for each in seen.holders.able] == [False]
    assert [each.key for each in found(world).holders.able] == [found(world).seat.key]
    assert (found(world).seat.me, found(world).seat.root) == (SourceId("me", 1, "rollout", 0), root(12))
    assert [each.source for each in found(world, demand(version=13)).holders.able] == [SourceId("p", 1, "pair", 0)]
    world.join("a", world.holding("trainer"))
    assert found(world).holders.able[0].source == SourceId("a", 2, "trainer", 0), "it came back as a new incarnation"


def test_places_of_all_who_matter(world: CatalogDriver) -> None:
    world.say(Join(by=Sender("far", 1, 999), host="node-9", site="paris", rack="r7"))
    world.register("far", "farther")
    world.fetch("farther")
    here = AgentPlace("host-0", "site-0")
    assert found(world).topology.places == {"me": here, "a": here, "far": AgentPlace("node-9", "paris", "r7")}
    world.catalog.agents["me"].rack = "r8"
    assert found(world).topology.places["me"] == AgentPlace("host-0", "site-0", "r8")


def test_with_any_layout_one_lookup_is_for_all_shards_of_a_replica_and_tells_the_layouts_of_the_publisher(
    world: CatalogDriver,
) -> None:
    register_replica(world, "engine", "E", "F")
    register_replica(world, "odd", "M")
    world.fetch("odd")
    wants = demand("engine", shard=1, agent="engine-1")
    seen = found(world, wants, any_layout=True)
    assert set(seen.topology.places) == {"engine-0", "engine-1", "a", "odd-0"}
    assert seen.of_replica.originals == ("L",)
    world.catalog.models[MODEL].versions[12].roots.clear()
    assert found(world, wants, any_layout=True).of_replica.originals == ()


def test_a_program_is_made_of_the_published_layouts_if_all_are_ready_or_else_of_all_there_are() -> None:
    """Then those of ready holders come first."""
    able = (holder("a", layout="y", turn=7), holder("c", layout="x"), holder("b", layout="z"), holder("d", layout="x"))
    published = [("x", "z"), ("x", "y"), ("gone", "x"), ()]
    found = [ReplicaHolders(HolderSet(able), TOPOLOGY, originals) for originals in published]
    assert [each.original_set for each in found] == [LayoutSet(("x", "z"), ("x", "z")), None, None, None]
    held = [("x", "z"), ("x", "y"), ("x",), ()]
    assert [each.source_set for each in found] == [LayoutSet(("z", "x", "y"), originals) for originals in held]


def test_shards_of_a_replica_share_a_lookup_and_so_many_are_kept(
    world: CatalogDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "ROLLS_MAX", 2)
    register_replica(world, "engine", "E", "F")
    rolls: HoldersCache = {}
    wants = [demand("engine", shard=shard, agent=f"engine-{shard}") for shard in (0, 1)]
    first, second = (found(world, each, any_layout=True, rolls=rolls).roll for each in wants)
    assert first is second is rolls[RollKey(MODEL, "engine", 12)]
    for replica, agent, kept in (("other", "b", 2), ("rollout", "me", 1)):
        found(world, demand(replica, agent=agent), any_layout=True, rolls=rolls)
        assert len(rolls) == kept


def elsewhere(world: CatalogDriver) -> None:
    world.catalog.agents["a"].host = "host-1"


def half_filled_here(world: CatalogDriver) -> None:
    elsewhere(world)
    world.want("other", "latest")


def other_layout(world: CatalogDriver) -> None:
    elsewhere(world)
    world.register("b", "odd", layout="M")
    world.fetch("odd")


@pytest.mark.parametrize(
    ("wants", "change", "held"),
    [
        (demand(), elsewhere, (True, False)),
        (demand(), half_filled_here, (True, False)),
        (demand(), other_layout, (True, False)),
        (demand(), lambda _: None, (True, True)),
        (demand(), lambda world: world.expire("a"), (False, False)),
        (demand(version=77), elsewhere, (False, False)),
        (demand(model="unheard-of"), elsewhere, (False, False)),
        (demand(shard=5), lambda _: None, (False, False)),
    ],
)
def test_a_version_is_held_where_the_log_counts_a_holder_and_for_a_mapping_one_on_its_host(
    world: CatalogDriver, wants: PlanRequest, change: Callable[[CatalogDriver], object], held: tuple[bool, bool]
) -> None:
    change(world)
    mapped = msgspec.structs.replace(wants, mapped=True)
    assert (is_held(world.catalog, wants), is_held(world.catalog, mapped)) == held


def test_many_who_cannot_serve_are_counted(world: CatalogDriver) -> None:
    for number in range(ABSENT_MAX + 2):
        world.join(f"idle-{number}")
        world.register(f"idle-{number}", f"idle-{number}")
    absent = found(world).holders
    assert (len(absent.absent), absent.absent_more) == (ABSENT_MAX, 3)


@pytest.mark.parametrize(
    ("wants", "error", "words"),
    [
        (demand(model="unheard-of"), "VersionUnavailable", "model 'unheard-of' is unknown"),
        (demand(version=77), "VersionUnavailable", "knows no version 77"),
        (demand("unheard-of"), "BadCommand", "shard 0 of policy/unheard-of is not registered"),
        (demand(shard=5), "BadCommand", "is not registered"),
        (demand(agent="a"), "ReplicaConflict", "is on agent 'me', not 'a'"),
    ],
)
def test_what_the_log_does_not_know(world: CatalogDriver, wants: PlanRequest, error: str, words: str) -> None:
    refusal = find_candidates(world.catalog, wants, pipelining=True)
    assert isinstance(refusal, Refusal)
    assert refusal.error == error
    assert words in refusal.reason


def test_the_first_shard_without_a_root_sees_all_layouts_of_its_replica(world: CatalogDriver) -> None:
    """It was looked up before: since then the replica may have been released, or cut otherwise."""
    for shard, layout in enumerate(["P", "Q", "Q"]):
        world.register("me", "engine", shard, 3, layout=layout)
    seen = [replica_layouts(world.catalog, demand("engine", shard=shard)) for shard in range(3)]
    assert seen == [("P", "Q"), (), ()]
    world.catalog.models[MODEL].versions[12].roots["3.0.P"] = "r"
    seen = [replica_layouts(world.catalog, demand("engine", shard=shard)) for shard in range(4)]
    assert seen == [("P", "Q"), ("P", "Q"), (), ()]
    world.catalog.models[MODEL].versions[12].roots |= {"3.1.Q": "r", "3.2.Q": "r"}
    assert [replica_layouts(world.catalog, demand("engine", shard=shard)) for shard in (2, 3)] == [("P", "Q"), ()]
    world.release("engine", 2)
    gone = [demand("engine"), demand("nobody"), demand("engine", version=99), demand("engine", model="other")]
    assert [replica_layouts(world.catalog, each) for each in gone] == [()] * 4


def newer(world: CatalogDriver) -> None:
    world.empty("trainer")
    world.publish("trainer", 13)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda world: world.expire("a"), "is lost"),
        (newer, "holds version 13"),
        (lambda world: world.unpublish("trainer"), "is draining version 12"),
    ],
)
def test_who_can_not_serve_is_named_with_its_state(
    world: CatalogDriver, change: Callable[[CatalogDriver], object], state: str
) -> None:
    """The reader's own shard, which has the version already, is no holder either."""
    world.fetch("rollout")
    world.release("other")
    assert able(world) == "a"
    change(world)
    assert able(world) == ""
    assert found(world).holders.absent == (f"trainer/0 on a {state}",)


# ------------------------------------------------------------------------------------------------- programs to come


@pytest.fixture
def waiting() -> CatalogDriver:
    """Trainers of three shards, and an engine of two that waits for what they will publish."""
    made = CatalogDriver()
    register_replica(made, "trainer", "t2", "t0", "t1")
    register_replica(made, "engine", "e0", "e1")
    wait_for_latest(made, "engine", 2)
    return made


def test_who_waits_will_ask_for_what_the_others_publish(waiting: CatalogDriver) -> None:
    sources = LayoutSet(("t2", "t0", "t1"), ("t0", "t1", "t2"))
    assert list(upcoming_programs(waiting.catalog)) == [UpcomingProgram("e0", sources), UpcomingProgram("e1", sources)]


def test_the_sources_are_those_that_the_first_reader_asks_for(waiting: CatalogDriver) -> None:
    """What is compiled ahead is found by an equal key, or was compiled in vain."""
    before = next(upcoming_programs(waiting.catalog)).sources
    for index in range(3):
        waiting.ready("trainer", 1, index)
    demand = PlanRequest(model=MODEL, version=1, replica="engine", shard=0, agent="engine-0", root=None, at_seq=0)
    found = find_candidates(waiting.catalog, demand, pipelining=True, any_layout=True)
    assert not isinstance(found, Refusal)
    assert found.roll is not None
    assert (found.roll.source_set, found.roll.source_set.name) == (before, before.name)


def test_nobody_is_expected_before_all_shards_wait_nor_once_a_version_is_there() -> None:
    world = CatalogDriver()
    register_replica(world, "trainer", "t0")
    register_replica(world, "engine", "e0", "e1")
    world.want("engine", "latest", 1)
    assert not list(upcoming_programs(world.catalog))
    world.want("engine", "latest", 0)
    assert len(list(upcoming_programs(world.catalog))) == 2
    world.ready("trainer", 1)
    assert not list(upcoming_programs(world.catalog))


def test_equal_replicas_are_expected_once_and_equal_shards_need_no_program_at_their_place(
    waiting: CatalogDriver,
) -> None:
    register_replica(waiting, "twin", "e0", "e1")
    register_replica(waiting, "kin", "t2", "t0", "t1")
    wait_for_latest(waiting, "twin", 2)
    wait_for_latest(waiting, "kin", 3)
    assert [each.layout for each in upcoming_programs(waiting.catalog)] == ["e0", "e1"]
    register_replica(waiting, "turned", "t0", "t1", "t2")
    wait_for_latest(waiting, "turned", 3)
    assert [each.layout for each in upcoming_programs(waiting.catalog)] == ["e0", "e1", "t0", "t1", "t2"]


def test_spot_replicas_and_half_registered_ones_are_not_taken_for_publishers(waiting: CatalogDriver) -> None:
    register_replica(waiting, "cheap", "c0", spot=True)
    waiting.join("half-0")
    waiting.register("half-0", "half", 0, 2, layout="h0")
    assert {each.sources.layouts for each in upcoming_programs(waiting.catalog)} == {("t2", "t0", "t1")}
