"""The programs that will be requested: readers wait, and other replicas may publish."""

import pytest
from tests.unit.planner.given import register_replica, wait_for_latest

from tensorhub_common.protocol.plans import PlanRequest, Refusal
from tensorhub_planner.catalog_view.holders import find_candidates
from tensorhub_planner.catalog_view.upcoming_programs import UpcomingProgram, upcoming_programs
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver


@pytest.fixture
def world() -> CatalogDriver:
    """Trainers of three shards, and an engine of two that waits for what they will publish."""
    made = CatalogDriver()
    register_replica(made, "trainer", "t2", "t0", "t1")
    register_replica(made, "engine", "e0", "e1")
    wait_for_latest(made, "engine", 2)
    return made


def test_who_waits_will_ask_for_what_the_others_publish(world: CatalogDriver) -> None:
    sources = LayoutSet(("t2", "t0", "t1"), ("t0", "t1", "t2"))
    assert list(upcoming_programs(world.catalog)) == [UpcomingProgram("e0", sources), UpcomingProgram("e1", sources)]


def test_the_sources_are_those_that_the_first_reader_asks_for(world: CatalogDriver) -> None:
    """What is compiled ahead is found by an equal key, or was compiled in vain."""
    before = next(upcoming_programs(world.catalog)).sources
    for index in range(3):
        world.ready("trainer", 1, index)
    demand = PlanRequest(model=MODEL, version=1, replica="engine", shard=0, agent="engine-0", root=None, at_seq=0)
    found = find_candidates(world.catalog, demand, pipelining=True, any_layout=True)
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


def test_equal_replicas_are_expected_once_and_equal_shards_need_no_program(world: CatalogDriver) -> None:
    register_replica(world, "twin", "e0", "e1")
    register_replica(world, "kin", "t2", "t0", "t1")
    wait_for_latest(world, "twin", 2)
    wait_for_latest(world, "kin", 3)
    assert [each.layout for each in upcoming_programs(world.catalog)] == ["e0", "e1"]


def test_a_layout_at_another_place_needs_a_program(world: CatalogDriver) -> None:
    register_replica(world, "turned", "t0", "t1", "t2")
    wait_for_latest(world, "turned", 3)
    assert [each.layout for each in upcoming_programs(world.catalog)] == ["e0", "e1", "t0", "t1", "t2"]


def test_spot_replicas_and_half_registered_ones_are_not_taken_for_publishers(world: CatalogDriver) -> None:
    register_replica(world, "cheap", "c0", spot=True)
    world.join("half-0")
    world.register("half-0", "half", 0, 2, layout="h0")
    assert {each.sources.layouts for each in upcoming_programs(world.catalog)} == {("t2", "t0", "t1")}
