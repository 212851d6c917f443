"""From any sharding to any other, between memories of fake GPUs and the host: the published bytes, converted or not."""

import asyncio

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub
from tests.kit.shardings import Sharding, assert_holds, columns, mesh, model, published, registered, rows, whole

from tensorhub.arguments import Install

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

GPU = "GPU-fake-0"
ENDS = [(GPU, GPU), (GPU, "host"), ("host", GPU)]


@pytest.mark.parametrize(("source", "destination"), ENDS)
async def test_shards_of_one_layout_become_those_of_another(hub: RunningHub, source: str, destination: str) -> None:
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 3, model(0), memory=source)
        readers: list[tuple[Sharding, int, Install]] = [
            (columns, 2, "in-place"),
            (whole, 1, "staged"),
            (mesh, 4, "in-place"),
        ]
        engines = {
            how: await registered(hubs, how.__name__, how, count, model(0), install, destination)
            for how, count, install in readers
        }
        for version in (1, 2):
            assert await published(trainer, rows, model(version)) == version
            reads = [shard.replicate(version, timeout_s=WAIT_S) for some in engines.values() for shard in some]
            assert set(await asyncio.gather(*reads)) == {version}
            for how, engine in engines.items():
                assert_holds(engine, how, model(version))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("source", "destination"), ENDS)
async def test_elements_are_converted_as_torch_does(
    hub: RunningHub, source: str, destination: str, dtype: torch.dtype
) -> None:
    values = {name: tensor for name, tensor in model(7).items() if tensor.dtype is torch.float32}
    cast = {name: tensor.to(dtype) for name, tensor in values.items()}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 3, values, memory=source)
        engine = await registered(hubs, "engine", columns, 2, cast, memory=destination)
        assert await published(trainer, rows, values) == 1
        assert set(await asyncio.gather(*(shard.replicate(1, timeout_s=WAIT_S) for shard in engine))) == {1}
        assert_holds(engine, columns, cast)
