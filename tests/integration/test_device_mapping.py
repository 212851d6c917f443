"""`install="mapped"` of memory of a GPU against a real hub, with fake GPUs.

Trainer and engine are in this process, or the engine in a worker of its own. Work on a fake GPU is done only when it is
waited for, or when chance has it.
"""

import asyncio
import ctypes
import signal
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.test_device_memory import GPU, OTHER, of_every_dtype
from tests.kit.fake_vllm_modules import FakeModel, backends_over_fakes, worker_of
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import assert_same_bytes, full, shown, write
from tests.kit.waiting import until
from torch import nn

import tensorhub
from tensorhub import DrainTimeout, LayoutMismatch, NotFilled, ReplicaConflict, VersionUnavailable
from tensorhub.arguments import Install
from tensorhub_common.devices.fake import Span, fake_device

pytestmark = pytest.mark.asyncio(loop_scope="session")
SHORT_S = 0.3


async def trainer_at(
    hub: tensorhub.AsyncHub, install: Install = "in-place", value: float = 1, memory: str = GPU
) -> tensorhub.AsyncShard:
    return await hub.register("m", full(value), replica="trainer", install=install, memory=memory)


async def engine_at(hub: tensorhub.AsyncHub, replica: str = "engine", memory: str = GPU) -> tensorhub.AsyncShard:
    return await hub.register("m", full(0), replica=replica, install="mapped", memory=memory)


async def assert_not_drained(shard: tensorhub.AsyncShard, timeout_s: float = SHORT_S) -> None:
    with pytest.raises(DrainTimeout, match="still mapped"):
        await shard.unpublish(timeout_s=timeout_s)


async def end(engine: tensorhub.AsyncShard) -> None:
    """Leave a trainer that has one memory what it may release."""
    engine.let_go()
    await engine.release()


async def overwrite(shard: tensorhub.AsyncShard, value: float) -> None:
    async with shard.overwriting(publish=True, timeout_s=WAIT_S):
        write(shard, full(value))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def queue_read(tensor: torch.Tensor, seen: list[float]) -> None:
    """Queue a kernel that reads a tensor's first number, and holds neither the tensor nor its storage."""
    address = tensor.untyped_storage().data_ptr()

    def read() -> None:
        seen.append(ctypes.c_float.from_address(address).value)

    spans = (Span(address, address + tensor.untyped_storage().nbytes(), writes=False),)
    fake_device(0).stream_of(0).run("a forward pass", read, spans)


async def test_the_published_memory_is_mapped_and_its_bytes_are_the_publishers(hub: RunningHub) -> None:
    """Of every dtype, and of a module, whose parameters stay the objects that they are."""
    async with hub.connected() as (here, there):
        given = of_every_dtype(0)
        trainer = await here.register("m", given, replica="trainer", memory=GPU)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        engine = await there.register("m", zeros, replica="engine", memory=GPU, install="mapped")
        tensors = dict(engine.tensors)
        await trainer.publish(4)
        assert await engine.replicate() == engine.version == 4
        assert_same_bytes(engine.tensors, given)
        assert all(engine.tensors[name] is tensor for name, tensor in tensors.items())
        report = engine.last_read
        assert report is not None
        assert [source.why for source in report.sources] == ["mapped from the same host (0 readers): nothing is copied"]
        replicas = [(each.replica, each.mapped, each.version) for each in await here.replicas("m")]
        assert replicas == [("trainer", False, 4), ("engine", True, 4)]
        with pytest.raises(NotFilled, match="publish there"):
            await engine.publish(5)
        await engine.release()
        assert_same_bytes(tensors, given)
        engine.let_go()


async def test_a_shard_without_a_byte_is_mapped_too(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        empty = {"e": torch.ones(0, 3)}
        trainer = await here.register("m", empty, replica="trainer", memory=GPU)
        engine = await there.register("m", empty, replica="engine", memory=GPU, install="mapped")
        for version in (1, 2):
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                pass
            assert await engine.update(timeout_s=WAIT_S) == engine.version == version
        await end(engine)


async def test_a_module_computes_with_its_trainers_memory(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
        trainer = await here.register("m", model, replica="trainer", memory=GPU, install="staged")
        engine = await there.register("m", engine_model, replica="engine", memory=GPU, install="mapped")
        weight, probe = engine_model.weight, torch.ones(1, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for version in (1, 2, 3):
            await trainer.publish()
            assert await engine.update() == version
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            model(probe).sum().backward()
            before = engine_model(probe).detach().clone()
            async with trainer.overwriting():
                optimizer.step()
            assert torch.equal(engine_model(probe), before)
            assert not torch.equal(engine_model(probe), model(probe))
        await end(engine)


async def test_an_engine_lets_go_of_the_only_memory_and_maps_the_next_version(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here), await engine_at(there)
        with pytest.raises(ReplicaConflict, match="only a shard with install='mapped'"):
            trainer.let_go()

        def is_asked_back() -> bool:
            return engine.is_asked_back

        await trainer.publish(1)
        assert await engine.replicate() == 1
        assert not is_asked_back()
        await assert_not_drained(trainer)
        assert is_asked_back()
        overwriting = asyncio.create_task(overwrite(trainer, 2))
        await until(is_asked_back, "the publisher waits")
        assert shown(engine) == {1.0}
        engine.let_go()
        assert (engine.version, shown(engine), is_asked_back()) == (None, {0.0}, False)
        await overwriting
        assert await engine.replicate(timeout_s=WAIT_S) == engine.version == 2
        assert (shown(engine), is_asked_back()) == ({2.0}, False)
        await end(engine)


async def test_a_staged_trainer_goes_on_in_its_other_memory(hub: RunningHub) -> None:
    """With two memories the one is asked back that shows the older version, once both are mapped."""
    async with hub.connected() as (here, there):
        trainer = await trainer_at(here, "staged")
        behind, ahead = [await engine_at(there, name) for name in ("behind", "ahead")]
        await trainer.publish(1)
        for engine in (behind, ahead):
            await engine.replicate()
        await overwrite(trainer, 2)
        assert await ahead.update() == 2
        assert (shown(behind), shown(ahead)) == ({1.0}, {2.0})
        assert (behind.is_asked_back, ahead.is_asked_back) == (False, False)
        overwriting = asyncio.create_task(overwrite(trainer, 3))
        await until(lambda: behind.is_asked_back, "the publisher waits")
        assert not ahead.is_asked_back
        behind.let_go()
        await overwriting
        assert (shown(ahead), shown(behind)) == ({2.0}, {0.0})
        for engine in (behind, ahead):
            assert await engine.update(timeout_s=WAIT_S) == 3
            assert shown(engine) == {3.0}
            await end(engine)


async def test_a_kept_view_of_an_older_version_keeps_its_memory(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here), await engine_at(there)
        await trainer.publish(1)
        await engine.replicate()
        kept = engine.tensors["w"].view(-1)
        engine.let_go()
        await assert_not_drained(trainer)
        assert kept.unique().tolist() == [1]
        del kept
        await overwrite(trainer, 2)
        assert await engine.update() == 2
        await end(engine)


async def test_what_is_queued_reads_the_version_that_it_was_queued_for(hub: RunningHub) -> None:
    """The engine has dropped its tensors already; its publisher waits until the kernels are done."""
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here), await engine_at(there)
        await trainer.publish()
        opened = []
        for version in range(1, 9):
            assert await engine.replicate(timeout_s=WAIT_S) == version
            opened.append(open_files())
            seen: list[float] = []
            queue_read(engine.tensors["w"], seen)
            engine.let_go()
            await overwrite(trainer, version + 1)
            assert seen == [float(version)]
        assert opened[-1] <= opened[1]
        await end(engine)


async def test_a_worker_of_vllm_loads_out_of_the_memory_of_its_gpu(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its trainer, which has one memory, is held up for no longer than the load takes."""
    job = new_job()
    with backends_over_fakes(monkeypatch) as (backend, _):
        async with hub.connected(job) as (here, _):
            trainer = await trainer_at(here)
            await trainer.publish()
            model = FakeModel((1000,), [])
            worker = worker_of(backend, model)
            monkeypatch.setenv("TENSORHUB_DIR", str(hub.directory))
            info = backend.HubInitInfo(job, "m", "vllm", agent=str(hub.file.agents[1].socket), memory=GPU)
            await asyncio.to_thread(worker.init_transfer_engine, info)
            for version in (1, 2, 3):
                await asyncio.to_thread(worker.receive_weights, backend.HubUpdateInfo(version))
                assert model.w.unique().tolist() == [version]
                await overwrite(trainer, version + 1)
            await trainer.unpublish(timeout_s=WAIT_S)
            with pytest.raises(VersionUnavailable):
                await asyncio.to_thread(worker.receive_weights, backend.HubUpdateInfo(4))
            assert model.w.unique().tolist() == [3]
            await asyncio.to_thread(worker.shutdown)


@pytest.mark.parametrize("ends", ["writes", "is killed"])
async def test_a_process_that_maps_ends(hub: RunningHub, ends: str) -> None:
    """A write kills the writer and changes nothing; one that is killed lets go."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await trainer_at(here)
        await trainer.publish(1)
        async with hub.worker(job, 1) as reader:
            await reader.ask("register_full", "m", "engine", 1000, 0.0, {"install": "mapped", "memory": GPU})
            assert await reader.ask("replicate", "engine") == 1
            assert await reader.ask("shown", "engine") == [1.0]
            await assert_not_drained(trainer)
            if ends == "writes":
                reader.say('["fill", "engine", 9.0]')
                assert await reader.code() == -signal.SIGSEGV
                assert shown(trainer) == {1.0}
        await overwrite(trainer, 2)
        engine = await engine_at(there)
        assert engine.version is None
        assert await engine.update() == 2
        assert shown(engine) == {2.0}
        await end(engine)


async def test_a_readers_agent_that_is_killed_changes_nothing_of_what_is_mapped(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here), await engine_at(there)
        await trainer.publish(1)
        await engine.replicate()
        killed = hub.kill("agent-1")
        await assert_not_drained(trainer)
        assert shown(engine) == {1.0}
        await hub.until_back("agent-1", killed)
        engine.let_go()
        await overwrite(trainer, 2)
        assert await engine.replicate(2, timeout_s=WAIT_S) == 2
        assert shown(engine) == {2.0}
        await end(engine)


async def test_what_is_mapped_outlives_its_holders_agent(hub: RunningHub) -> None:
    """The next one gets the memory from the trainer, with the locks of those who map it."""
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here), await engine_at(there)
        await trainer.publish(1)
        await engine.replicate()
        killed = hub.kill("agent-0")
        await hub.until_back("agent-0", killed)
        await until(lambda: trainer.version == 1)
        await assert_not_drained(trainer)
        assert shown(engine) == {1.0}
        engine.let_go()
        await overwrite(trainer, 2)
        assert await engine.replicate(2, timeout_s=WAIT_S) == 2
        assert shown(engine) == {2.0}
        await end(engine)


@pytest.mark.parametrize(
    ("source", "memory", "advice"),
    [
        (
            GPU,
            OTHER,
            f"maps that of {OTHER} alone: register the reader with memory='{GPU}', or with install='in-place'",
        ),
        (GPU, "host", f"maps that of the host alone: register the reader with memory='{GPU}'"),
        ("host", GPU, f"maps that of {GPU} alone: register the reader with memory='host'"),
    ],
)
async def test_other_memory_than_the_readers_is_refused_and_the_error_says_what_to_do(
    hub: RunningHub, source: str, memory: str, advice: str
) -> None:
    async with hub.connected() as (here, there):
        trainer, engine = await trainer_at(here, memory=source), await engine_at(there, memory=memory)
        await trainer.publish(1)
        with pytest.raises(VersionUnavailable, match=advice):
            await engine.replicate(1, timeout_s=WAIT_S)
        assert shown(engine) == {0.0}
        # Another holder whose memory can be mapped is found beside it.
        beside = await here.register("m", full(0), replica="beside", memory=memory)
        assert await beside.replicate(1, timeout_s=WAIT_S) == 1
        assert await engine.replicate(1, timeout_s=WAIT_S) == 1
        assert shown(engine) == {1.0}
        await end(engine)


async def test_a_gpu_that_the_reader_does_not_see_is_refused(hub: RunningHub) -> None:
    """And a shard that stands is not taken for one of other memory."""
    job = new_job()
    async with hub.connected(job) as (here, _), await hub.connect(job) as other:
        with pytest.raises(tensorhub.TensorHubError, match="no fake device 99"):
            await engine_at(here, memory="GPU-fake-99")
        # Nothing of that stands in the way of what is possible.
        await engine_at(here)
        with pytest.raises(LayoutMismatch, match=f"is in the memory of {GPU}, and was asked for in that of the host"):
            await engine_at(other, memory="host")
