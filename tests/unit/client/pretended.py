"""Ranks of a mesh: pretended ones, with torch's own fake process group, whose collectives do nothing, and a real one.

That real ones agree is shown by an example (tests/integration/test_examples.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended(rank: int, *shape: int, names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh of this shape."""
    dist.init_process_group("fake", rank=rank, world_size=torch.Size(shape).numel(), store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        # It takes the next rank's mesh for this one's: they are equal.
        _clear_sharding_prop_cache()


@contextmanager
def alone(folder: Path) -> Iterator[DeviceMesh]:
    """Be the only rank of a real mesh."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def stands_in(memory: bytearray, tensor: torch.Tensor) -> bool:
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return start <= tensor.data_ptr() < start + len(memory)
