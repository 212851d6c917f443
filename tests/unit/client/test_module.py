"""An adopted module trains on in hub memory: the same objects, the same ties, and nothing changed after an error."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.client.pretended import alone, stands_in
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tensorhub._tensors import adoption as adopting
from tensorhub._tensors.description import Description, bind, describe
from tensorhub_common.errors import LayoutMismatch, NotInThisVersion
from tensorhub_common.layout.layout import placements, segment_bytes


class Tied(nn.Module):
    """A small language model's shape: tied embedding, a norm with buffers, a buffer that no checkpoint keeps."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        result: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return result


def members(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def made(**tensors: torch.Tensor) -> nn.Module:
    """Return a module of such parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        setattr(module, name, nn.Parameter(tensor))
    return module


def stand(module: nn.Module) -> tuple[Description, bytearray, dict[str, torch.Tensor]]:
    described = describe(module)
    memory = bytearray(segment_bytes(described.layout))
    return described, memory, bind(described, memory)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens = torch.arange(16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def watched(weight: torch.Tensor) -> tuple[list[str], Callable[[], None]]:
    """Return what its two hooks note, and how the first one is removed."""
    seen: list[str] = []
    handle = weight.register_hook(lambda _: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    return seen, handle.remove


def test_parameters_and_buffers_stand_in_memory_as_the_same_objects() -> None:
    module = Tied()
    named = dict([*module.named_parameters(), *module.named_buffers()])
    values = {name: tensor.clone() for name, tensor in named.items()}
    described, memory, standing = stand(module)
    assert set(standing) == {*named, "head.weight"}
    assert {entry.name for entry in described.layout.tensors} == set(named)
    assert list(map(id, members(module))) == list(map(id, named.values()))
    for name, tensor in named.items():
        assert stands_in(memory, tensor)
        assert torch.equal(tensor, values[name])
        assert standing[name].data_ptr() == tensor.data_ptr()
        assert not standing[name].requires_grad
    assert isinstance(module.head.weight, nn.Parameter)
    assert module.embed.weight is module.head.weight
    assert standing["head.weight"] is standing["embed.weight"]
    start = placements(described.layout)[[entry.name for entry in described.layout.tensors].index("body.0.bias")]
    memory[start : start + 4] = b"\x00\x00\x20\x40"
    assert module.body[0].bias[0] == 2.5  # type: ignore[index]
    other = Tied()
    bind(describe(other), memory, memory_wins=True)
    assert torch.equal(other.body[0].bias, module.body[0].bias)  # type: ignore[arg-type]
    # It may be registered again, also under inference mode, and stays trainable.
    with torch.inference_mode():
        _, second, _ = stand(module)
    assert stands_in(second, module.embed.weight)
    assert torch.equal(module.embed.weight, values["embed.weight"])
    assert not module.embed.weight.is_inference()
    train(module, torch.optim.SGD(module.parameters(), lr=0.01), 1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizer_built_before_trains_as_if_nothing_happened(kind: Any) -> None:
    torch.manual_seed(3)
    module = Tied()
    untouched = copy.deepcopy(module)
    optimizer, other = kind(module.parameters(), lr=0.05), kind(untouched.parameters(), lr=0.05)
    first = train(module, optimizer, 5)
    state = {key: value for parameter in optimizer.state.values() for key, value in parameter.items()}
    _, memory, standing = stand(module)
    assert all(value is state[key] for value in [*optimizer.state.values()][-1:] for key, value in value.items())
    later = train(module, optimizer, 15)
    assert first + later == pytest.approx(train(untouched, other, 20), rel=1e-5)
    assert later[-1] < first[0]
    assert all(stands_in(memory, parameter) for parameter in module.parameters())
    assert torch.equal(standing["embed.weight"], module.embed.weight)
    assert standing["steps"] == standing["body.1.num_batches_tracked"] == 20
    assert torch.equal(standing["body.1.running_mean"], module.body[1].running_mean)  # type: ignore[arg-type]


def test_gradients_hooks_flags_and_attributes_stay() -> None:
    module = nn.Linear(2, 1)
    module.bias.requires_grad = False
    module.weight.grad = torch.full((1, 2), 5.0)
    gradient = module.weight.grad
    seen, remove = watched(module.weight)
    module.weight.sharded = True  # type: ignore[attr-defined]
    stand(module)
    assert module.weight.grad is gradient
    assert (module.weight.requires_grad, module.bias.requires_grad) == (True, False)
    assert module.weight.sharded  # type: ignore[attr-defined]
    module(torch.ones(1, 2)).sum().backward()
    assert seen == ["hook", "after"]
    assert module.weight.grad.tolist() == [[6, 6]]
    remove()
    module(torch.ones(1, 2)).sum().backward()
    assert seen == ["hook", "after", "after"]


def test_meta_module_gets_memory_and_keeps_identity_and_hooks() -> None:
    with torch.device("meta"):
        module = Tied()
    module.body[0].bias.requires_grad = False
    optimizer = torch.optim.AdamW([weight for weight in module.parameters() if weight.requires_grad], lr=0.05)
    weight = module.embed.weight
    weight.label = "kept"  # type: ignore[attr-defined]
    seen, remove = watched(weight)
    described, memory, standing = stand(module)
    assert described.values == {}
    assert module.embed.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.label == "kept"  # type: ignore[attr-defined]
    assert (weight.requires_grad, module.body[0].bias.requires_grad) == (True, False)
    assert all(stands_in(memory, tensor) for tensor in members(module))
    assert standing["head.weight"] is standing["embed.weight"]
    for name, tensor in standing.items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) if "weight" in name else torch.ones(tensor.shape))
    losses = train(module, optimizer, 10)
    assert losses[-1] < losses[0]
    assert seen == ["hook", "after"] * 10
    remove()
    train(module, optimizer, 1)
    assert seen[20:] == ["after"]


def test_what_is_one_storage_viewed_alike_is_tied_and_other_views_get_memory_each() -> None:
    module = made(a=torch.arange(6.0).view(2, 3))
    module.b = nn.Parameter(module.a.data)  # type: ignore[arg-type]
    module.register_buffer("c", module.a.data)  # type: ignore[arg-type]
    described, _, standing = stand(module)
    assert [entry.name for entry in described.layout.tensors] == ["a"]
    assert described.names == {"a": "a", "b": "a", "c": "a"}
    standing["c"].zero_()
    assert module.a.sum() == module.b.sum() == 0  # type: ignore[operator]
    hollow = made(a=torch.empty(2, 3, device="meta"), c=torch.empty(2, 3, device="meta"))
    hollow.b = nn.Parameter(hollow.a.data)  # type: ignore[arg-type]
    described, _, standing = stand(hollow)
    assert described.names == {"a": "a", "b": "a", "c": "c"}
    standing["a"].fill_(1)
    assert [hollow.b.sum(), hollow.c.sum()] == [6, 0]  # type: ignore[operator]
    fused = torch.arange(6.0)
    views = made(q=fused[:3], k=fused[3:], turned=fused.view(2, 3).T)
    described, _, standing = stand(views)
    assert [entry.name for entry in described.layout.tensors] == ["k", "q", "turned"]
    assert (standing["q"].tolist(), standing["k"].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert standing["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    shared = nn.Linear(2, 2, bias=False)
    twice = nn.Sequential(shared, shared)
    twice.extra, twice.more = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0, 3))
    names = {"extra": "extra", "more": "more", "0.weight": "0.weight", "1.weight": "0.weight"}
    assert stand(twice)[0].names == names


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_error_leaves_the_module_as_it_was(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device(device):
        module = Tied()

    def told() -> list[tuple[int, torch.device, int]]:
        return [(id(each), each.device, each.data_ptr() if device == "cpu" else 0) for each in members(module)]

    before = told()
    seen, _ = watched(module.embed.weight)
    real, calls = adopting._move, []

    def fail_late(member: adopting.Member, target: torch.Tensor) -> Any:
        calls.append(member)
        if len(calls) == len(before):
            raise RuntimeError("the last one fails")
        return real(member, target)

    monkeypatch.setattr(adopting, "_move", fail_late)
    with pytest.raises(RuntimeError, match="the last one fails"):
        stand(module)
    assert told() == before
    monkeypatch.undo()
    _, _, standing = stand(module)
    standing["body.1.running_var"].fill_(1)
    module(torch.arange(16)).sum().backward()
    assert seen == ["hook", "after"]


def test_what_holds_a_meta_tensor_and_lazy_and_sparse_members_are_refused_by_name() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    holder = weakref.ref(module.bias)
    with pytest.raises(LayoutMismatch, match=r"'bias' can't be moved into hub memory .*weakref"):
        stand(module)
    assert holder() is module.bias
    assert module.weight.is_meta
    with pytest.raises(LayoutMismatch, match=r"'weight'.*run the lazy module once"):
        describe(nn.LazyLinear(2))
    sparse = nn.Module()
    sparse.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(LayoutMismatch, match="'graph'"):
        describe(sparse)


def test_a_tensor_parallel_module_s_local_parts_move(tmp_path: Any) -> None:
    with alone(tmp_path) as mesh:
        module = parallelize_module(nn.Linear(4, 2), mesh, ColwiseParallel())
        weight = module.weight
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        _, memory, standing = stand(module)
        assert module.weight is weight
        assert stands_in(memory, weight.to_local())  # type: ignore[union-attr, operator]
        before = standing["weight"].clone()
        module(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(standing["weight"], before)
        assert torch.equal(standing["weight"], weight.to_local())  # type: ignore[union-attr, operator]
        with torch.device("meta"):
            hollow = parallelize_module(nn.Linear(4, 2), mesh, ColwiseParallel())
        with pytest.raises(NotInThisVersion, match="to_empty"):
            describe(hollow)


def test_thousands_of_meta_parameters_are_quick() -> None:
    with torch.device("meta"):
        module = nn.ParameterList([nn.Parameter(torch.empty(4)) for _ in range(5000)])
    described, _, _ = stand(module)
    assert len(described.layout.tensors) == 5000
