"""What will be asked for is known before: readers wait, and others are there who may publish."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World

from tensorhub_common.protocol.plans import PlanRequest, Refusal
from tensorhub_planner.catalog_view.holders import find_candidates
from tensorhub_planner.catalog_view.upcoming_programs import PUBLISHERS_MAX, UpcomingProgram, upcoming_programs
from tensorhub_planner.planning.resharding import source_set
from tensorhub_planner.primitives.source_set import LayoutSet


def given(world: World, name: str, *layouts: str, spot: bool = False) -> None:
    """Register a replica, each shard on an agent of its own."""
    for index, layout in enumerate(layouts):
        world.join(f"{name}-{index}")
        world.register(f"{name}-{index}", name, index, len(layouts), layout=layout, spot=spot)


def wait(world: World, name: str, shards: int) -> None:
    for index in range(shards):
        world.want(name, "latest", index)


@pytest.fixture
def world() -> World:
    """Trainers of three shards, and an engine of two that waits for what they will publish."""
    made = World()
    given(made, "trainer", "t2", "t0", "t1")
    given(made, "engine", "e0", "e1")
    wait(made, "engine", 2)
    return made


def test_who_waits_will_ask_for_what_the_others_publish(world: World) -> None:
    sources = LayoutSet(("t2", "t0", "t1"), ("t0", "t1", "t2"))
    assert list(upcoming_programs(world.catalog)) == [UpcomingProgram("e0", sources), UpcomingProgram("e1", sources)]


def test_the_sources_are_those_that_the_first_reader_asks_for(world: World) -> None:
    """What is compiled ahead is found by an equal key, or was compiled in vain."""
    before = next(upcoming_programs(world.catalog)).sources
    for index in range(3):
        world.ready("trainer", 1, index)
    demand = PlanRequest(model=MODEL, version=1, replica="engine", shard=0, agent="engine-0", root=None, at_seq=0)
    found = find_candidates(world.catalog, demand, pipelining=True, any_layout=True)
    assert not isinstance(found, Refusal)
    assert source_set(found) == before
    assert source_set(found).name == before.name


def test_nobody_is_expected_before_all_shards_wait_nor_once_a_version_is_there() -> None:
    world = World()
    given(world, "trainer", "t0")
    given(world, "engine", "e0", "e1")
    world.want("engine", "latest", 1)
    assert not list(upcoming_programs(world.catalog))
    world.want("engine", "latest", 0)
    assert len(list(upcoming_programs(world.catalog))) == 2
    world.ready("trainer", 1)
    assert not list(upcoming_programs(world.catalog))


def test_equal_replicas_are_expected_once_and_equal_shards_need_no_program(world: World) -> None:
    given(world, "twin", "e0", "e1")
    given(world, "kin", "t2", "t0", "t1")
    wait(world, "twin", 2)
    wait(world, "kin", 3)
    assert [each.layout for each in upcoming_programs(world.catalog)] == ["e0", "e1"]


def test_a_layout_at_another_place_needs_a_program(world: World) -> None:
    given(world, "turned", "t0", "t1", "t2")
    wait(world, "turned", 3)
    assert [each.layout for each in upcoming_programs(world.catalog)] == ["e0", "e1", "t0", "t1", "t2"]


def test_spot_replicas_and_half_registered_ones_are_not_taken_for_publishers(world: World) -> None:
    given(world, "cheap", "c0", spot=True)
    world.join("half-0")
    world.register("half-0", "half", 0, 2, layout="h0")
    assert {each.sources.layouts for each in upcoming_programs(world.catalog)} == {("t2", "t0", "t1")}


def test_few_replicas_are_taken_for_publishers(world: World) -> None:
    for number in range(PUBLISHERS_MAX + 1):
        given(world, f"other-{number}", f"o{number}")
    assert len({each.sources for each in upcoming_programs(world.catalog)}) == PUBLISHERS_MAX
