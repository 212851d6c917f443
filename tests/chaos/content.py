"""What stands in a shard at a version: bytes that are a pure function of (seed, version, shard, tensor).

Every eight bytes of a tensor differ between any two versions, so a mixture of versions never passes for one of them.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tensorhub import TensorSpec

MIB: Final = 1 << 20
WORD_BYTES: Final = 8
ODD: Final = 0x9E3779B97F4A7C15
WORD_MASK: Final = (1 << 64) - 1
Bytes = npt.NDArray[np.uint8]


class Content:
    """One shard's tensors: how they look, and what stands in them."""

    def __init__(self, seed: int, shard: int, shards: int, nbytes: int) -> None:
        self.specs = _specs(shard, shards, nbytes)
        self._bases: dict[str, npt.NDArray[np.uint64]] = {}
        for number, (name, spec) in enumerate(self.specs.items()):
            words = -(-_nbytes(spec) // WORD_BYTES)
            chance = np.random.default_rng([seed, shard, number])
            self._bases[name] = chance.integers(0, WORD_MASK, words, dtype=np.uint64, endpoint=True)

    def write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        for name, there in _each(tensors):
            there[:] = self._bytes(name, version)[: len(there)]

    def wrong(self, tensors: Mapping[str, torch.Tensor], version: int) -> str | None:
        """Say where the tensors are not those of a version, or None when every byte is."""
        for name, there in _each(tensors):
            expected = self._bytes(name, version)[: len(there)]
            if not np.array_equal(there, expected):
                at = np.flatnonzero(there != expected)
                return f"{len(at)} of {len(there)} bytes of {name} differ, the first at {at[0]}"
        return None

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(spec) for spec in self.specs.values())

    def _bytes(self, name: str, version: int) -> Bytes:
        # Multiplying by an odd number is one to one, so no two versions have the same key.
        return (self._bases[name] ^ np.uint64((version * ODD) & WORD_MASK)).view(np.uint8)


def _specs(shard: int, shards: int, nbytes: int) -> dict[str, TensorSpec]:
    """One large tensor cut by rows, some of other kinds, and the odd ones: 0-dim, empty, not a multiple of a word."""
    columns = 1024
    rows = max(1, nbytes // 2 // (4 * columns))
    layers = {f"layers.{number}.weight": TensorSpec((max(1, nbytes // 32),), "bfloat16") for number in range(8)}
    return {
        "embed": TensorSpec((rows, columns), "float32", (rows * shards, columns), (rows * shard, 0)),
        **layers,
        "odd": TensorSpec((1021,), "uint8"),
        "step": TensorSpec((), "int64"),
        "none": TensorSpec((0, 7), "float32"),
    }


def _nbytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, str(spec.dtype))
    return int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize


def _each(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Bytes]]:
    for name, tensor in tensors.items():
        if tensor.numel():
            yield name, tensor.reshape(-1).view(torch.uint8).numpy()
