"""A shard's calls through whatever becomes of the connection, of the agent and of the caller."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent, FakeWorker
from tests.unit.client.given import WAIT_S, Held, breaking, engine, refusing, trainer, until

import tensorhub
from tensorhub import AsyncHub
from tensorhub._agent import shards as agent_shards
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    MemoryExhausted,
    RegistryUnavailable,
    ReplicaConflict,
)
from tensorhub_common.protocol import worker as w


async def test_no_agent_is_said_within_the_bound(agent: FakeAgent) -> None:
    agent.stop()
    with pytest.raises(AgentUnavailable, match="tensorhub up"):
        await tensorhub.connect_async(agent=agent.path, timeout_s=0.2)


async def test_connect_waits_for_an_agent_that_is_coming(agent: FakeAgent) -> None:
    agent.stop()
    connecting = asyncio.create_task(tensorhub.connect_async(agent=agent.path))
    await asyncio.sleep(0.1)
    agent.start()
    await (await connecting).close()


async def test_a_refusal_is_the_agents_error(agent: FakeAgent) -> None:
    def refuse(worker: FakeWorker, frame: Any) -> bool:
        worker.tell(w.AttachRefused(error="BadCommand", message="this agent speaks another protocol"))
        return True

    agent.hook = refuse
    with pytest.raises(BadCommand, match="another protocol"):
        await tensorhub.connect_async(agent=agent.path)


async def test_an_agent_that_does_not_answer_is_given_up(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", 0.1)
    shard = await trainer(hub)
    agent.hook = lambda worker, frame: True
    with pytest.raises(AgentUnavailable, match="did not answer"):
        await shard.publish(1, timeout_s=0.1)
    agent.hook = None
    assert await shard.publish(2) == 2


@pytest.mark.parametrize("after", [False, True])
async def test_every_call_survives_a_break(agent: FakeAgent, hub: AsyncHub, after: bool) -> None:  # noqa: FBT001
    """Whether the agent had done what it was asked or not, each call ends as if nothing had happened."""
    breaking(agent, w.RegisterCall, after=after)
    shard = await trainer(hub)
    reader = await engine(hub)
    breaking(agent, w.PublishCall, after=after)
    assert await shard.publish(8) == 8
    breaking(agent, w.ReadCall, after=after)
    assert await reader.replicate() == 8
    breaking(agent, w.UnpublishCall, after=after)
    await shard.unpublish()
    shard.tensors["w"].fill_(5)
    breaking(agent, w.PublishCall, after=after)
    assert await shard.publish() == 9
    breaking(agent, w.ReadCall, after=after)
    assert await reader.update() == 9
    assert reader.tensors["w"].tolist() == [5, 5, 5, 5]
    breaking(agent, w.ReleaseCall, after=after)
    await reader.release()
    assert list(agent.shards) == [("policy", "trainer", 0)]
    assert (shard.version, agent.attached) == (9, 8)


async def test_memory_is_told_to_be_loaded_again_if_that_may_have_been_lost(agent: FakeAgent, hub: AsyncHub) -> None:
    breaking(agent, w.Loaded, after=False)
    shard = await trainer(hub)
    await until(lambda: len(agent.calls(w.Loaded)) == 2)
    await shard.publish()
    agent.drop()
    await until(lambda: agent.attached == 3 and len(agent.calls(w.RegisterCall)) == 3)
    assert await shard.publish(1) == 1
    assert len(agent.calls(w.Loaded)) == 2


async def test_an_agent_that_restarts_finds_its_workers_again(agent: FakeAgent, hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    await shard.publish()
    agent.stop()
    reading = asyncio.create_task(reader.replicate(timeout_s=WAIT_S))
    await asyncio.sleep(0.05)
    agent.start()
    assert await reading == 1
    assert shard.version == 1


async def test_a_call_is_bounded_while_the_agent_stays_away(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    agent.stop()
    await until(lambda: not hub._session.is_connected)
    with pytest.raises(AgentUnavailable, match="no agent answers"):
        await shard.publish(timeout_s=0.1)
    with pytest.raises(AgentUnavailable, match="no agent answers"):
        await hub.register("policy", {"w": torch.ones(1)}, replica="late", timeout_s=0.1)


async def test_an_agent_without_the_memory_loses_the_shard_in_one_clear_sentence(
    agent: FakeAgent, hub: AsyncHub
) -> None:
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


async def test_a_shard_that_another_worker_took_is_lost(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_shards, "CONFLICT_S", 0.1)
    shard = await trainer(hub)
    refusing(agent, w.RegisterCall, ReplicaConflict, times=1000)
    agent.drop()
    with pytest.raises(ReplicaConflict, match="could not be attached again"):
        await shard.publish()


async def test_what_can_pass_is_tried_again(agent: FakeAgent, hub: AsyncHub) -> None:
    """An agent that came back before its registry refuses for a while."""
    shard = await trainer(hub)
    refusing(agent, w.RegisterCall, RegistryUnavailable, times=2)
    agent.drop()
    assert await shard.publish() == 1
    assert len(agent.calls(w.RegisterCall)) == 4


async def test_shards_that_come_back_late_are_two_lines(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many they are, and however often each is tried."""
    monkeypatch.setattr(agent_shards, "AGAIN_S", 0.0)
    await trainer(hub)
    await engine(hub)
    refusing(agent, w.RegisterCall, RegistryUnavailable, times=9)
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


async def test_a_failed_register_leaves_nothing_behind(agent: FakeAgent, hub: AsyncHub) -> None:
    refusing(agent, w.RegisterCall, MemoryExhausted, times=1)
    with pytest.raises(MemoryExhausted):
        await trainer(hub)
    assert (await trainer(hub)).tensors["w"].sum() == 4


async def test_nonsense_from_the_agent_is_a_break(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)

    def garble(worker: FakeWorker, frame: Any) -> bool:
        if isinstance(frame, w.PublishCall):
            agent.hook = None
            worker.sock.sendall(b"\xff\xff\xff\xff")
            return True
        return False

    agent.hook = garble
    assert await shard.publish() == 1
    assert agent.attached == 2


# ----------------------------------------------------------------------------------------------------- interrupted


async def interrupted(agent: FakeAgent, hub: AsyncHub) -> None:
    """Have a register cancelled while the agent is at it."""
    held = Held(agent, w.RegisterCall)
    task = asyncio.create_task(trainer(hub))
    await held.first()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.let_go()


async def test_an_interrupted_register_can_be_done_again(agent: FakeAgent, hub: AsyncHub) -> None:
    await interrupted(agent, hub)
    assert await (await trainer(hub)).publish() == 1
    assert len(agent.calls(w.RegisterCall)) == 1


async def test_after_an_interrupted_register_other_tensors_are_possible(agent: FakeAgent, hub: AsyncHub) -> None:
    await interrupted(agent, hub)
    await until(lambda: bool(hub._session._attachments._by_handle))
    assert (await trainer(hub, w=torch.ones(9))).tensors["w"].sum() == 9


async def test_a_cancelled_call_leaves_the_shard_usable(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    held = Held(agent, w.PublishCall)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await shard.publish(1)
    held.let_go()
    assert await shard.publish(1) == 1


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_no_descriptor_stays_open(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    await shard.publish()
    before = open_descriptors()
    for count in range(2, 7):
        agent.drop()
        await until(lambda count=count: agent.attached == count)  # type: ignore[misc]
        assert await shard.publish(1) == 1
    await until(lambda: open_descriptors() <= before)


async def test_a_crowd_of_shards_comes_in_by_turns_and_is_brought_back_whole(agent: FakeAgent, hub: AsyncHub) -> None:
    """An agent takes so many shards of a connection at a time, at first and whenever it was away."""
    count = 2 * w.REGISTERING_MAX + 22
    shards = await asyncio.gather(
        *(hub.register(f"m{number}", {"w": torch.ones(1)}, replica="r", timeout_s=WAIT_S) for number in range(count))
    )
    held = Held(agent, w.RegisterCall)
    agent.drop()
    await until(lambda: len(held.frames) >= w.REGISTERING_MAX)
    # All of them begin in the same turn of the loop, so what would be sent too much is sent by now.
    await asyncio.sleep(0.05)
    assert len(held.frames) == w.REGISTERING_MAX
    held.let_go()
    assert await asyncio.gather(*(shard.publish(1, timeout_s=WAIT_S) for shard in shards)) == [1] * count


async def test_a_turn_that_does_not_come_within_the_bound_is_said(agent: FakeAgent, hub: AsyncHub) -> None:
    registers = Held(agent, w.RegisterCall)
    first = [
        asyncio.create_task(hub.register(f"m{number}", {"w": torch.ones(1)}, replica="r", timeout_s=WAIT_S))
        for number in range(w.REGISTERING_MAX)
    ]
    await until(lambda: len(registers.frames) == w.REGISTERING_MAX)
    with pytest.raises(AgentUnavailable, match="allow more"):
        await hub.register("late", {"w": torch.ones(1)}, replica="r", timeout_s=0.1)
    registers.let_go()
    assert len(await asyncio.gather(*first)) == w.REGISTERING_MAX


async def test_the_callers_bound_is_the_bound(agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that answers nothing, as one that is stopped, costs no more than the bound; the call says so."""
    shard = await trainer(hub)
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", 0.0)
    agent.hook = lambda _, __: True
    loop = asyncio.get_running_loop()
    for call in (
        lambda: hub.register("policy", {"w": torch.ones(4)}, replica="other", timeout_s=0.6),
        lambda: shard.publish(timeout_s=0.6),
    ):
        began = loop.time()
        with pytest.raises(AgentUnavailable, match=r"did not answer within"):
            await call()
        assert loop.time() - began >= 0.6
    told = [frame.timeout_s for frame in (*agent.calls(w.RegisterCall)[1:], *agent.calls(w.PublishCall))]
    assert all(timeout_s <= 0.6 for timeout_s in told)


async def test_a_read_without_an_answer_leaves_no_version(
    agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may be overwriting the memory, and an engine must not go on with what stood there before."""
    await (await trainer(hub)).publish(4)
    shard = await engine(hub)
    assert await shard.replicate() == 4
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", 0.0)
    reads = Held(agent, w.ReadCall)
    with pytest.raises(AgentUnavailable, match="did not answer within"):
        await shard.update(timeout_s=0.1)
    assert shard.version is None
    reads.let_go()
    assert await shard.replicate(timeout_s=WAIT_S) == 4
    reads = Held(agent, w.ReadCall)
    reading = asyncio.create_task(shard.update(timeout_s=WAIT_S))
    await reads.first()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert shard.version is None
