"""A planner is killed while readers are under way: its successor spreads new ones by what agents report."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.tensors import full, shown, write
from tests.kit.waiting import until

from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_common.bus.connection import Bus
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.subjects import agent_ask, beats

MODEL = "m"
JOB = "successor"
READERS: Final = 4
"""So many have a lease on one of the holders, and none on the other."""
FAKE: Final = "agent-3"
HOLDERS: Final = {"agent-0": "trainer", "agent-1": "twin"}


@asynccontextmanager
async def read_by_many(bus: Bus, source: SourceId, version: int) -> AsyncIterator[None]:
    """Hold leases on a holder as readers do that have just begun; each lasts as long as its ticket."""

    async def take() -> None:
        for number in range(READERS):
            reader = SourceId(FAKE, 1, f"fake-{number}", 0)
            ask = LeaseRequest(job=JOB, model=MODEL, source=source, version=version, root=None, reader=reader)
            body = await bus.request(agent_ask(source.agent, "lease", FAKE), msgspec.msgpack.encode(ask), 5.0)
            assert isinstance(msgspec.msgpack.decode(body, type=LeaseAnswer), LeaseGrant)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(LeaseLimits().ticket_s / 3)
            await take()

    await take()
    going = asyncio.create_task(go_on())
    try:
        yield
        assert not going.done(), "the leases were not held to the end"
    finally:
        going.cancel()


async def successor(hub: RunningHub, bus: Bus) -> None:
    await hub.until_back("planner-0", hub.kill("planner-0"))
    seen: set[str] = set()
    subscription = await bus.subscribe(
        beats(), lambda message: seen.add(msgspec.json.decode(message.data, type=Heartbeat).agent)
    )
    await until(lambda: seen >= set(HOLDERS))
    await subscription.close()


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_the_next_reader_does_not_go_to_the_busiest(tmp_path: Path) -> None:
    """Both holders are as near. Idle, the reader would take the one that is busy now: it did before."""
    async with (
        running_hub(tmp_path, agents=4) as hub,
        hub.connected(JOB, agents=3) as (one, other, there),
        await hub.bus(hub.admin_key) as bus,
    ):
        trainer, twin = [
            await client.register(MODEL, full(1), replica=replica)
            for client, replica in zip((one, other), HOLDERS.values(), strict=True)
        ]
        reader = await there.register(MODEL, full(0), replica="reader")
        for holder in (trainer, twin):
            await holder.publish(1)
        assert await reader.replicate(1) == 1
        assert reader.last_read is not None
        [favourite] = [source.agent for source in reader.last_read.sources]
        for holder in (trainer, twin):
            async with holder.overwriting(publish=True, version=2):
                write(holder, full(2))

        incarnation = (await hub.agent_info(JOB, favourite)).incarnation
        async with read_by_many(bus, SourceId(favourite, incarnation, HOLDERS[favourite], 0), 2):
            await successor(hub, bus)
            assert await reader.replicate(2, timeout_s=WAIT_S) == 2
        assert shown(reader) == {2.0}
        [source] = reader.last_read.sources
        assert source.agent in set(HOLDERS) - {favourite}, source.why
