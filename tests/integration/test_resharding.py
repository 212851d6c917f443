"""From any sharding to any other, by real processes, over both transports: the bytes are those that were published."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import torch
from tests.integration.hubs import RunningHub, running_hub
from tests.integration.transports import BOTH

import tensorhub
from tensorhub import AsyncHub, AsyncShard, TensorSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

Box = tuple[slice, ...]
Sharding = Callable[[str, torch.Tensor, int, int], Box | None]
"""Which box of a tensor a shard has: (name, tensor, shard, shards); None: it has none of it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BOTH)
async def hub(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), hosts=request.param) as running:
        yield running


def model(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of odd shapes and dtypes: scalars, empty ones, some beyond the length of a piece."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(1003, 2051, generator=generator),
        "layers.0.q": torch.randn(96, 77, generator=generator).to(torch.bfloat16),
        "layers.1.q": torch.randn(96, 77, generator=generator).to(torch.bfloat16),
        "experts": torch.randint(0, 256, (8, 33, 129), generator=generator, dtype=torch.uint8),
        "empty": torch.empty(0, 5),
        "norm": torch.randn(77, generator=generator, dtype=torch.float64),
        "scale": torch.tensor(float(seed)),
        "flags": torch.randint(0, 2, (13, 3), generator=generator, dtype=torch.bool),
    }


def chunk(size: int, shard: int, shards: int) -> slice:
    """Return a part of a dimension as torch.chunk cuts it: the last ones may be short or empty."""
    step = -(-size // shards)
    return slice(min(size, shard * step), min(size, (shard + 1) * step))


def whole(_: str, tensor: torch.Tensor, __: int, ___: int) -> Box:
    """Have everything, in each shard."""
    return (slice(None),) * tensor.ndim


def rows(_: str, tensor: torch.Tensor, shard: int, shards: int) -> Box | None:
    """Cut along the first dimension, as FSDP does; scalars stand in all shards."""
    return (chunk(tensor.shape[0], shard, shards), *(slice(None),) * (tensor.ndim - 1)) if tensor.ndim else ()


def columns(_: str, tensor: torch.Tensor, shard: int, shards: int) -> Box | None:
    """Cut along the last dimension, as TP cuts by columns."""
    return (*(slice(None),) * (tensor.ndim - 1), chunk(tensor.shape[-1], shard, shards)) if tensor.ndim else ()


def layers(name: str, tensor: torch.Tensor, shard: int, shards: int) -> Box | None:
    """Give each tensor to one shard, as PP does."""
    return whole(name, tensor, 0, 1) if len(name) % shards == shard else None


def mesh(_: str, tensor: torch.Tensor, shard: int, shards: int) -> Box | None:
    """Cut matrices along two dimensions, as FSDP and TP together do."""
    if tensor.ndim < 2:
        return whole("", tensor, 0, 1)
    half = shards // 2
    inner = (slice(None),) * (tensor.ndim - 2)
    return (chunk(tensor.shape[0], shard // 2, half), *inner, chunk(tensor.shape[-1], shard % 2, 2))


def cut(
    tensors: dict[str, torch.Tensor], how: Sharding, shard: int, shards: int
) -> dict[str, tuple[torch.Tensor, Box]]:
    """Return a shard's part of each tensor, and where it stands in the whole one."""
    boxes = {name: how(name, tensor, shard, shards) for name, tensor in tensors.items()}
    return {name: (tensors[name][box], box) for name, box in boxes.items() if box is not None}


def specs(tensors: dict[str, torch.Tensor], how: Sharding, shard: int, shards: int) -> dict[str, TensorSpec]:
    """Describe a shard's part."""
    return {
        name: TensorSpec(
            tuple(part.shape),
            part.dtype,
            global_shape=tuple(tensors[name].shape),
            offset=tuple(side.start or 0 for side in box),
        )
        for name, (part, box) in cut(tensors, how, shard, shards).items()
    }


async def registered(
    hubs: list[AsyncHub], replica: str, how: Sharding, shards: int, tensors: dict[str, torch.Tensor]
) -> list[AsyncShard]:
    """Register a replica, its shards on the hubs in turn."""
    return [
        await hubs[shard % len(hubs)].register(
            "m", specs(tensors, how, shard, shards), replica=replica, shard=shard, shards=shards
        )
        for shard in range(shards)
    ]


async def published(shards: list[AsyncShard], how: Sharding, tensors: dict[str, torch.Tensor]) -> int:
    """Write a version into a replica's memory, and publish it."""
    for number, shard in enumerate(shards):
        for name, (part, _) in cut(tensors, how, number, len(shards)).items():
            shard.tensors[name].copy_(part)
    versions = await asyncio.gather(*(shard.publish() for shard in shards))
    return versions[0]


def assert_holds(shards: list[AsyncShard], how: Sharding, tensors: dict[str, torch.Tensor]) -> None:
    """Compare every byte of every shard with its part of the model."""
    for number, shard in enumerate(shards):
        for name, (part, _) in cut(tensors, how, number, len(shards)).items():
            found = shard.tensors[name].contiguous().flatten().view(torch.uint8)
            assert torch.equal(found, part.contiguous().flatten().view(torch.uint8)), (number, name)


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
