"""Which elements of the whole tensor a DTensor's local part has: what its layout entry says.

Placements are applied to the mesh's dimensions one after another, as torch does. Nearly always what is left is a box;
where it is not (a strided shard whose splits don't cancel out) the entry says by parts what is where.

Always true of an entry: its shape is that of the local tensor, and each element belongs to one of the whole tensor's.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch

from tensorhub.specs import DTYPES, dtype_name
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape

Run = tuple[int, int, int]
"""Of one dimension: where neighbouring elements begin here, where in the whole, and how many they are."""


def is_dtensor(value: object) -> bool:
    """Tell whether `value` is a DTensor, without importing torch.distributed for those who don't use it."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def dtensor_entry(name: str, tensor: Any) -> TensorEntry:  # noqa: ANN401 (a DTensor, imported lazily)
    """Return the layout entry of a DTensor's local part. Raises `LayoutMismatch` naming one that has none."""
    mesh, whole, placements = tensor.device_mesh, tuple(tensor.shape), tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise LayoutMismatch(
            f"tensor {name!r} is a DTensor of partial sums; redistribute it to Shard or Replicate first"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatch(f"tensor {name!r} is a DTensor on a mesh without this process; leave it out of this shard")
    mine = _indices(whole, tuple(mesh.shape), coordinate, placements)
    shape, local = tuple(len(indices) for indices in mine), tuple(tensor._local_tensor.shape)  # noqa: SLF001 (no copy)
    if shape != local:
        raise LayoutMismatch(
            f"tensor {name!r} is a DTensor of shape {whole} placed as {placements}, so this rank's part has the shape "
            f"{shape}, but it has {local}; make it with distribute_tensor, or give its shape to DTensor.from_local"
        )
    dtype = dtype_name(f"tensor {name!r}", tensor.dtype)
    runs = [_runs(indices) for indices in mine]
    if all(len(found) <= 1 for found in runs):
        # An empty part may begin anywhere: at the end it fits into any whole.
        offset = tuple(found[0][1] if found else size for found, size in zip(runs, whole, strict=True))
        return TensorEntry(name, dtype, DTYPES[dtype], shape, whole, offset)
    parts = tuple(_part(name, whole, chosen) for chosen in product(*runs))
    return TensorEntry(name, dtype, DTYPES[dtype], shape, shape, (0,) * len(shape), parts)


def _indices(whole: Shape, mesh: Shape, coordinate: Sequence[int], placements: Sequence[Any]) -> list[torch.Tensor]:
    """Return in each dimension which elements of the whole tensor a rank has, in their order here."""
    # A caller may run under `torch.device("meta")`.
    mine = [torch.arange(size, device="cpu") for size in whole]
    for number, rank, placement in zip(mesh, coordinate, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            # Each piece of a strided shard is divided among the ranks, who have one after another what they got.
            pieces = _chunks(mine[dim], getattr(placement, "split_factor", 1))
            mine[dim] = torch.cat([_chunks(piece, number)[rank] for piece in pieces])
    return mine


def _chunks(indices: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut as `torch.chunk` does, but always into `count` parts: the last ones may be short or empty."""
    step = max(1, -(-len(indices) // count))
    return [indices[step * number : step * (number + 1)] for number in range(count)]


def _runs(indices: torch.Tensor) -> list[Run]:
    """Return the runs of neighbouring elements."""
    if not len(indices):
        return []
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    return [(start, int(indices[start]), stop - start) for start, stop in pairwise([0, *breaks, len(indices)])]


def _part(name: str, whole: Shape, runs: Sequence[Run]) -> Part:
    start, offset, extent = (tuple(numbers) for numbers in zip(*runs, strict=True))
    return Part(name, whole, offset, extent, start, extent)
