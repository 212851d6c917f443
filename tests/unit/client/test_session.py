"""A shard's calls, while agent and connection are well."""

import asyncio
import gc
from typing import Any

import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent, FakeWorker
from tests.unit.client.given import Held, engine, restarted, trainer, until

import tensorhub
from tensorhub import AsyncHub
from tensorhub_common.errors import (
    AgentUnavailable,
    LayoutMismatch,
    NotPublished,
    ReplicaConflict,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.protocol import worker as w


async def test_values_are_copied_in_published_and_replicated(agent: FakeAgent, hub: AsyncHub) -> None:
    source = torch.arange(4, dtype=torch.float32)
    shard = await trainer(hub, w=source)
    assert await shard.publish(3) == 3
    assert shard.version == 3
    reader = await engine(hub)
    assert reader.version is None
    seen: list[tuple[int, int]] = []
    assert await reader.replicate(on_progress=lambda done, total: seen.append((done, total))) == 3
    assert torch.equal(reader.tensors["w"], source)
    assert seen == [(128, 256)]
    assert reader.last_read is not None
    assert reader.last_read.sources[0].replica == "trainer"
    source.fill_(7)
    assert shard.tensors["w"].tolist() == [0, 1, 2, 3]
    assert len(agent.calls(w.Loaded)) == 2


async def test_update_brings_what_is_newer_or_none(hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    assert await reader.update() is None
    await shard.publish()
    assert await reader.update(wait_s=1) == 1
    assert await reader.update() is None
    await shard.unpublish()
    shard.tensors["w"].fill_(2)
    assert await shard.publish() == 2
    assert await reader.update() == 2
    assert reader.tensors["w"].tolist() == [2, 2, 2, 2]


async def test_errors_of_the_agent_are_raised_by_name(hub: AsyncHub) -> None:
    shard = await trainer(hub)
    with pytest.raises(NotPublished):
        await shard.unpublish()
    await shard.publish(5)
    with pytest.raises(VersionConflict, match="unpublish 5 first"):
        await shard.publish(6)
    with pytest.raises(VersionUnavailable):
        await (await engine(hub)).replicate(99)


async def test_a_second_call_is_refused_at_once_and_changes_nothing(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    held = Held(agent, w.PublishCall)
    first = asyncio.create_task(shard.publish(1))
    await held.first()
    with pytest.raises(ReplicaConflict, match="under way"):
        await shard.unpublish()
    held.let_go()
    assert await first == 1
    assert agent.calls(w.UnpublishCall) == []


async def test_a_registered_shard_is_not_registered_twice(agent: FakeAgent, hub: AsyncHub) -> None:
    await trainer(hub)
    with pytest.raises(ReplicaConflict, match="by this process"):
        await trainer(hub)
    other = await tensorhub.connect_async(agent=agent.path)
    with pytest.raises(ReplicaConflict, match="live worker"):
        await trainer(other)
    await other.close()


async def test_memory_that_is_not_ready_takes_the_values(agent: FakeAgent, hub: AsyncHub) -> None:
    """That ready memory keeps its bytes is shown in test_resuming.py."""
    await (await trainer(hub)).publish(4)
    async with restarted(agent, hub) as again:
        shard = await trainer(again)
        await shard.unpublish()
        async with restarted(agent, again) as third:
            shard = await trainer(third, w=torch.full((4,), 9.0))
            assert shard.version is None
            assert shard.tensors["w"].tolist() == [9, 9, 9, 9]


async def test_specs_over_memory_that_is_not_new_say_nothing_is_loaded(agent: FakeAgent, hub: AsyncHub) -> None:
    """Memory that a failed read left partial must not become whole because its worker came back without values."""
    await engine(hub)
    await until(lambda: len(agent.calls(w.Loaded)) == 1)
    async with restarted(agent, hub) as again:
        shard = await engine(again)
        with pytest.raises(NotPublished):
            await shard.unpublish()
        assert len(agent.calls(w.Loaded)) == 1
        shard.mark_loaded()
        await until(lambda: len(agent.calls(w.Loaded)) == 2)


async def test_what_the_agent_says_is_held_in_the_order_in_which_it_was_said(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)

    def publish_and_drain(worker: FakeWorker, frame: Any) -> bool:
        if not isinstance(frame, w.PublishCall):
            return False
        worker.tell(w.Done(call=frame.call, version=1))
        worker.tell(w.HoldingChanged(handle=frame.handle, version=None))
        return True

    agent.hook = publish_and_drain
    assert await shard.publish(1) == 1
    await until(lambda: shard.version is None)


async def test_a_progress_callback_that_fails_does_not_end_the_call(hub: AsyncHub) -> None:
    await (await trainer(hub)).publish()
    reader = await engine(hub)

    def fail(done_bytes: int, total_bytes: int) -> None:
        raise ZeroDivisionError

    assert await reader.replicate(on_progress=fail) == 1


async def test_release_frees_and_close_releases_the_rest(agent: FakeAgent, hub: AsyncHub) -> None:
    first, second = await trainer(hub), await engine(hub)
    tensor = first.tensors["w"]
    await first.release()
    await first.release()
    assert list(agent.shards) == [("policy", "rollout", 0)]
    with pytest.raises(ReplicaConflict, match="is released"):
        await first.publish()
    await hub.close()
    await hub.close()
    assert not agent.shards
    gc.collect()
    assert tensor.sum() == 4
    with pytest.raises(AgentUnavailable, match="closed"):
        await second.replicate()
    with pytest.raises(AgentUnavailable, match="closed"):
        await trainer(hub)


async def test_bind_that_fails_frees_a_shard_that_it_brought(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise LayoutMismatch("no")

    monkeypatch.setattr("tensorhub.aio.hub._bound", fail)
    with pytest.raises(LayoutMismatch):
        await trainer(hub)
    assert not agent.shards
    monkeypatch.undo()
    assert (await trainer(hub)).tensors["w"].sum() == 4
