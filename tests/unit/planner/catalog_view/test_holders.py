"""Which shards of the catalog can serve a request, by logs that could have been written."""

from collections.abc import Callable

import pytest

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import NO_ROOT, Join, Sender
from tensorhub_common.protocol.plans import PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_planner.catalog_view.holders import ABSENT_MAX, Candidates, find_candidates, replica_layouts
from tensorhub_planner.primitives.topology import AgentPlace
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, decided, root


def demand(
    replica: str = "rollout", version: int = 12, shard: int = 0, agent: str = "me", model: str = MODEL
) -> PlanRequest:
    return PlanRequest(
        model=model, version=version, replica=replica, shard=shard, agent=agent, root=root(version, shard), at_seq=1
    )


def found(world: CatalogDriver, wants: PlanRequest | None = None) -> Candidates:
    result = find_candidates(world.catalog, wants or demand(), pipelining=False)
    assert isinstance(result, Candidates), result
    return result


def holders(world: CatalogDriver, wants: PlanRequest | None = None) -> list[SourceId]:
    return [holder.source for holder in found(world, wants).holders.able]


@pytest.fixture
def world() -> CatalogDriver:
    """A trainer on `a` has published version 12, and a replica on `me` wants it."""
    made = CatalogDriver()
    made.replica_of("trainer", "a")
    made.replica_of("rollout", "me")
    made.publish("trainer", 12)
    return made


def test_who_has_fetched_it_is_a_holder_too(world: CatalogDriver) -> None:
    world.replica_of("other", "b")
    world.start("other")
    assert [each.agent for each in holders(world)] == ["a"]
    assert found(world).holders.absent == ("other/0 on b is filling",)
    world.filled("other", 12)
    assert [each.agent for each in holders(world)] == ["a", "b"]


def half(catalog: Catalog) -> list[tuple[str, ReadPriority | None, str | None]]:
    """Name the half-filled holders of version 12, with their turns and roots."""
    result = find_candidates(catalog, demand(), pipelining=True)
    assert isinstance(result, Candidates)
    return [(each.source.agent, each.turn, each.root) for each in result.holders.able if each.turn is not None]


def test_who_is_to_be_filled_is_a_half_filled_holder(world: CatalogDriver) -> None:
    """From the decision on, with the turn that its agent was told of, and as a ready one once it is filled."""
    world.replica_of("other", "b")
    told = decided(world.want("other", "latest"))
    turn = ReadPriority(told.cmd, told.round)
    assert half(world.catalog) == [("b", turn, root(12))]
    world.granted("other")
    assert half(world.catalog) == [("b", turn, root(12))]
    world.filled("other", 12)
    assert half(world.catalog) == []
    assert [each.agent for each in holders(world)] == ["a", "b"]


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
    assert half(world.catalog) == []
    world.granted("other")
    world.filled("other", 12, digest=NO_ROOT)
    assert [each.agent for each in holders(world)] == ["a", "b"]


def test_a_turn_is_that_of_the_last_decision(world: CatalogDriver) -> None:
    world.replica_of("other", "b")
    first, again = decided(world.want("other", "latest")), decided(world.replan("other"))
    assert again.cmd > first.cmd
    assert half(world.catalog) == [("b", ReadPriority(again.cmd, again.round), root(12))]


def test_a_staged_shard_gives_nothing_of_what_is_filled_beside_it(world: CatalogDriver) -> None:
    """It serves what it holds until all swap, whatever its round was decided for: then it is a ready holder."""
    world.replica_of("other", "b")
    decided(world.want("other", "latest", staged=True))
    world.granted("other")
    assert half(world.catalog) == []
    assert [each.agent for each in holders(world)] == ["a"]
    world.filled("other", 12)
    assert [each.agent for each in holders(world)] == ["a", "b"]


def test_a_draining_shard_is_none(world: CatalogDriver) -> None:
    world.fetch("rollout")
    world.unpublish("trainer")
    assert holders(world, demand("trainer", agent="a"))[0].agent == "me"
    assert holders(world) == []
    assert found(world).holders.absent == ("trainer/0 on a is draining version 12",)


def test_a_draining_shard_of_the_version_is_told_apart_from_any_other_that_is_absent(world: CatalogDriver) -> None:
    """While it drains, those that read from it go on, so chains still end there: of this version, and of no other."""
    world.replica_of("second", "b")
    assert not found(world).holders.draining
    world.publish("second", 13)
    world.unpublish("trainer")
    assert found(world).holders.draining
    assert not found(world, demand(version=13)).holders.draining
    world.drained("trainer")
    assert not found(world).holders.draining


def test_a_replica_that_maps_is_neither_a_holder_nor_absent(world: CatalogDriver) -> None:
    """It has no memory of its own. Whoever registered after it is looked at all the same."""
    world.join("b")
    world.register("b", "viewer", mapped=True)
    world.replica_of("other", "c")
    world.fetch("other")
    assert [each.agent for each in holders(world)] == ["a", "c"]
    assert found(world).holders.absent == ()


def test_an_agent_that_came_back_has_a_higher_incarnation(world: CatalogDriver) -> None:
    world.join("a", world.holding("trainer"))
    assert holders(world) == [SourceId("a", 2, "trainer", 0)]


def test_each_shard_finds_its_own(world: CatalogDriver) -> None:
    """Of a replica of two, shard 1 reads from shard 1s, and keys tell shards apart though layouts be equal."""
    world.replica_of("pair", "b", "c")
    world.replica_of("pair-reader", "d", "e")
    world.publish("pair", 13)
    second = found(world, demand("pair-reader", 13, shard=1, agent="e"))
    same = [each.source for each in second.holders.able if each.key == second.seat.key]
    assert same == [SourceId("c", 1, "pair", 1)]


def test_another_cut_is_named_whichever_shard_asks(world: CatalogDriver) -> None:
    """Shard 1 of two has no counterpart in a replica of one, and is told of that one's layout all the same."""
    world.replica_of("pair-reader", "d", "e")
    seen = found(world, demand("pair-reader", shard=1, agent="e"))
    (holder,) = seen.holders.able
    assert holder.key != seen.seat.key
    assert (holder.source, holder.shards) == (SourceId("a", 1, "trainer", 0), 1)


def test_places_of_all_who_matter(world: CatalogDriver) -> None:
    world.say(Join(by=Sender("b", 1, 999), host="node-9", site="paris"))
    world.register("b", "other")
    world.fetch("other")
    places = found(world).topology.places
    assert places == {
        "me": AgentPlace("host-0", "site-0"),
        "a": AgentPlace("host-0", "site-0"),
        "b": AgentPlace("node-9", "paris"),
    }


def test_many_who_cannot_serve_are_counted(world: CatalogDriver) -> None:
    for number in range(ABSENT_MAX + 3):
        world.join(f"idle-{number}")
        world.register(f"idle-{number}", f"idle-{number}")
    absent = found(world).holders
    assert len(absent.absent) == ABSENT_MAX
    assert absent.absent_more == 3


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
def test_a_shard_that_can_not_serve_is_named_with_its_state(
    world: CatalogDriver, change: Callable[[CatalogDriver], object], state: str
) -> None:
    """The reader's own shard, which has the version already, is no holder either."""
    world.fetch("rollout")
    assert [each.agent for each in holders(world)] == ["a"]
    change(world)
    assert holders(world) == []
    assert found(world).holders.absent == (f"trainer/0 on a {state}",)


def test_shards_are_told_apart_by_their_index_and_their_layout(world: CatalogDriver) -> None:
    world.join("b")
    world.register("b", "odd", layout="M")
    seen = found(world, demand("odd", agent="b"))
    assert [each.key == seen.seat.key for each in seen.holders.able] == [False]
    assert [each.key for each in found(world).holders.able] == [found(world).seat.key]
    assert found(world).seat.me == SourceId("me", 1, "rollout", 0)
