"""What every process says that it does just now, on a real hub."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from tests.integration.hubs import RunningHub, new_job
from tests.stopping import stop

from tensorhub import TensorSpec
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.introspection.activity import gather_activity
from tensorhub_common.protocol.activity import Activity

pytestmark = pytest.mark.asyncio(loop_scope="session")

AGENTS = {"agent-0", "agent-1"}
PROCESSES = {*AGENTS, "registry-0", "planner-0"}
WAIT_S = 20.0
SPEC = {"w": TensorSpec((1024,), "float32")}


@pytest_asyncio.fixture(loop_scope="session")
async def bus(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as connected:
        yield connected


async def until(bus: Bus, job: str, holds: Callable[[dict[str, Activity]], bool]) -> dict[str, Activity]:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = {each.process: each for each in await gather_activity(bus, job, AGENTS)}
            if holds(found):
                return found


async def test_every_process_answers_for_itself(bus: Bus) -> None:
    found = {each.process: each for each in await gather_activity(bus, new_job(), PROCESSES)}
    assert set(found) == PROCESSES
    assert {each.role for each in found.values()} == {"registry", "planner", "agent"}
    for each in found.values():
        assert each.up_s >= each.nats_s > 0
        assert (each.nats_lost, each.faults, each.reads) == (0, 0, ())


@pytest.mark.long
async def test_a_read_that_has_no_planner_is_told_with_its_reason(hub: RunningHub, bus: Bus) -> None:
    """And nothing is told any more once it is over."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", SPEC, replica="trainer")
        trainer.mark_loaded()
        engine = await there.register("policy", SPEC, replica="rollout-0")
        await trainer.publish(3)
        planner = hub.file.planner.pid
        stop(planner)
        try:
            reading = asyncio.create_task(engine.replicate(3, timeout_s=WAIT_S))
            found = await until(bus, job, lambda all_: any(each.planner_silent_s is not None for each in all_.values()))
        finally:
            os.kill(planner, signal.SIGCONT)
        agent = found["agent-1"]
        (read,) = agent.reads
        assert (read.model, read.replica, read.version, read.stage) == ("policy", "rollout-0", 3, "leasing")
        assert read.trace is not None
        assert "planner-0" not in found
        assert await reading == 3
        over = await until(bus, job, lambda all_: not all_["agent-1"].reads)
        assert over["agent-1"].planner_silent_s is None
