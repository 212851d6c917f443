"""What each rank registers of DTensors and of a module under FSDP2, against the values that torch itself gives it."""

import mmap
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_gpu import FakeGpu, fake_gpu
from tests.unit.client.pretended import alone, pretended, stands_in
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tensorhub import mapping
from tensorhub._tensors.description import Description, bind, describe, rebind
from tensorhub._tensors.fsdp import Gathered
from tensorhub._tensors.host_copy import HostCopy
from tensorhub._tensors.segment_mapping import tensors_at
from tensorhub_common.devices.fake import FakeDevice
from tensorhub_common.errors import LayoutMismatch, NotInThisVersion
from tensorhub_common.layout.layout import Layout, TensorEntry, segment_bytes

RANKS = 4


def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))


def boxes(entry: TensorEntry) -> list[tuple[str, tuple[slice, ...], tuple[slice, ...]]]:
    """Return each global tensor's name, the box that stands here, and where it stands."""
    if not entry.parts:
        return [(entry.name, box(entry.offset, entry.shape), box((0,) * len(entry.shape), entry.shape))]
    return [
        (part.name, box(part.offset, part.extent), box(part.start, part.shape))
        for part in entry.parts
        if not part.is_padding
    ]


def put_together(shards: list[tuple[Layout, bytearray]], whole: dict[str, torch.Tensor]) -> None:
    """Check that the shards have each element of the whole tensors, with its value, and zeros beside them."""
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for layout, memory in shards:
        standing = tensors_at(layout, memory)
        for entry in layout.tensors:
            for name, there, here in boxes(entry):
                value = whole[name][there]
                assert torch.equal(standing[entry.name][here].reshape(value.shape), value), (name, there)
                seen[name][there] = True
                standing[entry.name][here] = 0
            assert not standing[entry.name].any()
    assert all(mask.all() for mask in seen.values())


# ------------------------------------------------------------------------------------------------------------ DTensors

PLACEMENTS: list[Placement] = [
    *(Replicate(), Shard(0), Shard(1)),
    *(_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)),
]


def spread(value: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def entry_of(value: torch.Tensor, names: mapping.Mapping | None = None) -> TensorEntry:
    (entry,) = describe({"a": value}, names).layout.tensors
    return entry


@pytest.mark.long
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3, 2), (2, 1, 2)])
def test_every_placement_is_told_as_torch_means_it(mesh_shape: tuple[int, ...]) -> None:
    """Even, uneven and empty parts, several dimensions of mesh and tensor, strided shards that are boxes and not."""
    wholes = [torch.arange(1.0, 1 + rows * 3).view(rows, 3) for rows in (0, 1, 7, 8)]
    kinds = set()
    for rank in range(torch.Size(mesh_shape).numel()):
        with pretended(rank, *mesh_shape) as mesh:
            for placements, whole in product(product(PLACEMENTS, repeat=len(mesh_shape)), wholes):
                value = spread(whole, mesh, *placements)
                entry = entry_of(value)
                found = torch.full(entry.shape, -1.0)
                for _, there, here in boxes(entry):
                    found[here] = whole[there]
                assert torch.equal(found, value.to_local()), (placements, whole.shape, rank)
                kinds.add("parts" if entry.parts else "box" if entry.nbytes else "nothing")
    assert kinds == {"parts", "box", "nothing"}


def test_what_is_no_part_of_a_whole_is_refused_by_name() -> None:
    as_it_is = mapping.Mapping(title="a test", rules=(mapping.Rule("a", mapping.AS_IT_IS),))
    with pretended(3, 4) as mesh:
        scalar = entry_of(spread(torch.tensor(2.0), mesh, Replicate()))
        assert (scalar.shape, scalar.parts) == ((), ())
        uneven = DTensor.from_local(torch.ones(5), mesh, [Shard(0)], shape=torch.Size((7,)), stride=(1,))
        strided = spread(torch.ones(16, 2), mesh, _StridedShard(0, split_factor=2))
        for value, names, said in (
            (spread(torch.ones(2), DeviceMesh("cpu", [0, 1]), Shard(0)), None, "on a mesh without this process"),
            (DTensor.from_local(torch.ones(2), mesh, [Partial()]), None, "of partial sums"),
            (uneven, None, r"part has the shape \(1,\), but it has \(5,\)"),
            (strided, as_it_is, "whose part of the whole is no single box"),
        ):
            with pytest.raises(LayoutMismatch, match=rf"'a'.*{said}"):
                entry_of(value, names)


def test_its_local_part_is_bound_and_a_meta_one_brings_no_values() -> None:
    with pretended(1, 2) as mesh:
        value = spread(torch.arange(12.0).view(4, 3), mesh, Shard(0))
        hollow = spread(torch.empty(4, 3, device="meta"), mesh, Shard(0))
        described = describe({"value": value, "meta": hollow})
        assert set(described.values) == {"value"}
        standing = bind(described, bytearray(segment_bytes(described.layout)))
        assert type(standing["value"]) is torch.Tensor
        assert torch.equal(standing["value"], value.to_local())
        fused = mapping.concat(mapping.tensor("q", mapping.share(4, 1, 2)), mapping.Padding())
        rules = mapping.Mapping(title="a test", rules=(mapping.Rule("a", fused),))
        assert [(part.name, part.start) for part in entry_of(value, rules).parts] == [("", (0, 0))]


# --------------------------------------------------------------------------------------------------------------- FSDP2


class Uneven(nn.Module):
    """Ten rows: 3, 3, 3 and 1 on four ranks; three elements: the last rank has none; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 10)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("steps", torch.tensor(7))
        with torch.no_grad():
            self.inner.weight.copy_(torch.arange(50.0).view(10, 5) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.scale.sum()
        return result


def sharded(mesh: DeviceMesh, **options: Any) -> Uneven:
    torch.manual_seed(0)
    module = Uneven()
    fully_shard(module, mesh=mesh, **options)
    return module


def bound(module: nn.Module, names: mapping.Mapping | None = None) -> tuple[Description, bytearray, dict[str, Any]]:
    described = describe(module, names)
    memory = bytearray(b"\x5a" * segment_bytes(described.layout))
    return described, memory, bind(described, memory)


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


@pytest.fixture
def only(tmp_path: Path) -> Iterator[DeviceMesh]:
    with alone(tmp_path) as mesh:
        yield mesh


def test_ranks_register_their_parts_and_together_the_whole() -> None:
    """Padding stands where FSDP has it, is declared, and is zero."""
    whole: dict[str, torch.Tensor] = {}
    shards, rows = [], []
    for rank in range(RANKS):
        with pretended(rank, RANKS) as mesh:
            torch.manual_seed(0)
            module = Uneven()
            whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            fully_shard(module.inner, mesh=mesh)
            fully_shard(module, mesh=mesh)
            parameters = dict(module.named_parameters())
            described, memory, shown = bound(module)
            for name, parameter in parameters.items():
                assert module.get_parameter(name) is parameter
                assert shown[name].shape == local(parameter).shape
                assert local(parameter).numel() == 0 or stands_in(memory, local(parameter))
            rows.append(shown["inner.weight"].shape[0])
            standing = tensors_at(described.layout, memory)
            assert (standing["inner.weight"].shape, standing["scale"].shape) == ((3, 5), (1,))
            shards.append((described.layout, memory))
    assert rows == [3, 3, 3, 1]
    put_together(shards, whole)


@pytest.mark.parametrize("rank", [0, 3])
def test_fsdp_gathers_from_hub_memory(rank: int) -> None:
    """Its buffer is hub memory too, and stays so after what FSDP does before its first forward pass."""
    with pretended(rank, RANKS) as mesh:
        module = sharded(mesh)
        described, memory, _ = bound(module)
        for books in described.managed.books:
            books.reset_sharded_param()
            assert stands_in(memory, books._sharded_param_data)
            assert books._sharded_param_data.numel() == books.padded_sharded_param_size.numel()
            assert local(books.sharded_param).untyped_storage().data_ptr() == books._sharded_param_data.data_ptr()
        other = bytearray(len(memory))
        shown = described.shown(tensors_at(described.layout, memory))
        rebind(described.without_values(), shown, tensors_at(described.layout, other))
        for name, parameter in module.named_parameters():
            assert local(parameter).numel() == 0 or stands_in(other, local(parameter))
            assert local(parameter).numel() == 0 or stands_in(other, shown[name])
        assert all(stands_in(other, books._sharded_param_data) for books in described.managed.books)


def test_training_goes_on_in_hub_memory(only: DeviceMesh) -> None:

    def trained(*, in_hub: bool) -> torch.Tensor:
        module = sharded(only)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        shown = bound(module)[2] if in_hub else {}
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        weight = local(module.inner.weight).clone()
        assert not in_hub or torch.equal(shown["inner.weight"], weight)
        return weight

    assert torch.equal(trained(in_hub=True), trained(in_hub=False))


def test_a_module_that_shows_gathered_parameters_is_resharded(only: DeviceMesh) -> None:
    """After a forward pass alone the root shows whole tensors; and after a read it must not compute with old ones."""
    module = sharded(only)
    asked = torch.ones(2, 5)
    module(asked)
    assert not isinstance(module.scale, DTensor)
    described, _, shown = bound(module)
    assert isinstance(module.scale, DTensor)
    assert module(asked).any()
    for tensor in shown.values():
        tensor.zero_()
    Gathered(described.managed.parts, lambda: None).show()
    assert not module(asked).any()


def test_what_fsdp_puts_elsewhere_is_refused_and_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(3, RANKS) as mesh:
        module = sharded(mesh)
        before = {name: local(parameter) for name, parameter in module.named_parameters()}
        described = describe(module)
        last = described.members[-2].books
        buffers = [books._sharded_param_data for books in described.managed.books]

        def elsewhere() -> None:
            last.sharded_param._local_tensor = torch.zeros(1)

        monkeypatch.setattr(last, "reset_sharded_param", elsewhere)
        with pytest.raises(NotInThisVersion, match="puts parameters into memory of its own"):
            bind(described, bytearray(segment_bytes(described.layout)))
        assert all(local(parameter) is before[name] for name, parameter in module.named_parameters())
        assert all(books._sharded_param_data is buffers[n] for n, books in enumerate(described.managed.books))


def test_parameters_that_a_checkpoint_has_replaced_move_with_their_buffers() -> None:
    """What a loader gives has no padding behind it."""
    for rank in range(RANKS):
        with pretended(rank, RANKS) as mesh:
            module = sharded(mesh)
            state = {
                name: DTensor.from_local(local(each).clone(), mesh, [Shard(0)], shape=each.shape, stride=each.stride())
                for name, each in module.named_parameters()
            }
            module.load_state_dict(state, strict=False, assign=True)
            described, memory, _ = bound(module)
            for books in described.managed.books:
                books.reset_sharded_param()
                assert stands_in(memory, books._sharded_param_data)
                assert local(books.sharded_param).numel() == 0 or stands_in(memory, local(books.sharded_param))


# ---------------------------------------------------------------------------- FSDP2 on a GPU, hub memory of the host


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch, FakeDevice()) as it:
        yield it


def copied(gpu: FakeGpu, module: nn.Module) -> tuple[Description, bytearray, HostCopy]:
    """Register a module that stays on its GPU; the memory is a copy of the segment as it is after a publish."""
    gpu.put_module(module)
    described = describe(module)
    segment = mmap.mmap(-1, segment_bytes(described.layout))
    attachment: Any = SimpleNamespace(found=None, fresh=True, version=None, spec=SimpleNamespace(where="it", device=""))
    copy = HostCopy(described, segment, attachment)
    copy.bring_to_host(copy.queued())
    return described, bytearray(segment), copy


def test_ranks_on_gpus_publish_their_parts_and_stay_where_they_are(gpu: FakeGpu) -> None:
    whole: dict[str, torch.Tensor] = {}
    shards = []
    for rank in range(RANKS):
        with pretended(rank, RANKS) as mesh:
            torch.manual_seed(0)
            module = Uneven()
            whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            fully_shard(module.inner, mesh=mesh)
            fully_shard(module, mesh=mesh)
            parts = {name: local(parameter) for name, parameter in module.named_parameters()}
            described, memory, copy = copied(gpu, module)
            for name, parameter in module.named_parameters():
                assert local(parameter) is parts[name]
                assert copy.tensors[name].data_ptr() == parts[name].data_ptr()
                assert copy.tensors[name].shape == parts[name].shape
            shards.append((described.layout, memory))
    put_together(shards, whole)


def test_a_part_that_fsdp_moves_before_its_first_pass_is_the_one_that_is_copied(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of torch pad anew there."""
    with pretended(3, RANKS) as mesh:
        module = sharded(mesh)
        gpu.put_module(module)
        weight = module.inner.weight
        (books,) = (each for each in describe(module).managed.books if each.sharded_param is weight)
        elsewhere = gpu.put(torch.full((3, 5), 7.0)).narrow(0, 0, 1).copy_(local(weight))

        def move() -> None:
            books.sharded_param._local_tensor = elsewhere

        monkeypatch.setattr(books, "reset_sharded_param", move)
        described, memory, copy = copied(gpu, module)
        assert copy.tensors["inner.weight"].data_ptr() == elsewhere.data_ptr()
        there = tensors_at(described.layout, memory)["inner.weight"]
        assert torch.equal(there, torch.cat([elsewhere, torch.zeros(2, 5)]))


# ----------------------------------------------------------------------------------------------- others than FSDP2


def test_the_older_fsdp_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    module.append(wrapped)
    with pytest.raises(NotInThisVersion, match=r"'1' is managed by FullyShardedDataParallel.*use .*fully_shard"):
        describe(module)


def test_offloaded_parameters_move_and_hybrid_sharding_registers_each_part_on_every_replica() -> None:
    """Where they are not pinned. HSDP: the offset is that of the shard dimension alone."""
    with pretended(1, RANKS) as mesh:
        module = sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        _, memory, _ = bound(module)
        assert stands_in(memory, local(module.inner.weight))
    found = []
    for rank in range(RANKS):
        with pretended(rank, 2, 2, names=("replicate", "shard")) as mesh:
            entry = describe(sharded(mesh)).layout.tensors[1]
            found.append((entry.name, entry.shape, entry.global_shape, entry.offset))
    assert found == [("inner.weight", (5, 5), (10, 5), (at, 0)) for at in (0, 5, 0, 5)]


def test_parameters_of_a_mapping_keep_their_parts() -> None:
    """Stacked experts, five on four ranks: each rank's buffer has two, of which some are padding."""
    config = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "vocab_size": 8}
    config |= {"intermediate_size": 6, "num_experts": 5, "moe_intermediate_size": 3}
    path = ["model", "layers", "0", "mlp", "experts"]
    stack = torch.arange(1.0, 1 + 5 * 6 * 4).view(5, 6, 4)
    whole = {
        f"{'.'.join(path)}.{expert}.{half}.weight": stack[expert, 3 * n : 3 * n + 3]
        for expert, (n, half) in product(range(5), enumerate(("gate_proj", "up_proj")))
    }
    shards = []
    for rank in range(RANKS):
        with pretended(rank, RANKS) as mesh:
            module = inner = nn.Module()
            for word in path:
                inner.add_module(word, nn.Module())
                inner = inner.get_submodule(word)
            inner.register_parameter("gate_up_proj", nn.Parameter(stack.clone()))
            fully_shard(module, mesh=mesh)
            described, memory, _ = bound(module, mapping.qwen3_moe(config, "hf"))
            (entry,) = described.layout.tensors
            assert entry.shape == (2, 6, 4)
            shards.append((described.layout, memory))
    put_together(shards, whole)


@pytest.mark.parametrize("rank", range(4))
def test_fsdp_over_tensor_parallelism_is_a_box(rank: int) -> None:
    """FSDP cuts what TP has cut, by columns in the same dimension and by rows in another one."""
    with pretended(rank, 2, 2, names=("dp", "tp")) as mesh:
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        full = {
            name: torch.arange(1.0, 1 + tensor.numel()).view(tensor.shape) for name, tensor in module.named_parameters()
        }
        module.load_state_dict(full)
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
        fully_shard(module, mesh=mesh["dp"])
        weight = module.get_parameter("0.weight")
        assert isinstance(weight, DTensor)
        assert isinstance(weight.placements[0], _StridedShard)
        described, memory, shown = bound(module)
        for entry in described.layout.tensors:
            for name, there, _ in boxes(entry):
                assert torch.equal(shown[name], full[name][there]), name
        assert all(stands_in(memory, local(parameter)) for parameter in module.parameters())
