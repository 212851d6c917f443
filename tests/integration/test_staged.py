"""`install="staged"` against a real hub: what the engine sees never changes but in the swap, whatever is killed."""

import asyncio
import os
import signal
import threading

import pytest
import torch
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import fork_program
from torch import nn

import tensorhub
from tensorhub_common.errors import LayoutMismatch, RoundTimeout

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 60.0


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), value), "b": torch.full((3,), value, dtype=torch.bfloat16), "e": torch.ones(0)}


def values(shard: tensorhub.AsyncShard) -> set[float]:
    return {value for tensor in shard.tensors.values() for value in tensor.float().unique().tolist()}


async def test_tensors_swap_and_stay_the_objects_that_they_are(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        engine = await there.register("policy", weights(0), replica="rollout", install="staged")
        tensors = dict(engine.tensors)
        addresses: set[int] = set()
        for version in range(1, 5):
            await trainer.publish(version)
            view = engine.tensors["w"].view(-1)
            before = view[0].item()
            assert await engine.replicate() == version
            assert engine.version == version
            assert values(engine) == {float(version)}
            assert all(engine.tensors[name] is tensor for name, tensor in tensors.items())
            assert view.unique().tolist() == [before]
            addresses.add(engine.tensors["w"].data_ptr())
            async with trainer.overwriting() as mine:
                for tensor in mine.values():
                    tensor.fill_(version + 1)
        assert len(addresses) == 2


async def test_a_module_swaps_beneath_its_parameters(hub: RunningHub) -> None:
    model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
    weight = engine_model.weight
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", model, replica="trainer")
        engine = await there.register("policy", engine_model, replica="rollout", install="staged")
        probe = torch.ones(1, 8)
        for version in (1, 2, 3):
            await trainer.publish(version)
            assert await engine.update() == version
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            async with trainer.overwriting():
                with torch.no_grad():
                    model.weight.add_(1)


async def test_nothing_changes_before_the_swap_and_the_lock_is_held_for_it(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("policy", weights(1), replica="trainer")
        await trainer.publish(1)
        with tensorhub.connect(job, agent=hub.file.agents[1].socket, nats=hub.file.nats) as sync_hub:
            engine = await asyncio.to_thread(
                sync_hub.register, "policy", weights(0), replica="rollout", install="staged"
            )
            step = threading.Lock()
            step.acquire()
            reading = asyncio.create_task(asyncio.to_thread(engine.replicate, swap_under=step))
            async with asyncio.timeout(WAIT_S):
                while (await here.replicas("policy"))[1].version != 1:  # noqa: ASYNC110 (it stands with the registry)
                    await asyncio.sleep(0.01)
            assert engine.tensors["w"].unique().tolist() == [0]
            assert engine.version is None
            step.release()
            assert await reading == 1
            assert engine.tensors["w"].unique().tolist() == [1]
            assert not step.locked()
            await asyncio.to_thread(engine.release)


async def test_a_round_that_fails_leaves_the_old_version_standing_and_served(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        parts = [
            await connection.register("policy", weights(0), replica="pair", shard=n, shards=2, install="staged")
            for n, connection in enumerate((here, there))
        ]
        for part in parts:
            for tensor in part.tensors.values():
                tensor.fill_(5)
        await asyncio.gather(*(part.publish(1) for part in parts))
        with pytest.raises(RoundTimeout):
            await parts[0].update(wait_s=0.5, timeout_s=1)
        assert [part.version for part in parts] == [1, 1]
        assert [values(part) for part in parts] == [{5.0}, {5.0}]


async def test_another_way_to_install_is_another_shard(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        engine = await here.register("policy", weights(0), replica="rollout", install="staged")
        await here.close(release=False)
        assert engine.version is None
    async with hub.connected(job) as (here, _):
        with pytest.raises(LayoutMismatch, match="install='staged'"):
            await here.register("policy", weights(0), replica="rollout")
        await here.register("policy", weights(0), replica="rollout", install="staged")


@pytest.mark.long
async def test_an_agent_that_is_killed_takes_both_segments_back(hub: RunningHub) -> None:
    """Whichever of the two the shard stands in: the first after an even number of swaps, the other after an odd one."""
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        engine = await there.register("policy", weights(0), replica="rollout", install="staged")
        await trainer.publish(1)
        assert await engine.replicate() == 1
        for version in (1, 2, 3):
            before = next(agent.pid for agent in hub.file.agents if agent.id == there.agent)
            os.kill(before, signal.SIGKILL)
            assert values(engine) == {float(version)}
            async with trainer.overwriting(publish=True) as mine:
                for tensor in mine.values():
                    tensor.fill_(version + 1)
            # The engine's call waits for its agent; what it has meanwhile is the old version, whole.
            assert await engine.replicate(version + 1, timeout_s=WAIT_S) == version + 1
            assert values(engine) == {float(version + 1)}


async def test_a_worker_that_is_killed_finds_the_version_that_was_swapped_in(hub: RunningHub) -> None:
    """An odd number of swaps: what it finds stands in the segment that was the spare one at first."""
    program = """
import os, sys, torch, tensorhub
hub = tensorhub.connect(sys.argv[1])
engine = hub.register("policy", {"w": torch.zeros(9)}, replica="rollout", install="staged")
print(engine.replicate(), engine.tensors["w"].unique().tolist(), flush=True)
os.kill(os.getpid(), 9)
"""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("policy", {"w": torch.full((9,), 5.0)}, replica="trainer")
        await trainer.publish(3)
        code, said, _ = await asyncio.to_thread(fork_program, hub, program, job)
        assert (code, said) == (-signal.SIGKILL, "3 [5.0]\n")
        engine = await here.register("policy", {"w": torch.zeros(9)}, replica="rollout", install="staged")
        assert engine.version == 3
        assert values(engine) == {5.0}
        async with trainer.overwriting(publish=True) as mine:
            mine["w"].fill_(6)
        assert await engine.update() == 4
        assert values(engine) == {6.0}
