"""Versions between trainers and engines on a GPU, through a whole hub: both kinds of hub memory, both ways."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from tests.kit import shardings
from tests.kit.fake_vllm_modules import FakeModel, backends_over_fakes, worker_of
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.processes import WorkerError
from tests.kit.tensors import assert_same_bytes, specs_of
from tests.kit.waiting import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorhub
from tensorhub import AgentUnavailable, DrainTimeout
from tensorhub.arguments import Install
from tensorhub_common.devices.cuda import CudaDevice, cuda_device

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

WAIT_S = 60
MEMORIES = ["host", "device"]
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    folder: Path = tmp_path_factory.mktemp("hub")
    async with running_hub(folder, TENSORHUB_METRICS="0") as running:
        yield running


def values(seed: int, rows: int = 1000) -> dict[str, torch.Tensor]:
    """Return random bits of every dtype, on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = {}
    for dtype in DTYPES:
        bits = torch.randint(0, 256, (rows, 8 * 257), generator=generator, device="cuda", dtype=torch.uint8)
        made[str(dtype)] = bits.view(dtype)
    made["flag"] = torch.rand(5, generator=generator, device="cuda") > 0.5
    made["empty"] = torch.ones(0, 3, device="cuda")
    return made


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


async def registered(
    hub: tensorhub.AsyncHub, replica: str, tensors: dict[str, torch.Tensor], memory: str, install: Install = "in-place"
) -> tensorhub.AsyncShard:
    return await hub.register("m", tensors, replica=replica, memory=memory, install=install)


@pytest.mark.parametrize("install", ["in-place", "staged"])
@pytest.mark.parametrize("destination", MEMORIES)
@pytest.mark.parametrize("source", MEMORIES)
async def test_every_byte_comes_behind_what_was_queued(
    hub: RunningHub, source: str, destination: str, install: Install
) -> None:
    """The trainer's last writes are queued behind a long wait of the GPU, on a stream of its own, as is publishing."""
    async with hub.connected() as (here, there):
        trainer = await registered(here, "trainer", zeros(values(0)), source)
        engine = await registered(there, "engine", zeros(values(0)), destination, install)
        stream = torch.cuda.Stream()
        for version in range(1, 6):
            given = values(version)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                async with trainer.overwriting():
                    torch.cuda._sleep(200_000_000)
                    for name, tensor in trainer.tensors.items():
                        tensor.copy_(given[name])
                await trainer.publish()
            assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == version
            assert_same_bytes(engine.tensors, given)


@pytest.mark.parametrize("memory", MEMORIES)
async def test_what_an_engine_has_queued_reads_the_version_that_it_was_queued_for(hub: RunningHub, memory: str) -> None:
    async with hub.connected() as (here, there):
        trainer = await registered(here, "trainer", {"w": torch.zeros(1 << 20, device="cuda")}, memory)
        engine = await registered(there, "engine", {"w": torch.zeros(1 << 20, device="cuda")}, memory)
        for version in range(1, 6):
            async with trainer.overwriting(publish=True) as mine:
                mine["w"].fill_(version)
            torch.cuda._sleep(200_000_000)
            before = engine.tensors["w"].clone()
            assert await engine.update(wait_s=WAIT_S) == version
            after = engine.tensors["w"].clone()
            torch.cuda.synchronize()
            assert before.unique().tolist() == [version - 1.0]
            assert after.unique().tolist() == [float(version)]


@pytest.mark.parametrize("memory", MEMORIES)
async def test_a_module_under_fsdp_trains_and_follows(hub: RunningHub, memory: str, tmp_path: Path) -> None:
    """Copies that FSDP has gathered are no obstacle to a publish, and don't outlive a read."""
    if not dist.is_nccl_available():
        pytest.skip("FSDP on a GPU gathers by NCCL, which this torch lacks")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        async with hub.connected() as (here, there):
            mesh = init_device_mesh("cuda", (1,))
            model, follower = (nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 3)).cuda() for _ in range(2))
            for module in (model, follower):
                fully_shard(module[0], mesh=mesh)
                fully_shard(module, mesh=mesh)
            trainer = await here.register("m", model, replica="trainer", memory=memory)
            engine = await there.register("m", follower, replica="engine", memory=memory)
            optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 64, device="cuda")
            before = follower(probe)
            for version in range(1, 4):
                async with trainer.overwriting(publish=True):
                    model(probe).square().sum().backward()
                    optimizer.step()
                    expected = model(probe).detach()
                    follower(probe)
                assert await engine.update(wait_s=WAIT_S) == version
                assert torch.equal(follower(probe), expected)
                assert not torch.equal(expected, before)
                before = expected
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("memory", MEMORIES)
async def test_a_graph_that_was_captured_before_computes_with_the_new_weights(hub: RunningHub, memory: str) -> None:
    async with hub.connected() as (here, there):
        model, engine_model = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda()
        trainer = await here.register("m", model, replica="trainer", memory=memory)
        engine = await there.register("m", engine_model, replica="engine", memory=memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = torch.randn(16, 256, device="cuda")
        with torch.no_grad():
            engine_model(probe)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = engine_model(probe)
        for version in range(1, 6):
            await trainer.publish()
            assert await engine.update(wait_s=WAIT_S) == version
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(output, model(probe))
            model(probe).square().sum().backward()
            async with trainer.overwriting():
                optimizer.step()
            optimizer.zero_grad()


async def test_sync_and_async_engines_follow_one_trainer(hub: RunningHub) -> None:
    job = new_job()
    with tensorhub.connect(job, agent=hub.file.agents[0].socket, nats=hub.file.nats) as here:
        given = {"w": torch.zeros(1 << 22, device="cuda")}
        trainer = here.register("m", given, replica="trainer")
        with tensorhub.connect(job, agent=hub.file.agents[1].socket, nats=hub.file.nats) as there:
            engines = [
                there.register("m", {"w": torch.zeros(1 << 22, device="cuda")}, replica=memory, memory=memory)
                for memory in MEMORIES
            ]
            stream = torch.cuda.Stream()
            for version in range(1, 6):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(200_000_000)
                    given["w"].fill_(version)
                    with trainer.overwriting(publish=True):
                        pass
                for engine in engines:
                    assert engine.update(wait_s=WAIT_S) == version
                    assert engine.tensors["w"].unique().tolist() == [float(version)]


async def test_a_mapped_engine_shows_its_trainers_memory_and_keeps_it_until_its_kernels_are_done(
    hub: RunningHub,
) -> None:
    """The engine drops its tensors while what reads them is queued on a stream of its own behind a long wait."""
    async with hub.connected() as (here, there):
        given = values(0)
        trainer = await registered(here, "trainer", given, "device")
        engine = await registered(there, "engine", zeros(given), "device", "mapped")
        await trainer.publish()
        stream = torch.cuda.Stream()
        for version in range(1, 6):
            assert await engine.replicate(timeout_s=WAIT_S) == version
            assert all(tensor.is_cuda for tensor in engine.tensors.values() if tensor.numel())
            assert_same_bytes(engine.tensors, given)
            before = dict(given)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(500_000_000)
                seen = {name: tensor.clone() for name, tensor in engine.tensors.items()}
            engine.let_go()
            given = values(version)
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
                for name, tensor in mine.items():
                    tensor.copy_(given[name])
            stream.synchronize()
            assert_same_bytes(seen, before)
        await engine.release()


async def test_mapping_takes_no_memory_and_a_staged_trainer_need_not_wait(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await registered(here, "trainer", {"w": torch.zeros(1 << 28, device="cuda")}, "device", "staged")
        engine = await there.register(
            "m", specs_of(trainer.tensors), replica="engine", memory="device", install="mapped", timeout_s=WAIT_S
        )
        for version in range(1, 6):
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
                mine["w"].fill_(version)
            if version > 1:
                assert engine.tensors["w"].unique().tolist() == [version - 1.0], "until the engine updates"
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            taken = device_process_bytes()
            assert await engine.update(timeout_s=WAIT_S) == version
            assert device_process_bytes() <= taken + 64 * 2**20
        engine.let_go()
        await engine.release()


@pytest.mark.parametrize("ends", ["is killed", "writes"])
async def test_a_process_that_maps_the_trainers_memory_ends(hub: RunningHub, ends: str) -> None:
    """One that is killed lets go; a write is a fault of that process, and changes no byte."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await registered(here, "trainer", {"w": torch.full((1000,), 1.0, device="cuda")}, "device")
        await trainer.publish(1)
        async with hub.worker(job, 1) as reader:
            await reader.ask("register_full", "m", "engine", 1000, 0.0, {"install": "mapped", "memory": "device"})
            assert await reader.ask("replicate", "engine") == 1
            assert await reader.ask("shown", "engine") == [1.0]
            with pytest.raises(DrainTimeout, match="still mapped"):
                await trainer.unpublish(timeout_s=1)
            if ends == "writes":
                with suppress(WorkerError):
                    await reader.ask("fill", "engine", 9.0)
                # The write is queued: the call behind it tells of the fault at the latest.
                with pytest.raises(WorkerError):
                    await reader.ask("shown", "engine")
                assert trainer.tensors["w"].unique().tolist() == [1.0]
        async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
            mine["w"].fill_(2)
        assert trainer.tensors["w"].unique().tolist() == [2.0]


async def test_what_is_mapped_outlives_its_holders_agent(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await registered(here, "trainer", {"w": torch.full((1 << 20,), 1.0, device="cuda")}, "device")
        engine = await registered(there, "engine", {"w": torch.zeros(1 << 20, device="cuda")}, "device", "mapped")
        await trainer.publish(1)
        await engine.replicate()
        killed = hub.kill("agent-0")
        await hub.until_back("agent-0", killed)
        with pytest.raises(AgentUnavailable, match="register it again"):
            await trainer.unpublish(timeout_s=WAIT_S)
        again = await registered(here, "trainer", dict(trainer.tensors), "device")
        async with again.overwriting(publish=True, version=2, timeout_s=WAIT_S) as mine:
            mine["w"].fill_(2)
        assert engine.tensors["w"].unique().tolist() == [1.0]
        assert await engine.replicate(2, timeout_s=WAIT_S) == 2
        assert engine.tensors["w"].unique().tolist() == [2.0]
        engine.let_go()
        await engine.release()


async def test_a_worker_of_vllm_maps_and_loads_out_of_the_memory_of_its_gpu(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's modules are fake, and its loader copies on the current stream."""
    job = new_job()
    with backends_over_fakes(monkeypatch) as (backend, _):
        async with hub.connected(job) as (here, _):
            trainer = await registered(here, "trainer", {"w": torch.zeros(1 << 22, device="cuda")}, "device")
            model = FakeModel((1 << 22,), []).cuda()
            worker = worker_of(backend, model, device="cuda")
            monkeypatch.setenv("TENSORHUB_DIR", str(hub.directory))
            info = backend.HubInitInfo(job, "m", "vllm", agent=str(hub.file.agents[1].socket), memory="device")
            for version in (1, 2, 3):
                async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
                    mine["w"].fill_(version)
                if version == 1:
                    await asyncio.to_thread(worker.init_transfer_engine, info)
                await asyncio.to_thread(worker.receive_weights, backend.HubUpdateInfo(version))
                assert model.w.unique().tolist() == [version]
            await asyncio.to_thread(worker.shutdown)


def device_process_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("install", ["in-place", "staged"])
@pytest.mark.parametrize("memory", MEMORIES)
async def test_nothing_grows_over_many_updates(hub: RunningHub, memory: str, install: Install) -> None:
    updates = 1000
    async with hub.connected() as (here, there):
        given = {f"w{n}": torch.zeros(1 << 18, device="cuda") for n in range(8)}
        trainer = await registered(here, "trainer", given, memory)
        engine = await registered(there, "engine", zeros(given), memory, install)
        marks = []
        for version in range(1, updates + 1):
            async with trainer.overwriting(publish=True) as mine:
                for tensor in mine.values():
                    tensor.fill_(version)
            assert await engine.update(wait_s=WAIT_S) == version
            if version in (50, updates):
                assert all(tensor.unique().tolist() == [float(version)] for tensor in engine.tensors.values())
                gc.collect()
                torch.cuda.empty_cache()
                marks.append((device_process_bytes(), open_files(), resident_bytes()))
        (gpu_before, files_before, host_before), (gpu_after, files_after, host_after) = marks
        assert gpu_after <= gpu_before + 4 * 2**20
        assert files_after <= files_before + 2
        assert host_after <= host_before + 32 * 2**20


@pytest.mark.parametrize("memory", MEMORIES)
async def test_memory_is_given_back_when_shards_are_released(hub: RunningHub, memory: str, device: CudaDevice) -> None:
    async with hub.connected() as (here, _):
        gc.collect()
        torch.cuda.empty_cache()
        before = []
        for _ in range(6):
            shard = await registered(here, "trainer", {"w": torch.zeros(1 << 28, device="cuda")}, memory)
            await shard.publish()
            await shard.release()
            del shard
            gc.collect()
            torch.cuda.empty_cache()
            device.finish()
            before.append(device_process_bytes())
        # A thread takes the last mapping away, behind all work of the device.
        await until(lambda: device_process_bytes() <= min(before) + 64 * 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("source", "destination"), [("device", "device"), ("device", "host"), ("host", "device")])
async def test_shards_of_one_layout_and_dtype_become_those_of_another(
    hub: RunningHub, source: str, destination: str, dtype: torch.dtype
) -> None:
    values = {name: tensor for name, tensor in shardings.model(7).items() if tensor.dtype is torch.float32}
    cast = {name: tensor.to(dtype) for name, tensor in values.items()}
    where = {"device": f"{cuda_device(0).uuid}", "host": "host"}
    async with hub.connected() as hubs:
        trainer = await shardings.registered(hubs, "trainer", shardings.rows, 3, values, memory=where[source])
        engine = await shardings.registered(hubs, "engine", shardings.columns, 2, cast, memory=where[destination])
        assert await shardings.published(trainer, shardings.rows, values) == 1
        assert set(await asyncio.gather(*(shard.replicate(1, timeout_s=WAIT_S) for shard in engine))) == {1}
        for number, shard in enumerate(engine):
            part = shardings.cut(cast, shardings.columns, number, 2)
            assert_same_bytes(
                {name: tensor.cpu() for name, tensor in shard.tensors.items()},
                {name: part[name][0].contiguous() for name in shard.tensors},
            )


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_trainer_goes_on_in_its_memory_when_its_agent_is_killed(hub: RunningHub, install: Install) -> None:
    async with hub.connected() as (here, there):
        trainer = await registered(here, "trainer", zeros(values(0)), "device", install)
        free: list[int] = []
        for version in range(1, 4):
            given = values(version)
            async with trainer.overwriting(publish=True):
                for name, tensor in trainer.tensors.items():
                    tensor.copy_(given[name])
            link, killed = here._session._link, hub.kill("agent-0")
            epoch = link.epoch
            await hub.until_back("agent-0", killed)
            await until(lambda: link.epoch > epoch and trainer._attachment.handle is not None)  # noqa: B023 (it ends here)
            await until(lambda: trainer.version == version)  # noqa: B023 (it ends here)
            engine = await registered(there, f"engine-{version}", zeros(values(0)), "device")
            assert await engine.replicate(version, timeout_s=WAIT_S) == version
            assert_same_bytes(engine.tensors, given)
            assert_same_bytes(trainer.tensors, given)
            await engine.release()
            del engine
            gc.collect()
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] >= free[0] - (64 << 20), "each process of the agent has its context, and no more memory"
