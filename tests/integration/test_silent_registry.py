"""What a call had begun while the registry was silent comes to its end once the registry answers, without a call."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.hubs import RunningHub, running_hub
from tests.stopping import stop

from tensorhub import AsyncHub, RegistryUnavailable

JOB = "silent"
TIMEOUT_S = 0.2


@contextlib.contextmanager
def silent(hub: RunningHub) -> Iterator[None]:
    """Stop the registry for as long as this lasts."""
    registry = hub.file.registry.pid
    stop(registry)
    try:
        yield
    finally:
        os.kill(registry, signal.SIGCONT)


async def until_replicas_are(hub: AsyncHub, expected: dict[str, int | None]) -> None:
    """Wait until the log counts these replicas, each with the version that it holds."""
    async with asyncio.timeout(20):
        while {each.replica: each.version for each in await hub.replicas("m")} != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_a_release_happens_as_the_caller_was_told(tmp_path: Path) -> None:
    """Published memory, and its readers end first: the log forgets the shard, and the agent frees the memory."""
    async with running_hub(tmp_path, agents=1) as hub, hub.connected(JOB, 1) as (mine,):
        shard = await mine.register("m", {"w": torch.full((1000,), 1.0)}, replica="trainer")
        await shard.publish()
        with silent(hub), pytest.raises(RegistryUnavailable, match="it goes as soon as the registry answers"):
            await shard.release(timeout_s=TIMEOUT_S)
        await until_replicas_are(mine, {})
        await shard.release()
        again = await mine.register("m", {"w": torch.full((1000,), 2.0)}, replica="trainer")
        assert await again.publish() == 2
        assert torch.equal(again.tensors["w"], torch.full((1000,), 2.0))


@pytest.mark.long
async def test_what_the_log_counts_as_a_holder_is_read_again(tmp_path: Path) -> None:
    """The unpublish of a retained version's last copy is refused by the log, long after its caller has given up."""
    async with running_hub(tmp_path, agents=2, TENSORHUB_CACHE_BYTES="0") as hub, hub.connected(JOB) as (mine, other):
        shard = await mine.register("m", {"w": torch.full((1000,), 1.0)}, replica="trainer")
        await shard.publish()
        await mine.retain("m", last=1)
        with silent(hub), pytest.raises(RegistryUnavailable, match="may be overwritten: don't, and call again"):
            await shard.unpublish(timeout_s=TIMEOUT_S)
        await until_replicas_are(mine, {"trainer": 1})
        reader = await other.register("m", {"w": torch.zeros(1000)}, replica="reader")
        assert await reader.replicate(timeout_s=20) == 1
        assert torch.equal(reader.tensors["w"], torch.full((1000,), 1.0))
        await mine.retain("m", last=0)
