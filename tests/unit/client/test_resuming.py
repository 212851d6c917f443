"""Coming back to ready memory with values of one's own: the choice is the caller's, and is never made silently."""

import asyncio

import numpy as np
import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent
from tests.unit.client.given import Held, refusing, restarted
from torch import nn

from tensorhub import AsyncHub, AsyncShard, DrainTimeout, ReplicaConflict, TensorSpec
from tensorhub._tensors.description import Value
from tensorhub.aio.shard import UnresolvedResume
from tensorhub_common.protocol import worker as w

WHY = (
    "shard 0 of policy/trainer was found with version 4, and register was given other values for 'w': register it with "
    "resume='memory' to go on from version 4, or with resume='values' to replace it by the given values"
)


async def published(hub: AsyncHub, **tensors: torch.Tensor) -> None:
    shard = await hub.register("policy", tensors or {"w": torch.ones(4)}, replica="trainer")
    await shard.publish(4)


async def back(hub: AsyncHub, value: float = 9.0, resume: str | None = None) -> AsyncShard:
    return await hub.register("policy", {"w": torch.full((4,), float(value))}, replica="trainer", resume=resume)  # type: ignore[arg-type]


def kept(agent: FakeAgent) -> list[float]:
    """Return what the agent's memory of the trainer has."""
    raw = bytearray(agent.bytes_of(agent.shards["policy", "trainer", 0]))
    values: list[float] = torch.frombuffer(raw, dtype=torch.float32)[:4].tolist()
    return values


async def test_an_open_choice_refuses_to_publish_and_to_overwrite(agent: FakeAgent, hub: AsyncHub) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again)
        assert shard.version == 4
        assert shard.tensors["w"].tolist() == [1, 1, 1, 1]
        with pytest.raises(ReplicaConflict) as told:
            await shard.publish(4)
        assert str(told.value) == WHY
        with pytest.raises(ReplicaConflict, match="resume='memory'"):
            await shard.unpublish()
        entered = False
        with pytest.raises(ReplicaConflict, match="resume='values'"):
            async with shard.overwriting(publish=True):
                entered = True
        assert not entered
        assert agent.shards["policy", "trainer", 0].version == 4
        assert len(agent.calls(w.PublishCall)) == 1


async def test_an_open_choice_lets_an_engine_read_and_ends_with_that(agent: FakeAgent, hub: AsyncHub) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again)
        assert await shard.update() is None
        with pytest.raises(ReplicaConflict, match="was found with version 4"):
            await shard.unpublish()
        assert await shard.replicate("latest") == 4
        await shard.unpublish()


async def test_memory_goes_on_from_the_version(agent: FakeAgent, hub: AsyncHub) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again, resume="memory")
        assert await shard.publish(4) == 4
        async with shard.overwriting(publish=True) as tensors:
            assert tensors["w"].tolist() == [1, 1, 1, 1]
        assert shard.version == 5


async def test_values_replace_the_memory_after_an_unpublish(agent: FakeAgent, hub: AsyncHub) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again, resume="values")
        assert (shard.version, shard.tensors["w"].tolist()) == (None, [9, 9, 9, 9])
        assert len(agent.calls(w.UnpublishCall)) == 1
        assert await shard.publish() == 5


async def test_a_modules_values_replace_the_memory(agent: FakeAgent, hub: AsyncHub) -> None:
    await (await hub.register("policy", nn.Linear(2, 2), replica="trainer")).publish()
    async with restarted(agent, hub) as again:
        module = nn.Linear(2, 2)
        expected = module.weight.detach().clone()
        shard = await again.register("policy", module, replica="trainer", resume="values")
        assert torch.equal(module.weight, expected)
        assert torch.equal(shard.tensors["weight"], expected)


async def test_while_the_memory_drains_nothing_is_overwritten(agent: FakeAgent, hub: AsyncHub) -> None:
    """The values go in only after the unpublish has returned."""
    await published(hub)
    async with restarted(agent, hub) as again:
        held = Held(agent, w.UnpublishCall)
        coming = asyncio.create_task(back(again, resume="values"))
        await held.first()
        assert kept(agent) == [1, 1, 1, 1]
        held.let_go()
        assert (await coming).tensors["w"].tolist() == [9, 9, 9, 9]


async def test_what_can_not_be_unpublished_is_not_replaced_and_may_be_registered_again(
    agent: FakeAgent, hub: AsyncHub
) -> None:
    """A mapped reader keeps the memory: register raises what unpublish does, and the same process comes back later."""
    await published(hub)
    async with restarted(agent, hub) as again:
        refusing(agent, w.UnpublishCall, DrainTimeout, times=1)
        with pytest.raises(DrainTimeout):
            await back(again, resume="values")
        assert kept(agent) == [1, 1, 1, 1]
        agent.shards["policy", "trainer", 0].owner = None
        assert (await back(again, resume="values")).tensors["w"].tolist() == [9, 9, 9, 9]
        # The agent was asked anew, and so would have waited for what still drained.
        assert len(agent.calls(w.RegisterCall)) == 3


@pytest.mark.parametrize("resume", [None, "memory", "values"])
async def test_equal_values_need_no_choice(agent: FakeAgent, hub: AsyncHub, resume: str | None) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again, 1, resume)
        assert shard.version == 4
        assert not agent.calls(w.UnpublishCall)
        await shard.unpublish()


@pytest.mark.parametrize("resume", [None, "values"])
async def test_specs_need_no_choice(agent: FakeAgent, hub: AsyncHub, resume: str | None) -> None:
    await published(hub)
    async with restarted(agent, hub) as again:
        spec = {"w": TensorSpec((4,), torch.float32)}
        shard = await again.register("policy", spec, replica="trainer", resume=resume)  # type: ignore[arg-type]
        assert shard.tensors["w"].tolist() == [1, 1, 1, 1]
        await shard.unpublish()


ODD = {
    "nan": torch.tensor([float("nan"), 1.0]),
    "negative zero": torch.tensor([-0.0]),
    "one byte": torch.tensor([3], dtype=torch.int8),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
}


async def test_values_are_compared_bit_for_bit(agent: FakeAgent, hub: AsyncHub) -> None:
    given: dict[str, Value] = {
        **ODD,
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


async def test_what_was_written_by_hand_needs_no_choice(agent: FakeAgent, hub: AsyncHub) -> None:
    """`mark_loaded` ends an open choice where nothing is published any more, and only there."""
    await published(hub)
    async with restarted(agent, hub) as again:
        shard = await back(again)
        shard.mark_loaded()
        with pytest.raises(ReplicaConflict):
            await shard.unpublish()
        shard._attachment.version = None
        agent.shards["policy", "trainer", 0].version = None
        shard.mark_loaded()
        assert await shard.publish() == 5


@pytest.mark.parametrize("resume", ["", "both", True, 1, b"memory", ["memory"]])
async def test_another_choice_is_refused_before_anything_travels(
    agent: FakeAgent, hub: AsyncHub, resume: object
) -> None:
    with pytest.raises(ValueError, match="possible are None, 'memory', 'values'"):
        await hub.register("policy", {"w": torch.ones(1)}, replica="trainer", resume=resume)  # type: ignore[arg-type]
    assert not agent.calls(w.RegisterCall)


def test_an_error_names_few_tensors() -> None:
    assert "'a', 'b', 'c' and 2 more:" in str(UnresolvedResume(1, list("abcde")).error("shard 0 of m/r"))
