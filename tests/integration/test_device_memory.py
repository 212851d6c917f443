"""Shards in the memory of GPUs, over real processes.

The GPUs are fake: memory that is passed on by descriptors alone, and work that is done only when it is waited for.
"""

import asyncio
from itertools import pairwise

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit import shardings
from tests.kit.fake_gpu import FakeGpu
from tests.kit.hubs import RunningHub
from tests.kit.tensors import assert_same_bytes, full, shown, weights, write
from torch import nn

import tensorhub
from tensorhub import LayoutMismatch, MemoryExhausted, TensorSpec
from tensorhub.arguments import Install
from tensorhub_common.devices.fake import fake_device

pytestmark = pytest.mark.asyncio(loop_scope="session")

GPU, OTHER = "GPU-fake-0", "GPU-fake-1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)


def of_every_dtype(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        str(dtype): torch.randint(0, 256, (33, 7 * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)
        for dtype in DTYPES
        if dtype is not torch.bool
    }
    return {**made, "flag": torch.rand(5, generator=generator) > 0.5, "empty": torch.ones(0, 3)}


async def registered(
    hub: tensorhub.AsyncHub, replica: str, tensors: dict[str, torch.Tensor], memory: str, install: Install = "in-place"
) -> tensorhub.AsyncShard:
    return await hub.register("m", tensors, replica=replica, memory=memory, install=install)


@pytest.mark.parametrize("install", ["in-place", "staged"])
@pytest.mark.parametrize(("source", "destination"), [(GPU, GPU), (GPU, OTHER), (GPU, "host"), ("host", GPU)])
async def test_versions_come_from_and_into_memory_of_a_gpu(
    hub: RunningHub, source: str, destination: str, install: Install
) -> None:
    async with hub.connected() as (here, there):
        values = of_every_dtype(0)
        trainer = await registered(here, "trainer", values, source)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        engine = await registered(there, "engine", zeros, destination, install)
        for version in range(1, 6):
            values = of_every_dtype(version)
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                write(trainer, values)
            assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == version
            assert_same_bytes(engine.tensors, values)
        assert engine.last_read is not None
        assert [each.transport for each in engine.last_read.sources] == ["local"]


async def test_a_module_moves_into_memory_of_a_gpu_and_trains_there(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
        trainer = await here.register("m", model, replica="trainer", memory=GPU)
        engine = await there.register("m", engine_model, replica="engine", memory=GPU)
        optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 8)
        outputs = []
        for version in range(1, 4):
            await trainer.publish()
            assert await engine.update(wait_s=WAIT_S) == version
            outputs.append(engine_model(probe).detach().clone())
            assert torch.equal(outputs[-1], model(probe))
            model(probe).sum().backward()
            async with trainer.overwriting():
                optimizer.step()
        assert all(not torch.equal(a, b) for a, b in pairwise(outputs))


async def test_many_pieces_come_by_way_of_two_sources(hub: RunningHub) -> None:
    """Several batches, of which an engine that is filled becomes a source too."""
    async with hub.connected() as (here, there):
        values = {name: torch.arange(3_000_000, dtype=torch.int64) * (number + 1) for number, name in enumerate("ab")}
        trainer = await registered(here, "trainer", values, GPU)
        await trainer.publish(1)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        engines = [await registered(there, f"engine-{n}", zeros, GPU) for n in range(2)]
        assert await asyncio.gather(*(engine.replicate(timeout_s=WAIT_S) for engine in engines)) == [1, 1]
        for engine in engines:
            assert_same_bytes(engine.tensors, values)
        await trainer.release(timeout_s=WAIT_S)
        late = await registered(here, "late", zeros, GPU)
        assert await late.replicate(1, timeout_s=WAIT_S) == 1
        assert_same_bytes(late.tensors, values)


async def test_tensors_outlive_their_shard(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        shard = await registered(here, "trainer", full(3), GPU)
        tensor = shard.tensors["w"]
        await shard.release(timeout_s=WAIT_S)
        del shard
    tensor.add_(1)
    assert tensor.unique().tolist() == [4.0]


async def test_the_memory_is_free_again_after_a_release(hub: RunningHub) -> None:
    """A hundred times over, more than the limit in all."""
    async with hub.connected() as (here, _):
        for value in range(20):
            shard = await registered(here, "trainer", full(value, 500_000), OTHER)
            await shard.publish()
            assert shown(shard) == {float(value)}
            await shard.release(timeout_s=WAIT_S)


async def test_a_worker_that_comes_back_finds_its_version(hub: RunningHub) -> None:
    job = f"device-{id(hub)}"
    values = weights(1)
    async with hub.connected(job) as (here, _):
        shard = await registered(here, "trainer", values, GPU)
        await shard.publish(7)
        await here.close(release=False)
    async with hub.connected(job) as (here, _), await hub.connect(job) as other:
        specs = {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in values.items()}
        shard = await here.register("m", specs, replica="trainer", memory=GPU)
        assert shard.version == 7
        assert_same_bytes(shard.tensors, values)
        with pytest.raises(
            LayoutMismatch, match="is in the memory of GPU-fake-0, and was asked for in that of the host"
        ):
            await other.register("m", specs, replica="trainer")


async def test_what_is_not_possible_is_refused_in_one_sentence(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        with pytest.raises(ValueError, match="memory is 'gpu'; possible are 'host', 'device', or the UUID of a GPU"):
            await registered(here, "a", full(1), "gpu")
        with pytest.raises(tensorhub.TensorHubError, match="no fake device 99"):
            await registered(here, "a", full(1), "GPU-fake-99")
        with pytest.raises(tensorhub.TensorHubError, match=r"NVIDIA driver|no GPU here is GPU-12"):
            await registered(here, "a", full(1), "GPU-12")
        huge = {"w": TensorSpec((2**41,), torch.uint8)}
        with pytest.raises(MemoryExhausted, match="TENSORHUB_DEVICE_BYTES_MAX"):
            await here.register("m", huge, replica="a", memory=GPU)
        # Nothing of that stands in the way of what is possible.
        shard = await registered(here, "a", full(1), GPU)
        await shard.publish(1)


@pytest.mark.long
@pytest.mark.parametrize(("source", "destination"), [(GPU, OTHER), (GPU, "host"), ("host", GPU)])
async def test_between_hosts_bytes_pass_through_the_hosts(
    hub_on_two_hosts: RunningHub, source: str, destination: str
) -> None:
    async with hub_on_two_hosts.connected() as (here, there):
        values = {**of_every_dtype(0), "large": torch.zeros(3_000_000, dtype=torch.int64)}
        trainer = await registered(here, "trainer", values, source)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        engine = await registered(there, "engine", zeros, destination)
        for version in range(1, 4):
            values = {**of_every_dtype(version), "large": torch.arange(3_000_000) * version}
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                write(trainer, values)
            assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == version
            assert_same_bytes(engine.tensors, values)
        assert engine.last_read is not None
        assert [each.transport for each in engine.last_read.sources] == ["ucxx"]


@pytest.mark.long
@pytest.mark.parametrize(("source", "destination"), [(GPU, OTHER), (GPU, "host"), ("host", GPU)])
async def test_between_hosts_layouts_may_differ(hub_on_two_hosts: RunningHub, source: str, destination: str) -> None:
    async with hub_on_two_hosts.connected() as hubs:
        trainer = await shardings.registered(hubs, "trainer", shardings.rows, 3, shardings.model(0), memory=source)
        engine = await shardings.registered(
            hubs, "engine", shardings.columns, 2, shardings.model(0), memory=destination
        )
        for version in (1, 2):
            assert await shardings.published(trainer, shardings.rows, shardings.model(version)) == version
            reads = [shard.replicate(version, timeout_s=WAIT_S) for shard in engine]
            assert set(await asyncio.gather(*reads)) == {version}
            shardings.assert_holds(engine, shardings.columns, shardings.model(version))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


async def test_the_agent_touches_memory_behind_what_the_caller_has_queued(hub: RunningHub) -> None:
    """A forward pass that is queued before `update` sees the old version; a step that is queued is published."""
    async with hub.connected() as (here, there):
        trainer, engine = (
            await registered(here, "trainer", full(0), GPU),
            await registered(there, "engine", full(0), GPU),
        )
        gpu = FakeGpu(fake_device(0))
        for version in range(1, 9):
            async with trainer.overwriting(timeout_s=WAIT_S):
                gpu.queue_write(trainer.tensors["w"], torch.full((1000,), float(version)))
            await trainer.publish()
            seen: dict[str, torch.Tensor] = {}
            gpu.queue_read(engine.tensors["w"], seen, "before")
            assert await engine.update(wait_s=WAIT_S) == version
            assert seen["before"].unique().tolist() == [version - 1.0]
            assert shown(engine) == {float(version)}
