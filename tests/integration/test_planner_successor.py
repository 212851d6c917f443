"""A planner is killed while readers are under way: its successor spreads new ones by what agents say of themselves."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from tests.kit.hubs import RunningHub, running_hub

from tensorhub_agent.leases.table import TICKET_S
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.introspection.ping import ping
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.queries import Status
from tensorhub_common.protocol.subjects import agent_ask, beats

MODEL = "m"
JOB = "successor"
READERS: Final = 4
"""So many have a lease on one of the holders, and none on the other."""
FAKE: Final = "agent-3"
WAIT_S_MAX: Final = 60.0
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
            await asyncio.sleep(TICKET_S / 3)
            await take()

    await take()
    going = asyncio.create_task(go_on())
    try:
        yield
        assert not going.done(), "the leases were not held to the end"
    finally:
        going.cancel()


async def successor(hub: RunningHub, bus: Bus) -> None:
    """Kill the planner, and wait until another one answers and has heard both holders say who reads from them."""
    killed = hub.file.planner.pid
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S_MAX):
        while (pong := await ping(bus, "planner-0", 0.5)) is None or pong.pid == killed:
            pass
        heard: set[str] = set()
        both = asyncio.Event()

        def on_beat(message: Message) -> None:
            heard.add(msgspec.json.decode(message.data, type=Heartbeat).agent)
            if heard >= set(HOLDERS):
                both.set()

        subscription = await bus.subscribe(beats(), on_beat)
        await both.wait()
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
            await client.register(MODEL, {"w": torch.arange(1000)}, replica=replica)
            for client, replica in zip((one, other), HOLDERS.values(), strict=True)
        ]
        reader = await there.register(MODEL, {"w": torch.zeros(1000, dtype=torch.int64)}, replica="reader")
        for holder in (trainer, twin):
            await holder.publish(1)
        assert await reader.replicate(1) == 1
        assert reader.last_read is not None
        [favourite] = [source.agent for source in reader.last_read.sources]
        for holder in (trainer, twin):
            await holder.unpublish()
            holder.tensors["w"].add_(1)
            await holder.publish(2)

        status = (await hub.catalog(JOB))["status"]
        assert isinstance(status, Status)
        incarnation = {agent.agent: agent.incarnation for agent in status.agents}[favourite]
        async with read_by_many(bus, SourceId(favourite, incarnation, HOLDERS[favourite], 0), 2):
            await successor(hub, bus)
            assert await reader.replicate(2, timeout_s=WAIT_S_MAX) == 2
        assert torch.equal(reader.tensors["w"], torch.arange(1000) + 1)
        [source] = reader.last_read.sources
        assert source.agent in set(HOLDERS) - {favourite}, source.why
