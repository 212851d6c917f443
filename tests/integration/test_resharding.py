"""From any sharding to any other, by real processes, over both transports: the bytes are those that were published."""

import asyncio

import pytest
import torch
from tests.integration.cuts import (
    Sharding,
    assert_holds,
    columns,
    layers,
    mesh,
    model,
    published,
    registered,
    rows,
    whole,
)
from tests.integration.hubs import RunningHub
from tests.integration.transports import HUB_OF, UCXX_AND_AT_LENGTH_LOCAL

import tensorhub

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module", params=UCXX_AND_AT_LENGTH_LOCAL)
def hub(request: pytest.FixtureRequest) -> RunningHub:
    hub: RunningHub = request.getfixturevalue(HUB_OF[request.param])
    return hub


READERS: list[tuple[str, Sharding, int]] = [
    ("columns-2", columns, 2),
    ("whole", whole, 1),
    ("rows-3", rows, 3),
    ("mesh-4", mesh, 4),
    ("layers-2", layers, 2),
]


@pytest.mark.parametrize(("how", "shards"), [(rows, 4), (columns, 3), (mesh, 4), (layers, 3), (whole, 2)])
async def test_any_sharding_is_read_as_any_other(hub: RunningHub, how: Sharding, shards: int) -> None:
    """Version after version, readers of five shardings, all at once."""
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", how, shards, model(0))
        readers = {name: await registered(hubs, name, cutting, n, model(0)) for name, cutting, n in READERS}
        for version in (1, 2):
            assert await published(trainer, how, model(version)) == version
            everybody = [shard for some in readers.values() for shard in some]
            assert set(await asyncio.gather(*(shard.replicate(version) for shard in everybody))) == {version}
            for name, cutting, _ in READERS:
                assert_holds(readers[name], cutting, model(version))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
async def test_a_reader_of_another_dtype_gets_what_torch_makes_of_it(hub: RunningHub, dtype: torch.dtype) -> None:
    """float32 is published; readers of two shardings hold each element as `.to()` has it, bit for bit."""
    whole_model = {name: tensor for name, tensor in model(7).items() if tensor.dtype is torch.float32}
    cast = {name: tensor.to(dtype) for name, tensor in whole_model.items()}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 3, whole_model)
        readers = {how: await registered(hubs, how.__name__, how, 2, cast) for how in (columns, rows)}
        assert await published(trainer, rows, whole_model) == 1
        everybody = [shard for some in readers.values() for shard in some]
        assert set(await asyncio.gather(*(shard.replicate(1) for shard in everybody))) == {1}
        for how, shards in readers.items():
            assert_holds(shards, how, cast)


async def test_what_was_cast_is_not_cast_again(hub: RunningHub) -> None:
    """bfloat16 of a float32 version is no source for float16: rounding twice would be another number."""
    numbers = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(1))}
    half = {"w": numbers["w"].to(torch.bfloat16)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 1, numbers)
        rounded = await registered(hubs, "rounded", whole, 1, half)
        assert await published(trainer, rows, numbers) == 1
        assert await rounded[0].replicate(1) == 1
        assert_holds(rounded, whole, half)
        await trainer[0].release()
        reader = await registered(hubs, "reader", whole, 1, {"w": numbers["w"].to(torch.float16)})
        with pytest.raises(tensorhub.LayoutMismatch, match="'w' is float16 of global shape"):
            await reader[0].replicate(1, timeout_s=5)
