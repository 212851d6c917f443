"""What a DTensor's layout entry says, against the values that torch itself gives each rank of a pretended mesh."""

from itertools import product

import pytest
import torch
from tests.unit.client.pretended import pretended
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tensorhub import mapping
from tensorhub._tensors.description import bind, describe
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry, segment_bytes


def entry_of(value: torch.Tensor) -> TensorEntry:
    (entry,) = describe({"a": value}).layout.tensors
    return entry


def rebuilt(entry: TensorEntry, whole: torch.Tensor) -> torch.Tensor:
    """Return what must stand in the shard, by the entry alone."""
    if not entry.parts:
        return whole[tuple(slice(at, at + size) for at, size in zip(entry.offset, entry.shape, strict=True))]
    found = torch.full(entry.shape, -1.0)
    for part in entry.parts:
        here = tuple(slice(at, at + size) for at, size in zip(part.start, part.shape, strict=True))
        found[here] = whole[tuple(slice(at, at + size) for at, size in zip(part.offset, part.extent, strict=True))]
    return found


PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    _StridedShard(0, split_factor=3),
    _StridedShard(1, split_factor=2),
]


@pytest.mark.long
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3, 2), (2, 1, 2)])
def test_every_placement_is_told_as_torch_means_it(mesh_shape: tuple[int, ...]) -> None:
    """Even, uneven and empty parts, several dimensions of mesh and tensor, strided shards that are boxes and not."""
    wholes = [torch.arange(1.0, 1 + rows * 3).view(rows, 3) for rows in (0, 1, 7, 8)]
    kinds = set()
    for rank in range(torch.Size(mesh_shape).numel()):
        with pretended(rank, *mesh_shape) as mesh:
            for placements, whole in product(product(PLACEMENTS, repeat=len(mesh_shape)), wholes):
                value = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                entry = entry_of(value)
                assert torch.equal(rebuilt(entry, whole), value.to_local()), (placements, whole.shape, rank)
                kinds.add("parts" if entry.parts else "box" if entry.nbytes else "nothing")
    assert kinds == {"parts", "box", "nothing"}


def test_scalars_and_ranks_outside_of_the_mesh() -> None:
    with pretended(3, 4) as mesh:
        scalar = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()], src_data_rank=None)
        assert (entry_of(scalar).shape, entry_of(scalar).parts) == ((), ())
        value = distribute_tensor(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
        with pytest.raises(LayoutMismatch, match="'a' is a DTensor on a mesh without this process"):
            entry_of(value)


def test_partial_sums_and_false_shapes_are_refused_by_name() -> None:
    with pretended(1, 4) as mesh:
        with pytest.raises(LayoutMismatch, match="'a' is a DTensor of partial sums"):
            entry_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        uneven = DTensor.from_local(torch.ones(5), mesh, [Shard(0)], shape=torch.Size((7,)), stride=(1,))
        with pytest.raises(LayoutMismatch, match=r"'a'.*part has the shape \(2,\), but it has \(5,\)"):
            entry_of(uneven)


def test_its_local_part_is_bound_and_a_meta_one_brings_no_values() -> None:
    with pretended(1, 2) as mesh:
        value = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)], src_data_rank=None)
        hollow = distribute_tensor(torch.empty(4, 3, device="meta"), mesh, [Shard(0)], src_data_rank=None)
        described = describe({"value": value, "meta": hollow})
        assert set(described.values) == {"value"}
        standing = bind(described, bytearray(segment_bytes(described.layout)))
        assert type(standing["value"]) is torch.Tensor
        assert torch.equal(standing["value"], value.to_local())
        fused = mapping.concat(mapping.tensor("q", mapping.share(4, 1, 2)), mapping.Padding())
        rules = mapping.Mapping(title="a test", rules=(mapping.Rule("value", fused),))
        (entry,) = describe({"value": value}, rules).layout.tensors
        assert [(part.name, part.start) for part in entry.parts] == [("", (0, 0))]


def test_a_mapping_is_laid_over_boxes_alone() -> None:
    with pretended(0, 2) as mesh:
        value = distribute_tensor(torch.ones(8, 2), mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
        rules = mapping.Mapping(title="a test", rules=(mapping.Rule("a", mapping.AS_IT_IS),))
        with pytest.raises(LayoutMismatch, match="'a' is a DTensor whose part of the whole is no single box"):
            describe({"a": value}, rules)
