"""`install="staged"` against a real hub: what the engine sees never changes but in the swap, whatever is killed."""

import asyncio
import threading
from typing import Final

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full, shown
from tests.kit.waiting import until
from torch import nn

import tensorhub
from tensorhub import LayoutMismatch, RoundTimeout
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")

STAGED: Final[tuple[Install, Install]] = ("in-place", "staged")


async def test_tensors_swap_and_stay_the_objects_that_they_are(hub: RunningHub) -> None:
    async with hub.pair(
        {**full(1), "b": torch.ones(3, dtype=torch.bfloat16), "e": torch.ones(0)}, installs=STAGED
    ) as it:
        tensors, addresses = dict(it.engine.tensors), set()
        for version in range(1, 5):
            await it.trainer.publish(version)
            view = it.engine.tensors["w"].view(-1)
            before = view[0].item()
            assert await it.engine.replicate() == it.engine.version == version
            assert shown(it.engine) == {float(version)}
            assert all(it.engine.tensors[name] is tensor for name, tensor in tensors.items())
            assert view.unique().tolist() == [before]
            addresses.add(it.engine.tensors["w"].data_ptr())
            async with it.trainer.overwriting() as mine:
                for tensor in mine.values():
                    tensor.fill_(version + 1)
        assert len(addresses) == 2


async def test_a_module_swaps_beneath_its_parameters(hub: RunningHub) -> None:
    model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
    weight, probe = engine_model.weight, torch.ones(1, 8)
    async with hub.pair(model, engine_model, installs=STAGED) as it:
        for version in (1, 2, 3):
            await it.trainer.publish(version)
            assert await it.engine.update() == version
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            async with it.trainer.overwriting():
                with torch.no_grad():
                    model.weight.add_(1)


async def test_nothing_changes_before_the_swap_and_the_lock_is_held_for_it(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        with tensorhub.connect(job, agent=hub.file.agents[1].socket, nats=hub.file.nats) as sync_hub:
            engine = await asyncio.to_thread(sync_hub.register, "m", full(0), replica="engine", install="staged")
            step = threading.Lock()
            step.acquire()
            reading = asyncio.create_task(asyncio.to_thread(engine.replicate, swap_under=step))

            async def is_ready() -> bool:
                return (await here.replicas("m"))[1].version == 1

            await until(is_ready)
            assert engine.tensors["w"].unique().tolist() == [0]
            assert engine.version is None
            step.release()
            assert await reading == 1
            assert engine.tensors["w"].unique().tolist() == [1]
            assert not step.locked()
            await asyncio.to_thread(engine.release)


async def test_a_round_that_fails_leaves_the_old_version_standing_and_served(hub: RunningHub) -> None:
    async with hub.connected() as hubs:
        parts = [
            await each.register("m", full(5), replica="pair", shard=n, shards=2, install="staged")
            for n, each in enumerate(hubs)
        ]
        await asyncio.gather(*(part.publish(1) for part in parts))
        with pytest.raises(RoundTimeout):
            await parts[0].update(wait_s=0.5, timeout_s=1)
        assert [(part.version, shown(part)) for part in parts] == [(1, {5.0})] * 2


async def test_another_way_to_install_is_another_shard(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        engine = await here.register("m", full(0), replica="engine", install="staged")
        await here.close(release=False)
        assert engine.version is None
    async with hub.connected(job) as (here, _):
        with pytest.raises(LayoutMismatch, match="install='staged'"):
            await here.register("m", full(0), replica="engine")
        await here.register("m", full(0), replica="engine", install="staged")


@pytest.mark.long
async def test_an_agent_that_is_killed_takes_both_segments_back(hub: RunningHub) -> None:
    """Whichever of the two the shard is in: the first after an even number of swaps, the other after an odd one."""
    async with hub.pair(full(1), installs=STAGED) as it:
        await it.trainer.publish(1)
        assert await it.engine.replicate() == 1
        for version in (1, 2, 3):
            hub.kill("agent-1")
            assert shown(it.engine) == {float(version)}
            assert await it.step(full(version + 1)) == version + 1
            # The engine's call waits for its agent; what it has meanwhile is the old version, whole.
            assert await it.engine.replicate(version + 1, timeout_s=WAIT_S) == version + 1
            assert shown(it.engine) == {version + 1.0}
