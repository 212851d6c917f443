"""A shard's calls: while agent and connection are well, and through whatever becomes of them and of the caller."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.waiting import until
from tests.unit.client.fake_agent import FakeAgent, FakeWorker, engine, restarted, trainer

import tensorhub
from tensorhub import AsyncHub, AsyncShard
from tensorhub._agent import shards as agent_shards
from tensorhub._agent.calls import UNSENT, AgentCall, PublishRequest, ReadRequest, ReleaseRequest, UnpublishRequest
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    DrainTimeout,
    LayoutMismatch,
    MemoryExhausted,
    NotPublished,
    RegistryUnavailable,
    ReplicaConflict,
    RoundTimeout,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.protocol import worker as w


async def test_a_version_s_way_from_a_trainer_to_an_engine(agent: FakeAgent, hub: AsyncHub) -> None:
    source = torch.arange(4, dtype=torch.float32)
    shard, reader = await trainer(hub, w=source), await engine(hub)
    assert await reader.update() is None
    assert (await shard.publish(3), shard.version, reader.version) == (3, 3, None)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        raise ZeroDivisionError

    assert await reader.replicate(on_progress=progress) == 3
    assert torch.equal(reader.tensors["w"], source)
    assert seen == [(128, 256)]
    assert reader.last_read is not None
    assert reader.last_read.sources[0].replica == "trainer"
    source.fill_(7)
    assert shard.tensors["w"].tolist() == [0, 1, 2, 3]
    assert len(agent.calls(w.Loaded)) == 2
    assert await reader.update(wait_s=1) is None
    await shard.unpublish()
    shard.tensors["w"].fill_(2)
    assert (await shard.publish(), await reader.update()) == (4, 4)
    assert reader.tensors["w"].tolist() == [2, 2, 2, 2]
    with pytest.raises(VersionConflict, match="unpublish 4 first"):
        await shard.publish(6)
    with pytest.raises(VersionUnavailable):
        await reader.replicate(99)


async def test_of_two_calls_the_second_is_refused_and_changes_nothing(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    held = agent.hold(w.PublishCall)
    first = asyncio.create_task(shard.publish(1))
    await held.first()
    with pytest.raises(ReplicaConflict, match="under way"):
        await shard.unpublish()
    held.let_go()
    assert (await first, agent.calls(w.UnpublishCall)) == (1, [])
    with pytest.raises(ReplicaConflict, match="by this process"):
        await trainer(hub)
    other = await tensorhub.connect_async(agent=agent.path)
    with pytest.raises(ReplicaConflict, match="live worker"):
        await trainer(other)
    await other.close()


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


@pytest.mark.parametrize("end", ["refused", "cancelled"])
async def test_a_read_that_has_touched_nothing_leaves_the_memory_whole(
    agent: FakeAgent, hub: AsyncHub, end: str
) -> None:
    """What the next process of the agent is told of memory that this process keeps."""
    publisher, shard = await trainer(hub), await engine(hub)
    await publisher.publish()
    assert await shard.update() == 1
    if end == "refused":
        agent.refuse(w.ReadCall, RoundTimeout)
        with pytest.raises(RoundTimeout):
            await shard.update()
    else:
        held = agent.hold(w.ReadCall)
        update = asyncio.create_task(shard.update())
        await held.first()
        update.cancel()
        await asyncio.wait([update])
        worker, call = held.frames[0]
        worker.tell(w.HoldingChanged(handle=call.handle, version=1))
        held.let_go()
        assert await shard.update() is None
    agent.drop()
    await until(lambda: len(agent.calls(w.RegisterCall)) == 4)
    back = next(each for each in agent.calls(w.RegisterCall)[2:] if each.replica == "rollout")
    assert (back.holds, back.partial) == (1, False)


async def test_a_version_in_kept_memory_is_offered_until_an_agent_says_what_it_holds(
    agent: FakeAgent, hub: AsyncHub
) -> None:
    """One that is killed again has said nothing of it yet; after the next call it is the agent's alone to say."""
    shard = await trainer(hub)
    await shard.publish()

    async def offered() -> int | None:
        before = len(agent.calls(w.RegisterCall))
        agent.drop()
        await until(lambda: len(agent.calls(w.RegisterCall)) > before)
        await until(lambda: shard._attachment.handle is not None)
        agent.shards["policy", "trainer", 0].version = None
        found: int | None = agent.calls(w.RegisterCall)[-1].holds
        return found

    assert [await offered() for _ in range(3)] == [1, 1, 1]
    with pytest.raises(NotPublished):
        await shard.unpublish()
    assert await offered() is None


class StagedMemory:
    """What the agent has for a staged shard: two segments, made anew after `lose`."""

    def __init__(self, agent: FakeAgent) -> None:
        self._agent, self._fds = agent, list[int]()
        agent.hooks[w.RegisterCall] = self.register
        agent.hooks[w.ReleaseCall] = lambda worker, call: worker.tell(w.Done(call=call.call))

    def register(self, worker: FakeWorker, call: w.RegisterCall) -> None:
        self.tell_spare(worker, call)
        worker.tell(w.Registered(call=call.call, handle=1, nbytes=4096, version=None, fresh=True), self._fds[0])

    def tell_spare(self, worker: FakeWorker, call: w.RegisterCall) -> None:
        if not self._fds:
            self._fds = [os.memfd_create(name) for name in ("live", "spare")]
            for fd in self._fds:
                os.ftruncate(fd, 4096)
        worker.tell(w.Spare(call=call.call), self._fds[1])

    def lose(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(os.fstat(fd).st_ino for fd in self._fds)


@pytest.fixture
def staged(agent: FakeAgent) -> Iterator[StagedMemory]:
    memory = StagedMemory(agent)
    yield memory
    memory.lose()


async def test_a_staged_shard_has_both_segments_of_one_answer(
    agent: FakeAgent, hub: AsyncHub, staged: StagedMemory
) -> None:
    """The agent is killed between the two descriptors, and its next process has other memory."""

    def killed(worker: FakeWorker, call: w.RegisterCall) -> None:
        staged.tell_spare(worker, call)
        staged.lose()
        agent.hooks[w.RegisterCall] = staged.register
        agent.drop()

    agent.hooks[w.RegisterCall] = killed
    shard = await hub.register("policy", {"w": torch.ones(4)}, replica="rollout", install="staged")
    assert shard._attachment.segments == staged.segments


async def test_a_staged_shard_that_the_agent_has_lost_can_be_registered_again(
    agent: FakeAgent, hub: AsyncHub, staged: StagedMemory
) -> None:
    async def registered() -> AsyncShard:
        return await hub.register("policy", {"w": torch.ones(4)}, replica="rollout", install="staged")

    shard = await registered()
    staged.lose()
    agent.drop()
    await until(lambda: shard._attachment.lost is not None)
    again = await registered()
    assert again._attachment.segments == staged.segments
    assert again.tensors["w"].tolist() == [1.0] * 4


async def test_what_the_agent_says_is_held_in_the_order_in_which_it_was_said(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)

    def publish_and_drain(worker: FakeWorker, frame: Any) -> None:
        worker.tell(w.Done(call=frame.call, version=1))
        worker.tell(w.HoldingChanged(handle=frame.handle, version=None))

    agent.hooks[w.PublishCall] = publish_and_drain
    assert await shard.publish(1) == 1
    await until(lambda: shard.version is None)


async def test_release_and_close_free_memory(agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LayoutMismatch("no")

    monkeypatch.setattr("tensorhub.aio.hub._bound", fail)
    with pytest.raises(LayoutMismatch):
        await trainer(hub)
    monkeypatch.undo()
    assert not agent.shards, "it was brought by a register that failed"
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
    for call in (second.replicate(), trainer(hub)):
        with pytest.raises(AgentUnavailable, match="closed"):
            await call


# ----------------------------------------------------------------------------------------------------- overwriting


async def test_a_block_overwrites_what_no_reader_reads_and_publishes_when_asked_to(hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    async with shard.overwriting(publish=True):
        pass
    assert shard.version == 1
    async with shard.overwriting() as tensors:
        assert not shard.version
        assert tensors is shard.tensors
    assert await shard.publish() == 2, "nothing was published of itself"
    async with shard.overwriting(publish=True, version=7) as tensors:
        tensors["w"].fill_(7)
    assert await reader.replicate() == 7
    assert reader.tensors["w"].tolist() == [7] * 4
    mistakes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"version": 2}, ValueError, "without publish=True"),
        ({"publish": 2}, TypeError, "version="),
        ({"publish": True, "version": -1}, VersionConflict, "out of range"),
    ]
    for wrong, error, said in mistakes:
        with pytest.raises(error, match=said):
            await shard.overwriting(**wrong).__aenter__()
    assert await shard.publish(7) == 7, "a mistake in the arguments unpublishes nothing"


async def test_a_block_without_the_drain_or_that_fails_publishes_nothing(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish(1)
    agent.refuse(w.UnpublishCall, DrainTimeout)
    with pytest.raises(DrainTimeout):
        async with shard.overwriting():
            pytest.fail("it was entered")
    with pytest.raises(ZeroDivisionError):
        async with shard.overwriting(publish=True):
            raise ZeroDivisionError
    assert (shard.version, len(agent.calls(w.PublishCall))) == (None, 1)


# --------------------------------------------------------------------------------------------- away and back again


async def test_connect_says_what_is_wrong_and_waits_for_an_agent_that_is_coming(agent: FakeAgent) -> None:
    agent.hooks[w.Attach] = lambda worker, _: worker.tell(w.AttachRefused(error="BadCommand", message="no"))
    with pytest.raises(BadCommand):
        await tensorhub.connect_async(agent=agent.path)
    agent.hooks.clear()
    agent.stop()
    with pytest.raises(AgentUnavailable, match="tensorhub up"):
        await tensorhub.connect_async(agent=agent.path, timeout_s=0.2)
    connecting = asyncio.create_task(tensorhub.connect_async(agent=agent.path))
    await asyncio.sleep(0.1)
    agent.start()
    await (await connecting).close()


@pytest.mark.parametrize("after", [False, True])
async def test_every_call_survives_a_break(agent: FakeAgent, hub: AsyncHub, after: bool) -> None:  # noqa: FBT001
    """Whether the agent had done what it was asked or not, each call ends as if nothing had happened."""
    agent.break_at(w.RegisterCall, after=after)
    shard = await trainer(hub)
    reader = await engine(hub)
    agent.break_at(w.PublishCall, after=after)
    assert await shard.publish(8) == 8
    agent.break_at(w.ReadCall, after=after)
    assert await reader.replicate() == 8
    agent.break_at(w.UnpublishCall, after=after)
    await shard.unpublish()
    shard.tensors["w"].fill_(5)
    agent.break_at(w.PublishCall, after=after)
    assert await shard.publish() == 9
    agent.break_at(w.ReadCall, after=after)
    assert await reader.update() == 9
    assert reader.tensors["w"].tolist() == [5, 5, 5, 5]
    agent.break_at(w.ReleaseCall, after=after)
    await reader.release()
    assert list(agent.shards) == [("policy", "trainer", 0)]
    assert (shard.version, agent.attached) == (9, 8)


def test_what_an_answer_means_after_a_break() -> None:
    """`before` and `now` are what the shard held and holds; no break at a chosen frame brings all of these."""

    def settled(wanted: int | None, before: int | None, now: int | None) -> int | None:
        done = PublishRequest(w.PublishCall(**UNSENT, version=wanted)).settled(before, now)
        return done.version if done else None

    assert [settled(7, None, now) for now in (7, None, 6)] == [7, None, None]
    assert [settled(None, *held) for held in ((None, 3), (3, 4), (3, 3), (None, None))] == [3, 4, None, None]
    conflict = VersionConflict("version 4 is published: unpublish 4 first")
    assert PublishRequest(w.PublishCall(**UNSENT, version=None)).excused(conflict, before=None, now=4) == w.Done(
        call=0, version=4
    )
    assert PublishRequest(w.PublishCall(**UNSENT, version=5)).excused(conflict, before=None, now=4) is None
    unpublish, release = UnpublishRequest(w.UnpublishCall(**UNSENT)), ReleaseRequest(w.ReleaseCall(**UNSENT))
    assert unpublish.settled(3, None) is None, "the memory may still drain"
    assert unpublish.excused(conflict, 3, None) is None
    update = ReadRequest(w.ReadCall(**UNSENT, want="newer", wait_s=5))
    answers = [update.answered(w.Done(call=1), before, now).version for before, now in ((3, 4), (4, 4), (4, None))]
    assert answers == [4, None, None]
    calls: tuple[AgentCall, ...] = (unpublish, release, update)
    held = [call.holds(w.Done(call=1), 5) for call in calls]
    assert [*held, ReadRequest(w.ReadCall(**UNSENT, want=6)).holds(w.Done(call=1, version=6), 5)] == [None, None, 5, 6]
    spent = [update.frame(1, 2, left_s=7, spent_s=spent_s) for spent_s in (3, 9)]
    assert spent == [w.ReadCall(call=1, handle=2, timeout_s=7, want="newer", wait_s=wait_s) for wait_s in (2, 0)]


async def test_memory_is_told_to_be_loaded_again_if_that_may_have_been_lost(agent: FakeAgent, hub: AsyncHub) -> None:
    agent.break_at(w.Loaded, after=False)
    shard = await trainer(hub)
    await until(lambda: len(agent.calls(w.Loaded)) == 2)
    await shard.publish()
    agent.drop()
    await until(lambda: agent.attached == 3 and len(agent.calls(w.RegisterCall)) == 3)
    assert await shard.publish(1) == 1
    assert len(agent.calls(w.Loaded)) == 2


async def test_an_agent_that_restarts_or_stays_away(agent: FakeAgent, hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    await shard.publish()
    agent.stop()
    reading = asyncio.create_task(reader.replicate(timeout_s=WAIT_S))
    await until(lambda: not hub._session.is_connected)
    agent.start()
    assert (await reading, shard.version) == (1, 1)
    agent.stop()
    await until(lambda: not hub._session.is_connected)
    late = {"replica": "late", "timeout_s": 0.1}
    for call in (shard.publish(timeout_s=0.1), hub.register("policy", {"w": torch.ones(1)}, **late)):  # type: ignore[arg-type]
        with pytest.raises(AgentUnavailable, match="no agent answers"):
            await call


async def test_an_agent_without_the_memory_loses_the_shard_in_one_sentence(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish()
    agent.stop()
    agent.forget()
    agent.start()
    with pytest.raises(AgentUnavailable, match="without the memory of shard 0 of policy/trainer"):
        await shard.publish(2)
    assert shard.tensors["w"].sum() == 4
    again = await trainer(hub)
    assert again.version is None
    assert await again.publish(2) == 2
    with pytest.raises(AgentUnavailable):
        await shard.publish(3)


async def test_shards_that_can_not_come_back_yet_are_tried_again_and_are_two_lines(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that came back before its registry refuses for a while; however many they are, and however often."""
    monkeypatch.setattr(agent_shards, "AGAIN_S", 0.0)
    shard, _ = await trainer(hub), await engine(hub)
    agent.refuse(w.RegisterCall, RegistryUnavailable, times=9)
    agent.drop()

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name != "tensorhub._agent.channel"]

    await until(lambda: any("is done" in line for line in told()))
    lost, back = told()
    what = "attaching this process's shards again"
    assert lost.startswith(f"{what} fails, so it is tried again: shard 0 of policy/")
    assert lost.endswith(": not now")
    assert back.startswith(f"{what} is done after ")
    assert back.endswith(" s; 9 attempts failed")
    assert await shard.publish() == 1
    monkeypatch.setattr(agent_shards, "CONFLICT_S", 0.1)
    agent.refuse(w.RegisterCall, ReplicaConflict, times=10**9)
    agent.drop()
    with pytest.raises(ReplicaConflict, match="could not be attached again"):
        await shard.publish()


async def test_nonsense_from_the_agent_is_a_break_and_no_descriptor_stays_open(agent: FakeAgent, hub: AsyncHub) -> None:
    def garble(worker: FakeWorker, _: object) -> None:
        agent.hooks.clear()
        worker.sock.sendall(b"\xff\xff\xff\xff")

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    shard = await trainer(hub)
    await shard.publish()
    before = descriptors()
    agent.hooks[w.PublishCall] = garble
    assert (await shard.publish(1), agent.attached) == (1, 2)
    for _ in range(5):
        attached = agent.attached
        agent.drop()
        await until(lambda attached=attached: agent.attached > attached)  # type: ignore[misc]
        assert await shard.publish(1) == 1
    await until(lambda: descriptors() <= before)


async def test_a_fault_of_ours_fails_one_call(agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = await trainer(hub)

    def fault_once(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def fail(*_: object) -> None:
            monkeypatch.setattr(owner, name, real)
            raise RuntimeError("planted")

        monkeypatch.setattr(owner, name, fail)

    fault_once(type(hub._session), "_take_done")
    with pytest.raises(TensorHubError, match="this program failed with RuntimeError"):
        await shard.publish()
    await shard.unpublish()
    assert agent.attached == 1
    fault_once(hub._session._link, "_connect")
    agent.drop()
    assert await shard.publish() == 2
    assert agent.attached == 2


# ---------------------------------------------------------------------------------------------- interrupted, bounded


async def test_a_register_that_failed_or_was_interrupted_can_be_done_again(agent: FakeAgent, hub: AsyncHub) -> None:
    agent.refuse(w.RegisterCall, MemoryExhausted)
    with pytest.raises(MemoryExhausted):
        await trainer(hub)
    for again in (torch.ones(4), torch.ones(9)):
        registers = len(agent.calls(w.RegisterCall))
        held = agent.hold(w.RegisterCall)
        task = asyncio.create_task(trainer(hub))
        await held.first()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.let_go()
        await until(lambda: hub._session._attachments._by_handle)
        shard = await trainer(hub, w=again)
        assert await shard.publish() == 1
        assert shard.tensors["w"].sum() == again.sum()
        # With the same tensors it is the one that was under way; with others that one is released first.
        assert len(agent.calls(w.RegisterCall)) - registers == (1 if len(again) == 4 else 2)
        await shard.release()
        agent.last.clear()


@pytest.mark.parametrize("bounded", [True, False])
async def test_a_call_without_an_answer(
    agent: FakeAgent,
    hub: AsyncHub,
    monkeypatch: pytest.MonkeyPatch,
    bounded: bool,  # noqa: FBT001
) -> None:
    """Cancelled, or at its bound. The agent may be overwriting the memory: after a read there is no version."""
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", 0.0)
    shard, reader = await trainer(hub), await engine(hub)

    async def without_answer(kind: type[w.Frame], call: Callable[..., Any]) -> None:
        held = agent.hold(kind)
        if bounded:
            began = asyncio.get_running_loop().time()
            with pytest.raises(AgentUnavailable, match="did not answer within"):
                await call(timeout_s=0.3)
            assert asyncio.get_running_loop().time() - began >= 0.3
            assert held.frames[-1][1].timeout_s <= 0.3
        else:
            task = asyncio.create_task(call(timeout_s=WAIT_S))
            await held.first()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        held.let_go()

    await without_answer(w.PublishCall, shard.publish)
    assert await shard.publish(1) == 1
    assert await reader.replicate() == 1
    await without_answer(w.ReadCall, reader.update)
    assert reader.version is None
    assert await reader.replicate(timeout_s=WAIT_S) == 1
    await without_answer(w.RegisterCall, lambda **bound: hub.register("m", {"w": torch.ones(1)}, replica="r", **bound))


async def test_a_crowd_of_shards_comes_in_by_turns_and_is_brought_back_whole(agent: FakeAgent, hub: AsyncHub) -> None:
    """An agent takes so many shards of a connection at a time, at first and whenever it was away."""
    count = 2 * w.REGISTERING_MAX + 22
    held = agent.hold(w.RegisterCall)
    coming = [
        asyncio.create_task(hub.register(f"m{number}", {"w": torch.ones(1)}, replica="r", timeout_s=WAIT_S))
        for number in range(count)
    ]
    await until(lambda: len(held.frames) == w.REGISTERING_MAX)
    with pytest.raises(AgentUnavailable, match="allow more"):
        await hub.register("late", {"w": torch.ones(1)}, replica="r", timeout_s=0.1)
    held.let_go()
    shards = await asyncio.gather(*coming)
    held = agent.hold(w.RegisterCall)
    agent.drop()
    await until(lambda: len(held.frames) >= w.REGISTERING_MAX)
    # All of them begin in the same turn of the loop, so what would be sent too much is sent by now.
    await asyncio.sleep(0.05)
    assert len(held.frames) == w.REGISTERING_MAX
    held.let_go()
    assert await asyncio.gather(*(shard.publish(1, timeout_s=WAIT_S) for shard in shards)) == [1] * count
