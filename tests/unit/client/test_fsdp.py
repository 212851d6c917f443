"""What each rank of FSDP2 registers, and that its parameters stand, train and are read in hub memory.

Ranks are pretended one after another with torch's own fake process group, whose collectives do nothing; that real ones
agree is shown by an example (tests/integration/test_examples.py).
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.unit.client.pretended import pretended
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tensorhub import mapping
from tensorhub._tensors.description import Description, bind, describe, rebind
from tensorhub._tensors.fsdp import Gathered
from tensorhub._tensors.segment_mapping import tensors_at
from tensorhub_common.errors import NotInThisVersion
from tensorhub_common.layout.layout import Layout, TensorEntry, segment_bytes

RANKS = 4


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A real mesh of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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


def bound(module: nn.Module) -> tuple[Description, bytearray, dict[str, torch.Tensor]]:
    described = describe(module)
    memory = bytearray(b"\x5a" * segment_bytes(described.layout))
    return described, memory, bind(described, memory)


def stands_in(memory: bytearray, tensor: torch.Tensor) -> bool:
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return start <= tensor.data_ptr() < start + len(memory)


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def boxes(entry: TensorEntry) -> list[tuple[str, tuple[slice, ...], tuple[slice, ...]]]:
    """Return each global tensor's name, the box that stands here, and where it stands."""

    def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))

    if not entry.parts:
        return [(entry.name, box(entry.offset, entry.shape), box((0,) * len(entry.shape), entry.shape))]
    return [
        (part.name, box(part.offset, part.extent), box(part.start, part.shape))
        for part in entry.parts
        if not part.is_padding
    ]


def put_together(shards: list[tuple[Layout, bytearray]], whole: dict[str, torch.Tensor]) -> None:
    """Check that the shards have each element of the whole tensors, with its value, in as many bytes as they say."""
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for layout, memory in shards:
        standing = tensors_at(layout, memory)
        for entry in layout.tensors:
            for name, there, here in boxes(entry):
                assert torch.equal(standing[entry.name][here], whole[name][there]), (name, there)
                seen[name][there] = True
    assert all(mask.all() for mask in seen.values())


def test_ranks_register_their_parts_and_together_the_whole() -> None:
    """Padding stands where FSDP has it, is declared, and is zero."""
    whole = {**dict(Uneven().named_parameters()), "steps": torch.tensor(7)}
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
            assert dict(module.named_parameters()) == parameters
            for name, parameter in parameters.items():
                assert module.get_parameter(name) is parameter
                assert shown[name].shape == local(parameter).shape
                assert local(parameter).numel() == 0 or stands_in(memory, local(parameter))
            rows.append(shown["inner.weight"].shape[0])
            standing = tensors_at(described.layout, memory)
            assert standing["inner.weight"].shape == (3, 5)
            assert not standing["inner.weight"][rows[-1] :].any()
            assert standing["scale"].shape == (1,)
            shards.append((described.layout, memory))
    assert rows == [3, 3, 3, 1]
    put_together(shards, whole)


@pytest.mark.parametrize("rank", [0, 3])
def test_fsdp_gathers_from_hub_memory(rank: int) -> None:
    """Its buffer is hub memory too, and stays so after what FSDP does before its first forward pass."""
    with pretended(rank, RANKS) as mesh:
        module = Uneven()
        fully_shard(module, mesh=mesh)
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


def test_training_goes_on_in_hub_memory(alone: DeviceMesh) -> None:
    """An optimizer from before learns the same as without a hub."""

    def trained(*, in_hub: bool) -> torch.Tensor:
        torch.manual_seed(0)
        module = Uneven()
        fully_shard(module, mesh=alone)
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


def test_a_module_that_shows_gathered_parameters_is_resharded(alone: DeviceMesh) -> None:
    """After a forward pass alone the root shows whole tensors; and after a read it must not compute with old ones."""
    module = Uneven()
    fully_shard(module, mesh=alone)
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
        module = Uneven()
        fully_shard(module, mesh=mesh)
        before = {name: local(parameter) for name, parameter in module.named_parameters()}
        described = describe(module)
        last = described.members[-2].books
        buffers = [books._sharded_param_data for books in described.managed.books]

        def padded_anew() -> None:
            last.sharded_param._local_tensor = torch.zeros(1)

        monkeypatch.setattr(last, "reset_sharded_param", padded_anew)
        with pytest.raises(NotInThisVersion, match="puts parameters into memory of its own"):
            bind(described, bytearray(segment_bytes(described.layout)))
        assert all(local(parameter) is before[name] for name, parameter in module.named_parameters())
        assert all(books._sharded_param_data is buffers[n] for n, books in enumerate(described.managed.books))


def test_the_older_fsdp_is_refused_by_name(alone: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    module.append(wrapped)
    with pytest.raises(NotInThisVersion, match=r"'1' is managed by FullyShardedDataParallel.*use .*fully_shard"):
        describe(module)


def test_offloaded_parameters_move_where_they_are_not_pinned() -> None:
    with pretended(1, RANKS) as mesh:
        module = Uneven()
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        _, memory, _ = bound(module)
        assert stands_in(memory, local(module.inner.weight))


def test_parameters_of_a_mapping_keep_their_parts() -> None:
    """Stacked experts, five on four ranks: each rank's buffer has two, of which some are padding."""
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "vocab_size": 8,
        "intermediate_size": 6,
        "num_experts": 5,
        "moe_intermediate_size": 3,
    }
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack = torch.arange(5 * 6 * 4.0).view(5, 6, 4)
    at = "model.layers.0.mlp.experts"
    halves = ("gate_proj", "up_proj")
    whole = {
        f"{at}.{expert}.{half}.weight": stack[expert, 3 * n : 3 * n + 3]
        for expert, (n, half) in product(range(5), enumerate(halves))
    }
    shards = []
    for rank in range(RANKS):
        with pretended(rank, RANKS) as mesh:
            module = nn.Module()
            inner = module
            for word in name.split(".")[:-1]:
                inner.add_module(word, nn.Module())
                inner = inner.get_submodule(word)
            inner.register_parameter("gate_up_proj", nn.Parameter(stack.clone()))
            fully_shard(module, mesh=mesh)
            described = describe(module, mapping.qwen3_moe(config, "hf"))
            memory = bytearray(segment_bytes(described.layout))
            bind(described, memory)
            (entry,) = described.layout.tensors
            assert entry.shape == (2, 6, 4)
            shards.append((described.layout, memory))
    seen = []
    for layout, memory in shards:
        standing = tensors_at(layout, memory)[name]
        for part in layout.tensors[0].parts:
            here = tuple(slice(begin, begin + size) for begin, size in zip(part.start, part.shape, strict=True))
            if part.is_padding:
                assert not standing[here].any()
            else:
                seen.append(part.name)
                assert torch.equal(standing[here].reshape(3, 4), whole[part.name])
    assert sorted(seen) == sorted(whole)


def test_hybrid_sharding_registers_each_part_on_every_replica() -> None:
    """HSDP: the offset is that of the shard dimension alone."""
    found = []
    for rank in range(RANKS):
        with pretended(rank, 2, 2, names=("replicate", "shard")) as mesh:
            module = Uneven()
            fully_shard(module, mesh=mesh)
            entry = describe(module).layout.tensors[1]
            assert entry.name == "inner.weight"
            found.append((entry.shape, entry.global_shape, entry.offset))
    assert found == [((5, 5), (10, 5), (0, 0)), ((5, 5), (10, 5), (5, 0))] * 2


@pytest.mark.parametrize("rank", range(4))
def test_fsdp_over_tensor_parallelism_is_a_box(rank: int) -> None:
    """FSDP cuts what TP has cut, by columns in the same dimension and by rows in another one."""
    with pretended(rank, 2, 2, names=("dp", "tp")) as mesh:
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        full = {
            name: torch.arange(1.0, 1 + tensor.numel()).view(tensor.shape) for name, tensor in module.named_parameters()
        }
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(full[name])
        parallelize_module(module, mesh["tp"], plan, src_data_rank=None)
        fully_shard(module, mesh=mesh["dp"])
        weight = module.get_parameter("0.weight")
        assert isinstance(weight, DTensor)
        assert isinstance(weight.placements[0], _StridedShard)
        described, memory, shown = bound(module)
        for entry in described.layout.tensors:
            for name, there, _ in boxes(entry):
                assert torch.equal(shown[name], full[name][there]), name
        assert all(stands_in(memory, local(parameter)) for parameter in module.parameters())
