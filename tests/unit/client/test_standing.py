"""Published are the bytes of hub memory: where the weights are elsewhere, or never were, it says so and sends none."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent
from torch import nn

from tensorhub import AsyncHub, AsyncShard, LayoutMismatch, NotFilled, TensorSpec
from tensorhub.arguments import Install
from tensorhub_common.protocol import worker as w


class Model(nn.Module):
    """Tied weights, a buffer, a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.act = nn.ReLU()
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def assign(model: Model) -> None:
    state = {name: value + 1 for name, value in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state, assign=True)


def half(model: Model) -> None:
    model.half()


def other_data(model: Model) -> None:
    model.norm.weight.data = torch.full((2,), 7.0)


def untie(model: Model) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def new_buffer(model: Model) -> None:
    model.norm.running_mean = torch.full((2,), 7.0)


def new_layer(model: Model) -> None:
    model.norm = nn.BatchNorm1d(2)


def no_layer(model: Model) -> None:
    del model.norm


def exchanged(model: Model) -> None:
    model.norm.weight.data, model.norm.bias.data = model.norm.bias.data, model.norm.weight.data


NORM = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
LEAVING: tuple[tuple[Callable[[Model], None], tuple[str, ...]], ...] = (
    (assign, ("embed.weight", "norm.weight", "norm.bias", "head.weight", *NORM[2:])),
    (half, ("embed.weight", "norm.weight", "norm.bias", "head.weight", "norm.running_mean", "norm.running_var")),
    (other_data, ("norm.weight",)),
    (untie, ("head.weight",)),
    (new_buffer, ("norm.running_mean",)),
    (new_layer, NORM),
    (no_layer, NORM),
    (exchanged, ("norm.weight", "norm.bias")),
)


@pytest.mark.parametrize(("leave", "names"), LEAVING, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("install", ["in-place"])
async def test_a_module_that_left_hub_memory_is_not_published(
    agent: FakeAgent, hub: AsyncHub, leave: Callable[[Model], None], names: tuple[str, ...], install: Install
) -> None:
    model = Model()
    shard = await hub.register("policy", model, replica="trainer", install=install)
    leave(model)
    assert shard._standing is not None
    assert shard._standing.left() == list(names)
    with pytest.raises(LayoutMismatch) as told:
        await shard.publish()
    assert str(told.value).startswith(f"shard 0 of policy/trainer: {names[0]!r}")
    assert "shard.tensors[name].copy_(p)" in str(told.value)
    assert not agent.calls(w.PublishCall)


async def test_the_way_back_is_as_the_error_says(agent: FakeAgent, hub: AsyncHub) -> None:
    model = Model()
    shard = await hub.register("policy", model, replica="trainer")
    assign(model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    expected = {name: tensor.detach().clone() for name, tensor in named}
    for name, tensor in named:
        shard.tensors[name].copy_(tensor.detach())
        tensor.data = shard.tensors[name]
    await shard.publish()
    assert all(torch.equal(shard.tensors[name], value) for name, value in expected.items())
    await shard.unpublish()
    with torch.no_grad():
        model.head.weight.fill_(3)
    await shard.publish()
    assert shard.tensors["embed.weight"].unique().tolist() == [3]


async def test_training_and_views_and_wrappers_leave_nothing(hub: AsyncHub) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = await hub.register("policy", model, replica="trainer")
    model.head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.norm.weight.data = model.norm.weight.data.view(1, 2)
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    copy.deepcopy(model.norm).half()
    assert await shard.publish() == 1


async def test_a_module_that_is_gone_has_left_nothing(hub: AsyncHub) -> None:
    shard = await hub.register("policy", nn.Linear(2, 2), replica="trainer")
    assert await shard.publish() == 1


async def test_tensors_of_a_mapping_that_left(agent: FakeAgent, hub: AsyncHub) -> None:
    given = {name: torch.ones(2) for name in ("data", "replaced", "dropped", "stays")}
    shard = await hub.register("policy", given, replica="trainer")
    shard.tensors["data"].data = torch.zeros(2)
    shard.tensors["replaced"] = torch.zeros(2)
    del shard.tensors["dropped"]
    with pytest.raises(LayoutMismatch, match="'data', 'replaced', 'dropped' lie in hub memory no longer"):
        await shard.publish()
    assert not agent.calls(w.PublishCall)


async def test_the_block_that_overwrites_is_checked_at_its_end(agent: FakeAgent, hub: AsyncHub) -> None:
    model = Model()
    shard = await hub.register("policy", model, replica="trainer")
    with pytest.raises(LayoutMismatch, match="lie in hub memory no longer"):
        async with shard.overwriting(publish=True):
            assign(model)
    assert not agent.calls(w.PublishCall)


async def test_an_engine_whose_module_lies_elsewhere_is_told_once(
    hub: AsyncHub, caplog: pytest.LogCaptureFixture
) -> None:
    """It may keep its weights in another form on purpose, so its reads go on."""
    await (await hub.register("policy", nn.Linear(2, 2), replica="trainer")).publish()
    module = nn.Linear(2, 2)
    engine = await hub.register("policy", module, replica="rollout")
    module.half()
    with caplog.at_level(logging.WARNING, "tensorhub"):
        await engine.replicate()
        await engine.replicate()
    assert len([record for record in caplog.records if "lie no longer" in str(record.msg)]) == 1


# ------------------------------------------------------------------------------------------------------ never filled


async def blank(hub: AsyncHub) -> AsyncShard:
    specs = {"a": TensorSpec((2, 2), "float32"), "b": TensorSpec((3,), "int8"), "none": TensorSpec((0,), "int8")}
    return await hub.register("policy", {**specs, "given": torch.zeros(2)}, replica="trainer")


async def test_what_was_never_filled_is_not_published(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await blank(hub)
    with pytest.raises(NotFilled, match="'a', 'b' were registered without values and never written"):
        await shard.publish()
    shard.tensors["a"].fill_(1)
    with pytest.raises(NotFilled, match="'b' was registered without values"):
        await shard.publish()
    assert not agent.calls(w.PublishCall)
    shard.tensors["b"].zero_()
    assert await shard.publish() == 1


async def test_what_is_written_past_torch_counts_by_its_bytes_or_by_word(hub: AsyncHub) -> None:
    shard = await blank(hub)
    shard.tensors["a"].numpy()[:] = 5
    with pytest.raises(NotFilled, match="call mark_loaded"):
        await shard.publish()
    shard.mark_loaded()
    assert await shard.publish() == 1


async def test_a_read_fills(hub: AsyncHub) -> None:
    await (await hub.register("policy", {"w": torch.zeros(4)}, replica="trainer")).publish()
    shard = await hub.register("policy", {"w": TensorSpec((4,), "float32")}, replica="rollout")
    await shard.replicate()
    await shard.unpublish()
    assert await shard.publish() == 2


async def test_a_meta_module_is_filled_by_its_own_parameters(hub: AsyncHub) -> None:
    """Zeros that were written are values."""
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    shard = await hub.register("policy", module, replica="trainer")
    with pytest.raises(NotFilled, match="'weight', 'bias'"):
        await shard.publish()
    nn.init.zeros_(module.weight)
    nn.init.ones_(module.bias)
    assert await shard.publish() == 1
