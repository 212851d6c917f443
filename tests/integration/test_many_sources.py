"""A reader that needs a part of each of very many shards: more sources than may have a transport at a time.

As many shards as a machine bears stand on few agents; each is a source of its own, with its lease and its connection.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.integration.cuts import assert_holds, columns, published, registered, rows
from tests.integration.hubs import RunningHub, running_hub
from tests.integration.transports import BOTH, HUB_OF

from tensorhub import AsyncShard
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS

MORE: Final = DEFAULT_LIMITS.transports_max + 16
SHARDS_MAX: Final = 800
READ_S: Final = 60.0


def numbers(shards: int, seed: int) -> dict[str, torch.Tensor]:
    """Return two matrices of which each shard has some rows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "up": torch.randint(0, 256, (2 * shards, 258), generator=generator, dtype=torch.uint8),
        "down": torch.randn(shards, 34, generator=generator).to(torch.bfloat16),
    }


def sources_of(shard: AsyncShard) -> int:
    """Return from how many sources a shard was filled."""
    assert shard.last_read is not None
    return sum(each.nbytes > 0 for each in shard.last_read.sources)


@pytest.fixture(params=BOTH)
def hub(request: pytest.FixtureRequest) -> RunningHub:
    hub: RunningHub = request.getfixturevalue(HUB_OF[request.param])
    return hub


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
async def test_more_sources_than_may_be_open_at_a_time_fill_a_reader(hub: RunningHub) -> None:
    """Each of its shards needs a part of each source; then the trainer takes its version back at once."""
    async with hub.connected() as (first, second):
        trainer = await registered([first], "trainer", rows, MORE, numbers(MORE, 0))
        engine = await registered([second], "engine", columns, 2, numbers(MORE, 0))
        for version in (1, 2):
            assert await published(trainer, rows, numbers(MORE, version)) == version
            assert (
                await asyncio.gather(*(shard.replicate(version, timeout_s=READ_S) for shard in engine)) == [version] * 2
            )
            assert [sources_of(shard) for shard in engine] == [MORE, MORE]
            assert_holds(engine, columns, numbers(MORE, version))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("hosts", BOTH)
async def test_a_reader_of_hundreds_of_shards_outlives_one_of_their_agents(tmp_path: Path, hosts: int) -> None:
    """Half of its sources die while it reads; another replica of the same rows has what they had."""
    tensors = numbers(SHARDS_MAX, 1)
    async with (
        running_hub(tmp_path, agents=3, hosts=hosts) as hub,
        hub.connected(agents=3) as (first, second, third),
    ):
        trainer = await registered([first, second], "trainer", rows, SHARDS_MAX, tensors)
        assert await published(trainer, rows, tensors) == 1
        copy = await registered([second], "copy", rows, 2, tensors)
        assert set(await asyncio.gather(*(shard.replicate(1, timeout_s=READ_S) for shard in copy))) == {1}
        [engine] = await registered([third], "engine", columns, 1, tensors)
        reading = asyncio.create_task(engine.replicate(1, timeout_s=READ_S))
        mark = engine.tensors["up"]
        async with asyncio.timeout(READ_S):
            # Nobody but the memory tells when its first byte has come.
            while not reading.done() and not bool(mark.any()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        os.kill(next(agent.pid for agent in hub.file.agents if agent.id == "agent-0"), signal.SIGKILL)
        assert await reading == 1
        assert_holds([engine], columns, tensors)
