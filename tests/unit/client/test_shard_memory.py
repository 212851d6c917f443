"""Published are the bytes of hub memory: where the weights are elsewhere, or never were, it says so and sends none.

And back at ready memory with values of one's own, the choice is the caller's, and is never made silently.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.fake_gpu import fake_gpu
from tests.unit.client.fake_agent import FakeAgent, engine, restarted, trainer
from torch import nn

from tensorhub import AsyncHub, AsyncShard, DrainTimeout, LayoutMismatch, NotFilled, ReplicaConflict, TensorSpec
from tensorhub._tensors.description import Value
from tensorhub.aio.shard import UnresolvedResume
from tensorhub_common.devices.fake import FakeDevice
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


Place = Callable[[nn.Module], object]


@pytest.fixture(params=["on the host", "on a GPU"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return what puts a module where it is registered: on a GPU it stays, and the segment has its copy."""
    if request.param == "on the host":
        yield lambda _: None
        return
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        yield gpu.put_module


def assign(model: Model) -> None:
    state = {name: value + 1 for name, value in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state, assign=True)


def exchange(model: Model) -> None:
    model.norm.weight.data, model.norm.bias.data = model.norm.bias.data, model.norm.weight.data


NORM = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
LEAVING: dict[str, tuple[Callable[[Model], object], tuple[str, ...]]] = {
    "assigned": (assign, ("embed.weight", "norm.weight", "norm.bias", "head.weight", *NORM[2:])),
    "half": (lambda model: model.half(), ("embed.weight", "norm.weight", "norm.bias", "head.weight", *NORM[2:4])),
    "other data": (lambda model: setattr(model.norm.weight, "data", torch.full((2,), 7.0)), ("norm.weight",)),
    "untied": (lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(4, 2))), ("head.weight",)),
    "new buffer": (lambda model: setattr(model.norm, "running_mean", torch.ones(2)), ("norm.running_mean",)),
    "new layer": (lambda model: setattr(model, "norm", nn.BatchNorm1d(2)), NORM),
    "no layer": (lambda model: delattr(model, "norm"), NORM),
    "exchanged": (exchange, ("norm.weight", "norm.bias")),
}


@pytest.mark.parametrize("how", LEAVING)
async def test_a_module_that_left_its_memory_is_not_published(
    agent: FakeAgent, hub: AsyncHub, place: Place, how: str
) -> None:
    leave, names = LEAVING[how]
    model = Model()
    place(model)
    shard = await hub.register("policy", model, replica="trainer", install="in-place")
    with pytest.raises(LayoutMismatch, match=r"no longer lies? where the hub reads"):
        async with shard.overwriting(publish=True):
            leave(model)
    assert shard._standing is not None
    assert shard._standing.left() == list(names)
    with pytest.raises(LayoutMismatch) as told:
        await shard.publish()
    assert str(told.value).startswith(f"shard 0 of policy/trainer: {names[0]!r}")
    assert "shard.tensors[name].copy_(p)" in str(told.value)
    assert not agent.calls(w.PublishCall)


async def test_the_way_back_is_as_the_error_says(agent: FakeAgent, hub: AsyncHub, place: Place) -> None:
    model = Model()
    place(model)
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


async def test_training_views_wrappers_and_a_module_that_is_gone_leave_nothing(hub: AsyncHub, place: Place) -> None:
    model = Model()
    place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = await hub.register("policy", model, replica="trainer")
    model.head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.norm.weight.data = model.norm.weight.data.view(1, 2)
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    copy.deepcopy(model.norm).half()
    assert await shard.publish() == 1
    assert await (await hub.register("gone", nn.Linear(2, 2), replica="trainer")).publish() == 1


async def test_tensors_of_a_mapping_that_left(agent: FakeAgent, hub: AsyncHub, place: Place) -> None:
    given = nn.ParameterDict({name: torch.ones(2) for name in ("data", "replaced", "dropped", "stays")})
    place(given)
    shard = await trainer(hub, **given)
    shard.tensors["data"].data = torch.zeros(2)
    shard.tensors["replaced"] = torch.zeros(2)
    del shard.tensors["dropped"]
    with pytest.raises(LayoutMismatch, match="'data', 'dropped', 'replaced' no longer lie where the hub reads them"):
        await shard.publish()
    assert not agent.calls(w.PublishCall)


async def test_a_given_tensor_on_a_gpu_that_left(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        given = {name: gpu.put(torch.ones(2)) for name in ("left", "stays")}
        shard = await trainer(hub, **given)
        given["left"].data = torch.zeros(2)
        with pytest.raises(LayoutMismatch, match="'left' no longer lies where the hub reads it"):
            await shard.publish()
    assert not agent.calls(w.PublishCall)


async def test_tensors_of_one_storage_on_a_gpu_have_their_place_in_it(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that shows another's values would be published with its own of before."""
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        flat = gpu.put(torch.arange(4.0))
        given = {"first": flat[:2], "second": flat[2:]}
        shard = await trainer(hub, **given)
        assert await shard.publish() == 1
        await shard.unpublish()
        given["first"].data = flat[2:]
        with pytest.raises(LayoutMismatch, match="'first' no longer lies where the hub reads it"):
            await shard.publish()
    assert len(agent.calls(w.PublishCall)) == 1


async def test_a_storage_of_a_gpu_that_was_offloaded_is_published_once_it_is_back(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        flat = gpu.put(torch.ones(4))
        shard = await trainer(hub, w=flat[:2], v=flat[2:])
        storage, nbytes, before = flat.untyped_storage(), flat.nbytes, flat.data_ptr()
        storage.resize_(0)
        with pytest.raises(LayoutMismatch, match="'w', 'v' no longer lie"):
            await shard.publish()
        # Others have that memory by now.
        others = [torch.ones(4) for _ in range(64)]
        storage.resize_(nbytes)
        assert flat.data_ptr() not in (before, *(each.data_ptr() for each in others))
        flat.fill_(5)
        assert await shard.publish() == 1
    assert kept(agent)[:2] == [5.0, 5.0]


async def test_what_was_registered_without_values_beside_a_gpus_tensors_must_be_written(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        both: dict[str, Value | TensorSpec] = {"given": gpu.put(torch.ones(2)), "spec": TensorSpec((2,), torch.float32)}
        shard = await hub.register("policy", both, replica="trainer")
        with pytest.raises(NotFilled, match="'spec' was registered without values and never written"):
            await shard.publish()
        shard.tensors["spec"].fill_(2)
        assert await shard.publish() == 1


async def test_an_engine_whose_module_left_is_told_once(hub: AsyncHub, caplog: pytest.LogCaptureFixture) -> None:
    """It may keep its weights in another form on purpose, so its reads go on."""
    await (await hub.register("policy", nn.Linear(2, 2), replica="trainer")).publish()
    module = nn.Linear(2, 2)
    reader = await hub.register("policy", module, replica="rollout")
    module.half()
    with caplog.at_level(logging.WARNING, "tensorhub"):
        await reader.replicate()
        await reader.replicate()
    assert len([record for record in caplog.records if "lie no longer" in str(record.msg)]) == 1


# ------------------------------------------------------------------------------------------------------ never filled


async def test_what_was_never_filled_is_not_published(agent: FakeAgent, hub: AsyncHub) -> None:
    """What is written past torch counts by its bytes, or by word; zeros that torch writes are values."""
    specs = {"a": TensorSpec((2, 2), "float32"), "b": TensorSpec((3,), "int8"), "none": TensorSpec((0,), "int8")}
    shard = await hub.register("policy", {**specs, "given": torch.zeros(2)}, replica="trainer")
    with pytest.raises(NotFilled, match="'a', 'b' were registered without values and never written"):
        await shard.publish()
    shard.tensors["a"].numpy()[:] = 5
    with pytest.raises(NotFilled, match=r"'b' was registered without values.* call mark_loaded"):
        await shard.publish()
    assert not agent.calls(w.PublishCall)
    shard.tensors["b"].zero_()
    assert await shard.publish() == 1
    by_word = await hub.register("other", specs, replica="trainer")
    by_word.mark_loaded()
    assert await by_word.publish() == 1


async def test_a_read_fills_and_so_do_the_parameters_of_a_meta_module(hub: AsyncHub) -> None:
    await (await trainer(hub)).publish()
    reader = await engine(hub)
    await reader.replicate()
    await reader.unpublish()
    assert await reader.publish() == 2
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    shard = await hub.register("other", module, replica="trainer")
    with pytest.raises(NotFilled, match="'weight', 'bias'"):
        await shard.publish()
    nn.init.zeros_(module.weight)
    nn.init.ones_(module.bias)
    assert await shard.publish() == 1


# ---------------------------------------------------------------------------------------------------------- resuming

WHY = (
    "shard 0 of policy/trainer was found with version 4, and register was given other values for 'w': register it with "
    "resume='memory' to go on from version 4, or with resume='values' to replace it by the given values"
)


async def back(hub: AsyncHub, value: float = 9.0, resume: str | None = None) -> AsyncShard:
    return await hub.register("policy", {"w": torch.full((4,), float(value))}, replica="trainer", resume=resume)  # type: ignore[arg-type]


def kept(agent: FakeAgent) -> list[float]:
    """Return what the agent's memory of the trainer has."""
    raw = bytearray(agent.bytes_of(agent.shards["policy", "trainer", 0]))
    values: list[float] = torch.frombuffer(raw, dtype=torch.float32)[:4].tolist()
    return values


async def test_an_open_choice_refuses_to_publish_and_to_overwrite(agent: FakeAgent, hub: AsyncHub) -> None:
    """`mark_loaded` ends it where nothing is published any more, and only there."""
    await (await trainer(hub)).publish(4)
    async with restarted(agent, hub) as again:
        shard = await back(again)
        assert (shard.version, shard.tensors["w"].tolist()) == (4, [1, 1, 1, 1])
        with pytest.raises(ReplicaConflict) as told:
            await shard.publish(4)
        assert str(told.value) == WHY
        with pytest.raises(ReplicaConflict, match="resume='values'"):
            async with shard.overwriting(publish=True):
                pytest.fail("it was entered")
        assert await shard.update() is None
        shard.mark_loaded()
        with pytest.raises(ReplicaConflict, match="resume='memory'"):
            await shard.unpublish()
        assert agent.shards["policy", "trainer", 0].version == 4
        assert len(agent.calls(w.PublishCall)) == 1
        async with restarted(agent, again) as third:
            shard = await back(third)
            shard._attachment.version = agent.shards["policy", "trainer", 0].version = None
            shard.mark_loaded()
            assert await shard.publish() == 5
            async with restarted(agent, third) as fourth:
                shard = await back(fourth)
                assert await shard.replicate("latest") == 5
                await shard.unpublish()


async def test_ready_memory_goes_on_from_its_version(agent: FakeAgent, hub: AsyncHub) -> None:
    await (await trainer(hub)).publish(4)
    async with restarted(agent, hub) as again:
        shard = await back(again, resume="memory")
        assert await shard.publish(4) == 4
        async with shard.overwriting(publish=True) as tensors:
            assert tensors["w"].tolist() == [1, 1, 1, 1]
        assert shard.version == 5
        await shard.unpublish()
        async with restarted(agent, again) as third:
            shard = await back(third)
            assert (shard.version, shard.tensors["w"].tolist()) == (None, [9, 9, 9, 9])


async def test_values_replace_the_memory_once_it_is_drained(agent: FakeAgent, hub: AsyncHub) -> None:
    """A mapped reader keeps the memory: register raises what unpublish does, and the same process comes back later."""
    await (await trainer(hub)).publish(4)
    async with restarted(agent, hub) as again:
        agent.refuse(w.UnpublishCall, DrainTimeout)
        with pytest.raises(DrainTimeout):
            await back(again, resume="values")
        assert kept(agent) == [1, 1, 1, 1]
        agent.shards["policy", "trainer", 0].owner = None
        held = agent.hold(w.UnpublishCall)
        coming = asyncio.create_task(back(again, resume="values"))
        await held.first()
        assert kept(agent) == [1, 1, 1, 1]
        held.let_go()
        shard = await coming
        assert (shard.version, shard.tensors["w"].tolist()) == (None, [9, 9, 9, 9])
        # The agent was asked anew, and so would have waited for what still drained.
        assert len(agent.calls(w.RegisterCall)) == 3
        assert await shard.publish() == 5


async def test_a_modules_values_replace_the_memory(agent: FakeAgent, hub: AsyncHub) -> None:
    await (await hub.register("policy", nn.Linear(2, 2), replica="trainer")).publish()
    async with restarted(agent, hub) as again:
        module = nn.Linear(2, 2)
        expected = module.weight.detach().clone()
        shard = await again.register("policy", module, replica="trainer", resume="values")
        assert torch.equal(module.weight, expected)
        assert torch.equal(shard.tensors["weight"], expected)


@pytest.mark.parametrize("resume", [None, "memory", "values"])
@pytest.mark.parametrize("given", [torch.ones(4), TensorSpec((4,), torch.float32)], ids=["equal", "specs"])
async def test_equal_values_and_specs_need_no_choice(
    agent: FakeAgent, hub: AsyncHub, given: Value, resume: Any
) -> None:
    await (await trainer(hub)).publish(4)
    async with restarted(agent, hub) as again:
        shard = await again.register("policy", {"w": given}, replica="trainer", resume=resume)
        assert (shard.version, shard.tensors["w"].tolist()) == (4, [1, 1, 1, 1])
        assert not agent.calls(w.UnpublishCall)
        await shard.unpublish()


async def test_values_are_compared_bit_for_bit(agent: FakeAgent, hub: AsyncHub) -> None:
    given: dict[str, Value] = {
        "nan": torch.tensor([float("nan"), 1.0]),
        "negative zero": torch.tensor([-0.0]),
        "one byte": torch.tensor([3], dtype=torch.int8),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False, True]),
        "swapped": np.arange(5, dtype=">f4"),
        "strided array": np.arange(8, dtype=np.int16)[::2],
        "slice of a flat buffer": torch.arange(9.0)[1:],
        "slice of bfloat16": torch.arange(33, dtype=torch.bfloat16)[1:].view(4, 8),
    }
    await (await hub.register("policy", given, replica="trainer")).publish(4)
    async with restarted(agent, hub) as again:
        shard = await again.register("policy", given, replica="trainer")
        await shard.unpublish()
        await shard.publish()
        async with restarted(agent, again) as third:
            other = {**given, "negative zero": torch.tensor([0.0]), "swapped": np.arange(1, 6, dtype=">f4")}
            shard = await third.register("policy", other, replica="trainer")
            with pytest.raises(ReplicaConflict, match="'negative zero', 'swapped'"):
                await shard.unpublish()
    assert "'a', 'b', 'c' and 2 more:" in str(UnresolvedResume(1, list("abcde")).error("shard 0 of m/r"))
