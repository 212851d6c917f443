"""Tensors on a GPU with hub memory of the host, over real processes; the GPU is fake, and does what is waited for."""

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.fake_gpu import FakeGpu, fake_gpu
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import assert_same_bytes, weights
from tests.kit.waiting import until, until_answer
from tests.unit.client.pretended import alone
from torch import nn
from torch.distributed.fsdp import fully_shard

import tensorhub
from tensorhub import LayoutMismatch, TensorSpec, VersionConflict
from tensorhub._agent.session import AgentSession
from tensorhub._agent.shards import AttachedShard
from tensorhub._tensors import host_copy
from tensorhub._tensors.host_copy import HostCopy
from tensorhub.arguments import Install
from tensorhub_common.devices.fake import FakeDevice, Schedule

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=["lazy", *(pytest.param(each, marks=pytest.mark.long) for each in ("eager", 5))])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    schedule: Schedule = random.Random(request.param) if isinstance(request.param, int) else request.param
    with fake_gpu(monkeypatch, FakeDevice(schedule=schedule)) as it:
        yield it


def mixed(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(40, 60, generator=generator)
    return {
        "dense": torch.randn(33, 7, generator=generator),
        "half": torch.randn(501, generator=generator).to(torch.bfloat16),
        "eight": torch.randn(64, generator=generator).to(torch.float8_e4m3fn),
        "strided": whole[:, ::3],
        "turned": torch.randn(5, 9, generator=generator).T,
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(float(seed)),
    }


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that lie as these do, without their values."""
    return {name: tensor.clone(memory_format=torch.preserve_format).zero_() for name, tensor in tensors.items()}


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_versions_go_from_gpu_to_gpu_and_the_tensors_stay_where_they_are(
    hub: RunningHub, gpu: FakeGpu, install: Install
) -> None:
    async with hub.connected() as (here, there):
        given, into = gpu.put_all(mixed(0)), gpu.put_all(zeros(mixed(0)))
        trainer = await here.register("m", given, replica="trainer")
        engine = await there.register("m", into, replica="engine", install=install)
        assert all(trainer.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in given.items())
        for version in range(1, 6):
            values = mixed(version)
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                for name, tensor in given.items():
                    if tensor.numel():
                        gpu.queue_write(tensor, values[name])
            seen: dict[str, torch.Tensor] = {}
            gpu.queue_read(into["dense"], seen, "before")
            assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == engine.version == version
            gpu.queue_read(into["dense"], seen, "after")
            gpu.device.stream_of(0).record().wait()
            assert torch.equal(seen["before"], mixed(version - 1)["dense"] if version > 1 else torch.zeros(33, 7))
            assert torch.equal(seen["after"], values["dense"])
            assert_same_bytes(into, values)


async def test_a_module_keeps_its_addresses_through_updates(hub: RunningHub, gpu: FakeGpu) -> None:
    async with hub.connected() as (here, there):
        model, engine_model = (
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        )
        gpu.put_module(model)
        gpu.put_module(engine_model)
        model[0].bias = model[1].bias
        engine_model[0].bias = engine_model[1].bias
        trainer = await here.register("m", model, replica="trainer")
        engine = await there.register("m", engine_model, replica="engine")
        addresses = [each.data_ptr() for each in engine_model.parameters()]
        optimizer, probe, outputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8), []
        for version in range(1, 4):
            await trainer.publish()
            assert await engine.update(wait_s=WAIT_S) == version
            assert torch.equal(engine_model(probe), model(probe))
            outputs.append(model(probe).detach())
            model(probe).square().sum().backward()
            async with trainer.overwriting():
                optimizer.step()
            assert [each.data_ptr() for each in engine_model.parameters()] == addresses
        assert all(not torch.equal(a, b) for a, b in pairwise(outputs))


async def test_a_module_under_fsdp_stays_on_its_gpu(hub: RunningHub, gpu: FakeGpu, tmp_path: Path) -> None:
    """Copies that FSDP has gathered are no obstacle to a publish, and don't outlive a read."""
    async with hub.connected() as (here, there):
        with alone(tmp_path) as mesh:
            model, follower = (nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)) for _ in range(2))
            for module in (model, follower):
                fully_shard(module[0], mesh=mesh)
                fully_shard(module, mesh=mesh)
                gpu.put_module(module)
            trainer = await here.register("m", model, replica="trainer")
            engine = await there.register("m", follower, replica="engine")
            optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8)
            before = follower(probe)
            for version in range(1, 4):
                model(probe).square().sum().backward()
                optimizer.step()
                # A pass without its backward leaves the last layer's parameters gathered, in both.
                expected = model(probe).detach()
                follower(probe)
                async with trainer.overwriting(publish=True):
                    pass
                assert await engine.update(wait_s=WAIT_S) == version
                assert torch.equal(follower(probe), expected)
                assert not torch.equal(expected, before)
                before = expected


async def test_the_trainer_may_write_while_its_version_is_read(hub: RunningHub, gpu: FakeGpu) -> None:
    """What is published is the copy: the tensors themselves are free at once."""
    async with hub.connected() as (here, there):
        given = gpu.put_all({"w": torch.full((1000,), 1.0)})
        trainer = await here.register("m", given, replica="trainer")
        engine = await there.register("m", gpu.put_all({"w": torch.zeros(1000)}), replica="engine")
        await trainer.publish(1)
        gpu.queue_write(given["w"], torch.full((1000,), 2.0))
        assert await engine.update(wait_s=WAIT_S) == 1
        assert engine.tensors["w"].unique().tolist() == [1.0]
        with pytest.raises(VersionConflict, match="still has version 1 published: unpublish 1 first"):
            await trainer.publish(2)
        assert await trainer.publish(1) == 1
        late = await there.register("m", gpu.put_all({"w": torch.zeros(1000)}), replica="late")
        assert await late.update(wait_s=WAIT_S) == 1
        assert late.tensors["w"].unique().tolist() == [1.0]
        await trainer.unpublish()
        assert await trainer.publish() == 2
        assert await engine.update(wait_s=WAIT_S) == 2
        assert engine.tensors["w"].unique().tolist() == [2.0]


async def test_what_comes_in_many_parts_is_published_whole(
    hub: RunningHub, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent hashes each part as it comes; a publication that was given up leaves nothing to the next one."""
    monkeypatch.setattr(host_copy, "COPIED_BYTES", 1 << 20)
    told: list[int] = []
    given_up: list[asyncio.Task[int]] = []
    loop = asyncio.get_running_loop()
    copied = AgentSession.copied

    def counted(session: AgentSession, attachment: AttachedShard, copy: int, nbytes: int) -> None:
        told.append(copy)
        copied(session, attachment, copy, nbytes)
        if given_up and told.count(copy) == 2:
            loop.call_soon_threadsafe(given_up.pop().cancel)

    monkeypatch.setattr(AgentSession, "copied", counted)
    async with hub.connected() as (here, there):
        given = gpu.put_all({f"t{n}": torch.zeros(1 << 20) for n in range(6)})
        trainer = await here.register("m", given, replica="trainer")
        engine = await there.register("m", zeros(given), replica="engine")
        for version in range(1, 4):
            async with trainer.overwriting():
                for n, tensor in enumerate(given.values()):
                    gpu.queue_write(tensor, torch.full((1 << 20,), 100.0 * version + n))
            if version == 2:
                publishing = asyncio.create_task(trainer.publish())
                given_up.append(publishing)
                with pytest.raises(asyncio.CancelledError):
                    await publishing
                async with trainer.overwriting():
                    gpu.queue_write(given["t0"], torch.full((1 << 20,), -1.0))
            assert await trainer.publish(10 * version) == 10 * version
            assert await engine.update(wait_s=WAIT_S) == 10 * version
            assert_same_bytes(engine.tensors, given)
        assert len(set(told)) == 4, "one copy for each call of publish"


async def test_a_read_that_is_cancelled_leaves_the_tensors_and_the_next_one_brings_it(
    hub: RunningHub, gpu: FakeGpu
) -> None:
    async with hub.connected() as (here, there):
        given, into = gpu.put_all(weights(1)), gpu.put_all(zeros(weights(1)))
        trainer = await here.register("m", given, replica="trainer")
        engine = await there.register("m", into, replica="engine")
        await trainer.publish(1)
        reading = asyncio.create_task(engine.replicate(1, timeout_s=WAIT_S))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not any(tensor.any() for tensor in into.values())
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    assert await engine.update(timeout_s=WAIT_S) in (1, None)
                except tensorhub.ReplicaConflict:
                    continue
                if engine.version == 1:
                    break
        assert_same_bytes(into, weights(1))


async def test_a_lock_is_held_only_while_the_tensors_change(hub: RunningHub, gpu: FakeGpu) -> None:
    await check_lock(hub, gpu, "in-place")


async def test_what_is_staged_comes_onto_the_gpu_without_the_lock(
    hub: RunningHub, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = threading.Event()
    stage = HostCopy.stage

    def noted(copy: HostCopy) -> None:
        stage(copy)
        staged.set()

    monkeypatch.setattr(HostCopy, "stage", noted)
    await check_lock(hub, gpu, "staged", staged)


async def check_lock(hub: RunningHub, gpu: FakeGpu, install: Install, until: threading.Event | None = None) -> None:
    """Read while another thread holds the engine's lock, and let go of it once the version, and `until`, has come."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", gpu.put_all(weights(1)), replica="trainer")
        with tensorhub.connect(job, agent=hub.file.agents[1].socket, nats=hub.file.nats) as sync_hub:
            into = gpu.put_all(zeros(weights(1)))
            engine = await asyncio.to_thread(sync_hub.register, "m", into, replica="engine", install=install)
            await trainer.publish(1)
            step = threading.Lock()
            step.acquire()
            reading = asyncio.create_task(asyncio.to_thread(engine.replicate, swap_under=step, timeout_s=WAIT_S))
            try:
                await until_answer(lambda: here.replicas("m"), lambda found: found[-1].version == 1)
                if until is not None:
                    assert await asyncio.to_thread(until.wait, WAIT_S)
                assert not any(tensor.any() for tensor in into.values())
            finally:
                step.release()
            assert await reading == 1
            assert_same_bytes(into, weights(1))
            await asyncio.to_thread(engine.release)


async def test_a_worker_that_comes_back_shows_what_the_hub_has(hub: RunningHub, gpu: FakeGpu) -> None:
    job, values = new_job(), weights(3)
    async with await hub.connect(job) as here:
        trainer = await here.register("m", gpu.put_all(weights(3)), replica="trainer")
        await trainer.publish(4)
        await here.close(release=False)
    async with await hub.connect(job) as here:
        given = gpu.put_all(zeros(values))
        trainer = await here.register("m", given, replica="trainer", resume="memory")
        assert trainer.version == 4
        assert_same_bytes(given, values)
        await here.close(release=False)
    async with await hub.connect(job) as here:
        given = gpu.put_all(weights(5))
        trainer = await here.register("m", given, replica="trainer", resume="values")
        assert trainer.version is None
        assert await trainer.publish() == 5
        engine = await here.register("m", gpu.put_all(zeros(values)), replica="engine")
        assert await engine.update(wait_s=WAIT_S) == 5
        assert_same_bytes(engine.tensors, weights(5))


async def test_tensors_of_both_kinds_are_one_shard(hub: RunningHub, gpu: FakeGpu) -> None:
    async with hub.connected() as (here, there):
        on_gpu, on_cpu = gpu.put(torch.full((10,), 1.0)), torch.full((3,), 2.0)
        trainer = await here.register("m", {"a": on_gpu, "b": on_cpu}, replica="trainer")
        specs: dict[str, torch.Tensor | TensorSpec] = {
            "a": gpu.put(torch.zeros(10)),
            "b": TensorSpec((3,), torch.float32),
        }
        engine = await there.register("m", specs, replica="engine")
        assert trainer.tensors["b"].data_ptr() != on_cpu.data_ptr()
        await trainer.publish()
        assert await engine.update(wait_s=WAIT_S) == 1
        assert {name: tensor.unique().tolist() for name, tensor in engine.tensors.items()} == {"a": [1.0], "b": [2.0]}
        async with trainer.overwriting(publish=True) as mine:
            mine["a"].fill_(3)
            mine["b"].fill_(4)
        assert await engine.update(wait_s=WAIT_S) == 2
        assert {name: tensor.unique().tolist() for name, tensor in engine.tensors.items()} == {"a": [3.0], "b": [4.0]}


async def test_what_is_not_possible_is_refused_in_one_sentence(hub: RunningHub, gpu: FakeGpu) -> None:
    async with hub.connected() as (here, _):
        with pytest.raises(LayoutMismatch, match=r"they show their own memory; take memory='device' to map"):
            await here.register("m", gpu.put_all(weights(1)), replica="a", install="mapped")
        both = {"a": gpu.put(torch.zeros(10)), "b": torch.zeros(3)}
        with pytest.raises(LayoutMismatch, match="some, as 'b', are not: those would change before the others"):
            await here.register("m", both, replica="a", install="staged")
        module = nn.Linear(3, 3)
        gpu.put_module(module)
        shard = await here.register("m", module, replica="a")
        module.weight = nn.Parameter(torch.ones(3, 3))
        with pytest.raises(LayoutMismatch, match="'weight' no longer lies where the hub reads it"):
            await shard.publish()


async def test_memory_is_unpinned_with_its_shard(hub: RunningHub, gpu: FakeGpu) -> None:
    async with hub.connected() as (here, _):
        for _ in range(3):
            shard = await here.register("m", gpu.put_all(weights(1)), replica="a")
            assert gpu.device.pinned_bytes
            await shard.publish()
            await shard.release()
            del shard
            # Whoever awaited its calls may refer to it for a turn of the event loop more.
            await until(lambda: gc.collect() >= 0 and gpu.device.pinned_bytes == 0)
