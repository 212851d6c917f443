"""A worker that comes back to a shard whose last call has not ended: it gets the memory only when that call is over."""

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.hubs import running_hub
from tests.integration.programs import started
from tests.stopping import stop

from tensorhub._control.hub_file import HubFile
from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub_common.bus.connection import connect
from tensorhub_common.errors import AgentUnavailable, ReplicaConflict
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.subjects import commands_of

JOB = "again"
SILENCE_S = 0.5
"""Shorter than the lease of the leading registry: it speaks on afterwards."""

PUBLISHER = """
import sys, torch, tensorhub
hub = tensorhub.connect("again", agent=sys.argv[1])
shard = hub.register("m", {"w": torch.full((1000,), 1.0)}, replica="trainer")
print("registered", flush=True)
sys.stdin.readline()
shard.publish(1)
"""


@pytest.mark.long
async def test_values_are_not_copied_over_a_publication_that_is_still_open(tmp_path: Path) -> None:
    """The worker dies in publish while the registry is silent. Its successor's values must not become version 1."""
    async with running_hub(tmp_path) as hub:
        registry = hub.file.registry.pid
        async with started(hub, PUBLISHER, hub.file.agents[0].socket) as first:
            assert await first.line() == "registered"
            stop(registry)
            try:
                first.go_on()
                await until_said(hub.file, "ready")
                first.kill()
                await first.code()
                await until_said(hub.file, "withdraw")
            finally:
                asyncio.get_running_loop().call_later(SILENCE_S, os.kill, registry, signal.SIGCONT)
        async with hub.connected(JOB) as (mine, other):
            shard = await mine.register("m", {"w": torch.full((1000,), 2.0)}, replica="trainer")
            assert shard.version == 1, "the publication stood in the log before it was withdrawn"
            assert torch.equal(shard.tensors["w"], torch.full((1000,), 1.0))
            reader = await other.register("m", {"w": torch.zeros(1000)}, replica="reader")
            assert await reader.replicate() == 1
            assert torch.equal(reader.tensors["w"], torch.full((1000,), 1.0))


async def until_said(hub: HubFile, verb: str) -> None:
    """Wait until a command stands in the log."""
    async with (
        asyncio.timeout(WAIT_S),
        await connect(hub.nats, name="test", credentials=hub.credentials) as bus,
        contextlib.aclosing(JobLog(bus, JOB).follow(1, commands_of(JOB))) as entries,
    ):
        async for entry in entries:
            if f".cmd.{verb}." in entry.subject:
                return


@pytest.mark.long
async def test_a_release_that_was_given_up_touches_no_successor(tmp_path: Path) -> None:
    """It comes to its end at the agent, another worker brings the shard, and the first one asks once more."""
    async with (
        running_hub(tmp_path, agents=1) as hub,
        hub.connected(JOB, 1) as (first,),
        hub.connected(JOB, 1) as (reads,),
        hub.connected(JOB, 1) as (second,),
    ):
        left = await first.register("m", {"w": torch.full((1000,), 1.0)}, replica="trainer")
        await left.publish()
        engine = await reads.register("m", {"w": torch.zeros(1000)}, replica="reader", install="mapped")
        assert await engine.replicate() == 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await left.release()
        await engine.release()
        del engine
        gc.collect()
        shard = await registered(second)
        assert await shard.publish() == 2
        with pytest.raises(AgentUnavailable, match="is not this worker's: register it again"):
            await left.unpublish()
        with pytest.raises(AgentUnavailable, match="is not this worker's: register it again"):
            await left.publish(3)
        await left.release()
        assert [each.version for each in await second.versions("m") if each.holders] == [2]
        await shard.unpublish()
        assert torch.equal(shard.tensors["w"], torch.full((1000,), 2.0))


@pytest.mark.long
async def test_a_registration_that_nobody_waited_for_is_taken_over_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is stopped, the worker gives up, the agent wakes and registers: that is no other worker."""
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", SILENCE_S)
    async with running_hub(tmp_path, agents=1) as hub, hub.connected(JOB, 1) as (mine,):
        agent = hub.file.agents[0].pid
        stop(agent)
        try:
            with pytest.raises(AgentUnavailable, match="did not answer"):
                await mine.register("m", {"w": torch.full((1000,), 1.0)}, replica="trainer", timeout_s=SILENCE_S)
        finally:
            os.kill(agent, signal.SIGCONT)
        await there(mine)
        shard = await registered(mine)
        assert await shard.publish() == 1
        assert torch.equal(shard.tensors["w"], torch.full((1000,), 2.0))


async def there(hub: AsyncHub) -> None:
    """Return when the shard stands in the log."""
    async with asyncio.timeout(WAIT_S):
        while not await hub.replicas("m"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def registered(hub: AsyncHub) -> AsyncShard:
    """Bring the shard as soon as its last worker's release has come to its end."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await hub.register("m", {"w": torch.full((1000,), 2.0)}, replica="trainer")
            except ReplicaConflict:
                await asyncio.sleep(0.01)
