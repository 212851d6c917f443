"""Weights for tests over processes, and comparisons of every byte."""

from collections.abc import Mapping

import torch

from tensorhub import AsyncShard, TensorSpec

Tensors = Mapping[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def assert_same_bytes(found: Tensors, expected: Tensors) -> None:
    """Compare names, dtypes, shapes and every byte: NaNs are equal to themselves, and -0.0 is not 0.0."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(raw(found[name]), raw(tensor)), f"{name} differs"


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(77, 1003, generator=generator) for name in ("a", "b")}


WEIGHTS_BYTES = 2 * 77 * 1003 * 4


def full(value: float, count: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((count,), float(value))}


def write(shard: AsyncShard, tensors: Tensors) -> None:
    for name, tensor in shard.tensors.items():
        tensor.copy_(tensors[name])


def shown(shard: AsyncShard) -> set[float]:
    return {value for tensor in shard.tensors.values() for value in tensor.float().unique().tolist()}


def specs_of(tensors: Tensors) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in tensors.items()}
