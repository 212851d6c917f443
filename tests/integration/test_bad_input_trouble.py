"""Where a part of the hub is missing or memory has run out, calls end with one line that says so; then work goes on.

Each test has a hub of its own, for it takes something away from it.
"""

import asyncio
import gc
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.hubs import RunningHub, assert_same_bytes, catalog_of, held_hub, running_hub, until_held
from tests.stopping import stop

import tensorhub
from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection.activity import gather_activity

MIB = 1024 * 1024


@asynccontextmanager
async def one_line(error: type[Exception], *words: str) -> AsyncIterator[None]:
    with pytest.raises(error) as raised:
        yield
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


async def test_no_hub_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_DIR", str(tmp_path))
    async with one_line(tensorhub.AgentUnavailable, "there is no hub in", "tensorhub up"):
        await tensorhub.connect_async("job")
    async with one_line(tensorhub.AgentUnavailable, "there is no agent 'agent-7'"):
        await tensorhub.connect_async("job", agent="agent-7")
    async with one_line(tensorhub.AgentUnavailable, "nobody.sock"):
        await tensorhub.connect_async("job", agent=tmp_path / "nobody.sock", timeout_s=0.3)


@pytest.mark.long
async def test_an_agent_that_is_away(tmp_path: Path) -> None:
    """Calls on its shards end at their bound; the questions still have answers; then all goes on."""
    async with running_hub(tmp_path / "hub") as hub, hub.connected("job") as (here, there):
        trainer = await here.register("m", {"w": torch.ones(1000)}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros(1000)}, replica="reader")
        await trainer.publish(1)
        stop(hub.file.agents[1].pid)
        try:
            async with one_line(tensorhub.TensorHubError):
                await reader.replicate(timeout_s=0.5)
            async with one_line(tensorhub.AgentUnavailable, "agent"):
                await tensorhub.connect_async("job", agent=hub.file.agents[1].socket, timeout_s=0.5)
            assert [each.version for each in await here.versions("m")] == [1]
        finally:
            os.kill(hub.file.agents[1].pid, signal.SIGCONT)
        assert await until_replicated(reader) == 1
        assert_same_bytes(reader.tensors, {"w": torch.ones(1000)})


async def until_replicated(shard: tensorhub.AsyncShard) -> int:
    """Replicate once the shard is free again: a call that was given up goes on at the agent for a while."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(tensorhub.ReplicaConflict, tensorhub.AgentUnavailable, tensorhub.VersionUnavailable):
                return await shard.replicate(timeout_s=5)
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_nats_that_is_away(tmp_path: Path) -> None:
    """Without NATS a call ends at its bound, and what it asked for does not happen later behind the caller's back."""
    async with running_hub(tmp_path / "hub") as hub, hub.connected("job") as (here, _):
        trainer = await here.register("m", {"w": torch.ones(1000)}, replica="trainer")
        await here.versions("m")
        stop(hub.file.nats_pid)
        try:
            async with one_line(tensorhub.RegistryUnavailable):
                await here.versions("m", timeout_s=0.5)
            async with one_line(tensorhub.TensorHubError):
                await trainer.publish(1, timeout_s=0.5)
        finally:
            os.kill(hub.file.nats_pid, signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            while trainer.version is None:
                with suppress(tensorhub.TensorHubError):
                    await trainer.publish(2, timeout_s=5)
        assert trainer.version == 2
        assert [each.version for each in await here.versions("m") if each.holders] == [2]


@pytest.mark.long
async def test_memory_that_is_all_taken(tmp_path: Path) -> None:
    """An agent takes no more than it was told; what it holds stays, and there is room again after a release."""
    async with (
        running_hub(tmp_path / "hub", TENSORHUB_MEMORY_BYTES_MAX="8MiB") as hub,
        hub.connected("job", agents=1) as (here,),
    ):
        await assert_exhausted_then_room(hub, here)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
async def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    """A full /dev/shm is an error at register, and no SIGBUS later."""
    shm = tmp_path / "shm"
    shm.mkdir()
    if await run("mount", "-t", "tmpfs", "-o", "size=8m", "tensorhub-test", str(shm)):
        pytest.skip("mounting is not allowed here")
    try:
        async with (
            running_hub(tmp_path / "hub", TENSORHUB_SHM_DIR=str(shm), TENSORHUB_MEMORY_BYTES_MAX="1GiB") as hub,
            hub.connected("job", agents=1) as (here,),
        ):
            await assert_exhausted_then_room(hub, here)
    finally:
        assert not await run("umount", "-l", str(shm))


async def run(*command: str) -> int:
    return await (await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)).wait()


async def assert_exhausted_then_room(hub: RunningHub, here: tensorhub.AsyncHub) -> None:
    pid = hub.file.agents[0].pid
    first = await here.register("m", {"w": torch.ones(5 * MIB, dtype=torch.uint8)}, replica="first")
    await first.publish(1)
    before = await catalog_of(hub, "job")
    async with one_line(tensorhub.MemoryExhausted, "release"):
        await here.register("m", {"w": torch.ones(5 * MIB, dtype=torch.uint8)}, replica="second")
    async with one_line(tensorhub.MemoryExhausted):
        await here.register("m", {"w": tensorhub.TensorSpec((2**50,), torch.uint8)}, replica="third")
    assert await catalog_of(hub, "job") == before
    assert_same_bytes(first.tensors, {"w": torch.ones(5 * MIB, dtype=torch.uint8)})
    await first.release()
    # Tensors stay valid as long as somebody refers to them, and so does the memory that they stand in.
    del first
    gc.collect()
    second = await here.register("m", {"w": torch.zeros(5 * MIB, dtype=torch.uint8)}, replica="second")
    assert await second.publish(2) == 2
    assert hub.file.agents[0].pid == pid


@pytest.mark.long
async def test_shard_that_a_failed_fill_left_partial(tmp_path: Path) -> None:
    """The only source is killed in the middle of a read: what stands there then is no version and can't become one.

    The reader's agent copies no further before it has noticed that, and the source's comes back only after the read
    has failed.
    """
    async with (
        held_hub(tmp_path, "copying", TENSORHUB_SOURCES_LOST_S="0", TENSORHUB_COPY_THREADS="1") as hub,
        hub.connected("job") as (here, there),
    ):
        spec = {"w": tensorhub.TensorSpec((64 * MIB,), torch.uint8)}
        trainer = await here.register("m", spec, replica="trainer")
        trainer.tensors["w"].random_(generator=torch.Generator().manual_seed(1))
        reader = await there.register("m", spec, replica="reader")
        version = await trainer.publish()
        read = asyncio.create_task(reader.replicate(version))
        await until_held(tmp_path)
        assert await phases(hub) == ["open"]
        os.kill(hub.file.agents[0].pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while await phases(hub) == ["open"]:
                pass
        (tmp_path / "go-on").touch()
        with pytest.raises(tensorhub.VersionUnavailable):
            await read
        (tmp_path / "may-return").touch()
        async with one_line(tensorhub.NotFilled, "m/reader"):
            await reader.publish(version + 1)
        assert reader.version is None
        assert version + 1 not in [each.version for each in await there.versions("m")]
        assert await until_replicated(reader) == version
        assert_same_bytes(reader.tensors, trainer.tensors)


async def phases(hub: RunningHub) -> list[str]:
    """Return how far each source of the reader's agent is, by that agent's word."""
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as bus:
        (agent,) = [each for each in await gather_activity(bus, "job", ["agent-1"]) if each.process == "agent-1"]
        return [source.phase for read in agent.reads for source in read.sources]
