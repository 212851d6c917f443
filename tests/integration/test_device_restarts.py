"""Memory of GPUs whose agent is killed: the worker hands it to the agent's next process. The GPUs are fake."""

import asyncio
import errno
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.test_device_memory import GPU, OTHER, of_every_dtype
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import assert_same_bytes, full, shown, write
from tests.kit.waiting import until, until_answer

import tensorhub
from tensorhub import AgentUnavailable, TensorSpec, VersionUnavailable
from tensorhub._agent.session import AgentSession
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")


def open_files(process: int | str) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


async def restart(hub: RunningHub, worker: tensorhub.AsyncHub, agent: str = "agent-0") -> None:
    """Kill a worker's agent, and wait until the next one has all of the worker's shards."""
    link = worker._session._link
    epoch = link.epoch
    await hub.until_back(agent, hub.kill(agent))
    await until(lambda: link.epoch > epoch and all(each._attachment.handle is not None for each in worker._shards))


async def until_held(shard: tensorhub.AsyncShard, version: int) -> None:
    """Wait until the shard's agent has said that it holds the version."""
    await until(lambda: shard.version == version)


async def reconnect(hub: tensorhub.AsyncHub) -> None:
    """Have the connection to the agent end, and wait for the next one."""
    link = hub._session._link
    epoch = link.epoch
    assert link._connection is not None
    link._connection._end("a test has ended it")
    await until(lambda: link.epoch > epoch)


def places(shard: tensorhub.AsyncShard) -> list[int]:
    return [tensor.data_ptr() for tensor in shard.tensors.values()]


@asynccontextmanager
async def fresh(hub: tensorhub.AsyncHub, replica: str, memory: str = GPU) -> AsyncIterator[tensorhub.AsyncShard]:
    """Register an engine with nothing, and release it at the end."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in of_every_dtype(0).items()}
    engine = await hub.register("m", zeros, replica=replica, memory=memory)
    yield engine
    await engine.release(timeout_s=WAIT_S)


@pytest.mark.parametrize("install", ["in-place", pytest.param("staged", marks=pytest.mark.long)])
async def test_a_trainer_goes_on_in_its_memory_and_its_version_is_there_again(
    hub: RunningHub, install: Install
) -> None:
    """As often as its agent is killed, and no descriptor is left over."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", of_every_dtype(1), replica="trainer", memory=GPU, install=install)
        before, files = places(trainer), 0
        for version in range(1, 4):
            values = of_every_dtype(version)
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                write(trainer, values)
            await restart(hub, here)
            await until_held(trainer, version)
            assert_same_bytes(trainer.tensors, values)
            async with fresh(there, f"engine-{version}") as engine:
                assert await engine.replicate(version, timeout_s=WAIT_S) == version
                assert_same_bytes(engine.tensors, values)
            gc.collect()
            files = files or open_files("self")
            assert open_files("self") <= files
        assert install == "staged" or places(trainer) == before


@pytest.mark.long
async def test_all_shards_of_a_replica_come_back_also_where_another_agents_has_stayed(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        halves = {
            agent: {"w": TensorSpec((10,), torch.float32, (20,), (10 * number,))}
            for number, agent in enumerate((here, there))
        }
        shards = [
            await agent.register("m", half, replica="trainer", shard=number, shards=2, memory=memory)
            for number, ((agent, half), memory) in enumerate(zip(halves.items(), (GPU, OTHER), strict=True))
        ]
        for number, shard in enumerate(shards):
            shard.tensors["w"].fill_(number + 1)
        assert await asyncio.gather(*(shard.publish() for shard in shards)) == [1, 1]
        for worker, killed in ((here, "agent-0"), (there, "agent-1")):
            await restart(hub, worker, killed)
            for shard in shards:
                await until_held(shard, 1)
            engine = await there.register("m", {"w": TensorSpec((20,), torch.float32)}, replica=f"after-{killed}")
            assert await engine.replicate(1, timeout_s=WAIT_S) == 1
            assert engine.tensors["w"].tolist() == [1.0] * 10 + [2.0] * 10
            await engine.release()


async def test_a_staged_engine_holds_what_it_shows_and_others_read_it_there(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer")
        engine = await there.register("m", full(0), replica="engine", memory=GPU, install="staged")
        for version in (1, 2):
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                write(trainer, full(version))
            assert await engine.update(wait_s=WAIT_S) == version
        await restart(hub, there, "agent-1")
        await until_held(engine, 2)
        assert shown(engine) == {2.0}
        await trainer.release(timeout_s=WAIT_S)
        late = await here.register("m", full(0), replica="late")
        assert await late.replicate(2, timeout_s=WAIT_S) == 2
        assert shown(late) == {2.0}
        again = await here.register("m", full(3), replica="trainer")
        await again.publish()
        assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == 3
        assert shown(engine) == {3.0}


async def test_an_engine_that_reads_when_its_agent_is_killed_reads_on(hub: RunningHub) -> None:
    """What it has may be a part of a version, so it holds nothing, and is filled."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer")
        engine = await there.register("m", full(0), replica="engine", memory=GPU)
        await trainer.publish()
        assert await engine.update(wait_s=WAIT_S) == 1
        before = places(engine)
        updating = asyncio.create_task(engine.update(wait_s=WAIT_S, timeout_s=WAIT_S))
        await until_answer(lambda: there.replicas("m"), lambda found: len(found) > 1)
        await restart(hub, there, "agent-1")
        assert await updating in (1, None)
        async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
            write(trainer, full(2))
        assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == 2
        assert (shown(engine), places(engine)) == ({2.0}, before)


@pytest.mark.long
async def test_values_that_were_not_published_are_there_and_can_be(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(5), replica="trainer", memory=GPU)
        await restart(hub, here)
        trainer.tensors["w"].add_(1)
        assert await trainer.publish(timeout_s=WAIT_S) == 1
        engine = await there.register("m", full(0), replica="engine")
        assert await engine.replicate(1, timeout_s=WAIT_S) == 1
        assert shown(engine) == {6.0}


async def test_a_connection_that_breaks_leaves_the_shard_where_it_is(hub: RunningHub) -> None:
    """The agent has the memory: what it is handed is closed."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer", memory=GPU, install="staged")
        await trainer.publish()
        files = open_files(hub.pid("agent-0"))
        for _ in range(3):
            await reconnect(here)
            await until_held(trainer, 1)
            await until(lambda: open_files(hub.pid("agent-0")) <= files)
            engine = await there.register("m", full(0), replica="engine")
            assert await engine.replicate(1, timeout_s=WAIT_S) == 1
            await engine.release()


@pytest.mark.parametrize("install", ["staged", pytest.param("in-place", marks=pytest.mark.long)])
async def test_a_shard_whose_memory_is_not_taken_back_is_registered_again(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    """As by an agent of an earlier release."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer", memory=GPU, install=install)
        await trainer.publish()
        with monkeypatch.context() as patch:
            patch.setattr(
                AgentSession, "_registration", lambda _, shard, number, left_s: shard.spec.call(number, left_s)
            )
            await hub.until_back("agent-0", hub.kill("agent-0"))
            with pytest.raises(AgentUnavailable, match="came back without the memory"):
                await trainer.publish(2, timeout_s=WAIT_S)
        assert shown(trainer) == {1.0}
        again = await here.register("m", dict(trainer.tensors), replica="trainer", memory=GPU, install=install)
        for version in (2, 3):
            async with again.overwriting(publish=True, version=version, timeout_s=WAIT_S):
                write(again, full(version))
            engine = await there.register("m", full(0), replica=f"engine-{version}")
            assert await engine.replicate(version, timeout_s=WAIT_S) == version
            assert shown(engine) == shown(again) == {float(version)}


async def test_a_worker_without_descriptors_to_spare_keeps_its_shard(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it can't hand over at once it hands over later."""
    async with hub.connected(agents=1) as (here,):
        trainer = await here.register("m", full(1), replica="trainer", memory=GPU)
        await trainer.publish()
        dup, refused = os.dup, count(1)

        def scarce(fd: int) -> int:
            if next(refused) in (2, 3):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return dup(fd)

        files = open_files("self")
        monkeypatch.setattr(os, "dup", scarce)
        await reconnect(here)
        await until(lambda: trainer._attachment.handle is not None)
        assert next(refused) > 3
        await until_held(trainer, 1)
        await until(lambda: open_files("self") <= files)


@pytest.mark.long
async def test_with_its_worker_the_memory_is_gone(hub: RunningHub) -> None:
    job = new_job()
    async with hub.worker(job) as worker:
        await worker.ask("register_full", "m", "trainer", 10, 1.0, {"memory": GPU})
        assert await worker.ask("publish", "trainer") == 1
        worker.signal(signal.SIGKILL)
        killed = hub.kill("agent-0")
    await hub.until_back("agent-0", killed)
    async with hub.connected(job) as (here, _):
        shard = await here.register("m", full(0), replica="trainer", memory=GPU)
        assert shard.version is None
        engine = await here.register("m", full(0), replica="engine")
        with pytest.raises(VersionUnavailable):
            await engine.replicate(1, timeout_s=WAIT_S)
