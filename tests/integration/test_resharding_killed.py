"""A source is killed in the middle of a read from another sharding: the rest comes from a holder of yet another one."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.integration.cuts import assert_holds, columns, mesh, published, registered, rows
from tests.integration.hubs import RunningHub, running_hub
from tests.integration.transports import BOTH

from tensorhub import AsyncShard
from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection.ping import ping

TENSORS, ROWS, COLUMNS = 4, 4099, 8191
MIDDLES: Final = 2
"""So many reads are to be met in their middle."""

ATTEMPTS_MAX: Final = 12
BACK_S: Final = 60.0
BEGIN_S: Final = 60.0
VICTIM: Final = "agent-2"


def numbers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"w{number}": torch.randint(1, 256, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
        for number in range(TENSORS)
    }


async def struck(hub: RunningHub, reader: list[AsyncShard], moment_s: float) -> bool:
    """Read, and kill a source meanwhile; tell whether that was in the middle, and of a source."""
    reading = [asyncio.create_task(shard.replicate(1, timeout_s=30)) for shard in reader]
    marks = [tensor.flatten()[:64] for shard in reader for tensor in shard.tensors.values()]
    async with asyncio.timeout(BEGIN_S):
        # Nobody but the memory tells when its first byte has come.
        while not any(task.done() for task in reading) and not any(bool(mark.any()) for mark in marks):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(moment_s)
    in_the_middle = not any(task.done() for task in reading)
    os.kill(next(agent.pid for agent in hub.file.agents if agent.id == VICTIM), signal.SIGKILL)
    assert set(await asyncio.gather(*reading)) == {1}
    reports = [shard.last_read for shard in reader]
    return in_the_middle and VICTIM in {source.agent for each in reports if each for source in each.sources}


async def back(hub: RunningHub, copy: list[AsyncShard]) -> None:
    """Wait until the victim answers, and read again what it lost: without digests nobody vouches for its memory."""
    async with (
        asyncio.timeout(BACK_S),
        await connect(hub.file.nats, name="killed", credentials=hub.file.credentials) as bus,
    ):
        while await ping(bus, VICTIM) is None:  # noqa: ASYNC110 (only asking again tells)
            await asyncio.sleep(0.05)
    assert set(await asyncio.gather(*(shard.replicate(1, timeout_s=BACK_S) for shard in copy))) == {1}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", BOTH)
@pytest.mark.parametrize("digests", ["on", "off"])
async def test_the_rest_comes_from_a_holder_of_another_sharding(tmp_path: Path, hosts: int, digests: str) -> None:
    chance, tensors = random.Random(5), numbers()
    async with (
        running_hub(tmp_path, agents=3, hosts=hosts, TENSORHUB_DIGESTS=digests) as hub,
        hub.connected(agents=3) as (first, middle, second),
    ):
        trainer = await registered([first], "trainer", rows, 4, tensors)
        assert await published(trainer, rows, tensors) == 1
        copy = await registered([second], "copy", mesh, 4, tensors)
        assert set(await asyncio.gather(*(shard.replicate(1) for shard in copy))) == {1}
        met = 0
        for attempt in range(ATTEMPTS_MAX):
            reader = await registered([middle], f"reader-{attempt}", columns, 2, tensors)
            met += await struck(hub, reader, chance.uniform(0, 0.03))
            assert_holds(reader, columns, tensors)
            for shard in reader:
                await shard.release()
            await back(hub, copy)
            assert_holds(copy, mesh, tensors)
            if met == MIDDLES:
                return
    pytest.fail("no two kills met the middle of a read")
