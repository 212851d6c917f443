"""Programs are compiled ahead when a replica waits, each once; what can't be compiled is left to the read."""

import asyncio
from typing import Any, cast

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World
from tests.unit.planner.given import register_replica, wait_for_latest

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.protocol.log.events import RoundJoined, VersionPublished
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.context import prefetch
from tensorhub_planner.context.prefetch import ProgramPrefetcher
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.primitives.source_set import LayoutSet

JOB = "job"
WAIT_S = 60.0
JOINED = RoundJoined(model=MODEL, replica="engine", round=1, shard=0, missing=())


class FakePrograms:
    """Compiles nothing, and says who asked; the layout "e1" can't be filled."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.came: asyncio.Queue[str] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()

    async def compiled(self, _job: str, layout: str, _sources: LayoutSet) -> None:
        self.asked.append(layout)
        self.came.put_nowait(layout)
        await self.gate.wait()
        if layout == "e1":
            raise LayoutMismatch("no holder has it")


@pytest.fixture
async def programs(monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    monkeypatch.setattr(prefetch, "SETTLE_S", 0.0)
    return FakePrograms()


def preparing_in(world: World, programs: Any) -> ProgramPrefetcher:
    work = Supervisor("the planner of a test")
    return ProgramPrefetcher(cast("ProgramStore", programs), lambda job: world.catalog if job == JOB else None, work)


async def looked(one: ProgramPrefetcher) -> None:
    """Wait until nobody looks at anything."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*one.looks)


@pytest.fixture
def world() -> World:
    made = World()
    register_replica(made, "trainer", "t0")
    register_replica(made, "engine", "e0", "e1", "e2")
    wait_for_latest(made, "engine", 3)
    return made


async def test_each_program_is_asked_for_once_also_one_that_cannot_be(world: World, programs: FakePrograms) -> None:
    one = preparing_in(world, programs)
    one.see(JOB, JOINED)
    await looked(one)
    assert sorted(programs.asked) == ["e0", "e1", "e2"]
    one.see(JOB, JOINED)
    await looked(one)
    assert len(programs.asked) == 3


async def test_who_joins_during_a_look_is_seen_by_the_next(world: World, programs: FakePrograms) -> None:
    one = preparing_in(world, programs)
    programs.gate.clear()
    one.see(JOB, JOINED)
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await programs.came.get()
    register_replica(world, "late", "l0")
    wait_for_latest(world, "late", 1)
    one.see(JOB, JOINED)
    programs.gate.set()
    await looked(one)
    assert programs.asked[3:] == ["l0"]


async def test_other_events_and_unknown_jobs_are_nothing_to_it(world: World, programs: FakePrograms) -> None:
    one = preparing_in(world, programs)
    one.see(JOB, VersionPublished(model=MODEL, version=1, replica="trainer", roots=("a",)))
    assert not one.looks
    one.see("other", JOINED)
    await looked(one)
    assert not programs.asked
