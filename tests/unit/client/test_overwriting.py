"""`overwriting`: the block overwrites what no reader reads any more, and publishes only when asked to."""

import asyncio

import pytest
from tests.unit.client.fake_agent import FakeAgent
from tests.unit.client.given import engine, trainer

import tensorhub
from tensorhub import AsyncHub
from tensorhub_common.errors import DrainTimeout, VersionConflict
from tensorhub_common.protocol import worker as w


async def test_the_block_may_overwrite_and_nothing_is_published_of_itself(hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish(1)
    async with shard.overwriting() as tensors:
        assert shard.version is None
        assert tensors is shard.tensors
        tensors["w"].fill_(5)
    assert shard.version is None
    assert await shard.publish() == 2


async def test_that_nothing_is_published_before_it_is_no_error(hub: AsyncHub) -> None:
    shard = await trainer(hub)
    async with shard.overwriting(publish=True):
        pass
    assert shard.version == 1


async def test_it_publishes_at_the_end_when_asked_to(hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    await shard.publish(1)
    async with shard.overwriting(publish=True, version=7) as tensors:
        tensors["w"].fill_(7)
    assert await reader.replicate() == 7
    assert reader.tensors["w"].unique().tolist() == [7]


async def test_after_an_exception_the_memory_stays_unpublished(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish(1)
    with pytest.raises(ZeroDivisionError):
        async with shard.overwriting(publish=True):
            raise ZeroDivisionError
    assert shard.version is None
    assert len(agent.calls(w.PublishCall)) == 1


async def test_without_the_drain_the_block_is_not_entered(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish(1)

    def refuse(worker: object, frame: object) -> bool:
        if isinstance(frame, w.UnpublishCall):
            worker.tell(w.Failed(call=frame.call, error="DrainTimeout", message="still mapped"))  # type: ignore[attr-defined]
            return True
        return False

    agent.hook = refuse
    entered = False
    with pytest.raises(DrainTimeout):
        async with shard.overwriting():
            entered = True
    assert not entered


async def test_a_mistake_in_the_arguments_unpublishes_nothing(hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish(1)
    with pytest.raises(ValueError, match="without publish=True"):
        await shard.overwriting(version=2).__aenter__()
    with pytest.raises(TypeError, match="version="):
        await shard.overwriting(publish=2).__aenter__()  # type: ignore[arg-type]
    with pytest.raises(VersionConflict, match="out of range"):
        await shard.overwriting(publish=True, version=-1).__aenter__()
    assert shard.version == 1


async def test_the_twin_without_a_loop(agent: FakeAgent) -> None:
    def train() -> None:
        with tensorhub.connect("job", agent=agent.path) as hub:
            shard = hub.register("policy", {"w": tensorhub.TensorSpec((4,), "float32")}, replica="trainer")
            shard.mark_loaded()
            shard.publish(1)
            with shard.overwriting(publish=True) as tensors:
                tensors["w"].fill_(3)
            assert shard.version == 2
            with pytest.raises(StopIteration), shard.overwriting(publish=True):
                raise StopIteration
            assert shard.version is None

    await asyncio.to_thread(train)
