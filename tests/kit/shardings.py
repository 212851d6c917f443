"""Shardings of all kinds for real replicas: what a shard has of a model's tensors, and whether it holds just that."""

import asyncio
from collections.abc import Callable, Mapping

import torch

from tensorhub import AsyncHub, AsyncShard, TensorSpec
from tensorhub.arguments import Install

Box = tuple[slice, ...]
Sharding = Callable[[str, torch.Tensor, int, int], Box | None]
"""Which box of a tensor a shard has: (name, tensor, shard, shards); None: it has none of it."""


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
    tensors: Mapping[str, torch.Tensor], how: Sharding, shard: int, shards: int
) -> dict[str, tuple[torch.Tensor, Box]]:
    boxes = {name: how(name, tensor, shard, shards) for name, tensor in tensors.items()}
    return {name: (tensors[name][box], box) for name, box in boxes.items() if box is not None}


def specs(tensors: Mapping[str, torch.Tensor], how: Sharding, shard: int, shards: int) -> dict[str, TensorSpec]:
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
    hubs: list[AsyncHub],
    replica: str,
    how: Sharding,
    shards: int,
    tensors: Mapping[str, torch.Tensor],
    install: Install = "in-place",
    memory: str = "host",
) -> list[AsyncShard]:
    return [
        await hubs[shard % len(hubs)].register(
            "m",
            specs(tensors, how, shard, shards),
            replica=replica,
            shard=shard,
            shards=shards,
            install=install,
            memory=memory,
        )
        for shard in range(shards)
    ]


async def published(shards: list[AsyncShard], how: Sharding, tensors: Mapping[str, torch.Tensor]) -> int:
    for number, shard in enumerate(shards):
        for name, (part, _) in cut(tensors, how, number, len(shards)).items():
            shard.tensors[name].copy_(part)
    versions = await asyncio.gather(*(shard.publish() for shard in shards))
    return versions[0]


def assert_holds(shards: list[AsyncShard], how: Sharding, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare every byte of every shard with its part of the model."""
    for number, shard in enumerate(shards):
        for name, (part, _) in cut(tensors, how, number, len(shards)).items():
            found = shard.tensors[name].contiguous().flatten().view(torch.uint8)
            assert torch.equal(found, part.contiguous().flatten().view(torch.uint8)), (number, name)
