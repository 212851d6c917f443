"""A hub object that is dropped without `close` ends its connection and its thread; its shards stay as they are."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent
from tests.unit.client.given import until, wait

import tensorhub
from tensorhub import RegistryUnavailable
from tensorhub_common.protocol import worker as w


def threads() -> list[threading.Thread]:
    """Those of the SDK; the fake agent has some of its own."""
    return [each for each in threading.enumerate() if each.name == "tensorhub" or each.name.startswith("asyncio")]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_hubs_that_are_dropped_keep_nothing(agent: FakeAgent) -> None:
    threads_before, descriptors_before = len(threads()), descriptors()
    for _ in range(20):
        tensorhub.connect(agent=agent.path)
    gc.collect()
    wait(lambda: len(threads()) <= threads_before and not agent._workers)
    wait(lambda: descriptors() <= descriptors_before)
    assert agent.attached == 20


def test_shards_keep_their_hub_and_stay_with_the_agent(agent: FakeAgent) -> None:
    shard = tensorhub.connect(agent=agent.path).register("policy", {"w": torch.ones(4)}, replica="trainer")
    gc.collect()
    assert shard.publish() == 1
    tensors = shard.tensors
    del shard
    gc.collect()
    wait(lambda: not agent._workers)
    assert tensors["w"].tolist() == [1, 1, 1, 1]
    assert agent.shards["policy", "trainer", 0].version == 1
    assert not agent.calls(w.ReleaseCall)
    with tensorhub.connect(agent=agent.path) as hub:
        assert hub.register("policy", {"w": torch.ones(4)}, replica="trainer").version == 1


def test_a_hub_in_a_cycle_goes_with_it(agent: FakeAgent) -> None:
    before = len(threads())

    class Trainer:
        def __init__(self) -> None:
            self.hub = tensorhub.connect(agent=agent.path)
            self.shard = self.hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
            self.myself = self

    Trainer()
    gc.collect()
    wait(lambda: len(threads()) <= before and not agent._workers)


async def test_a_hub_of_an_event_loop(agent: FakeAgent) -> None:
    hub = await tensorhub.connect_async(agent=agent.path)
    await hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    del hub
    gc.collect()
    await until(lambda: not agent._workers)
    assert not agent.calls(w.ReleaseCall)


def test_a_hub_of_an_event_loop_that_has_ended(agent: FakeAgent) -> None:
    async def begin() -> tensorhub.AsyncHub:
        return await tensorhub.connect_async(agent=agent.path)

    hub = asyncio.run(begin())
    del hub
    gc.collect()
    wait(lambda: not agent._workers)


async def test_an_address_of_nats_that_is_given_must_be_reached(agent: FakeAgent) -> None:
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1"):
        await tensorhub.connect_async(agent=agent.path, nats="nats://127.0.0.1:1", timeout_s=1)
    await until(lambda: not agent._workers)
    hub = await tensorhub.connect_async(agent=agent.path)
    await hub.close()


async def test_a_fault_of_ours_fails_the_call_that_it_is_about(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the other calls of the connection go on."""
    hub = await tensorhub.connect_async(agent=agent.path)
    shard = await hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    taken = type(hub._session)._take_done

    def fail(*_: object) -> None:
        monkeypatch.setattr(type(hub._session), "_take_done", taken)
        raise RuntimeError("planted")

    monkeypatch.setattr(type(hub._session), "_take_done", fail)
    with pytest.raises(tensorhub.TensorHubError, match="this program failed with RuntimeError"):
        await shard.publish()
    await shard.unpublish()
    assert agent.attached == 1
    await hub.close()


async def test_a_fault_in_what_keeps_the_connection_is_gone_over(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = await tensorhub.connect_async(agent=agent.path)
    shard = await hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    link = hub._session._link
    connect = link._connect

    async def fail(deadline: float) -> w.Attached:
        monkeypatch.setattr(link, "_connect", connect)
        raise RuntimeError("planted")

    monkeypatch.setattr(link, "_connect", fail)
    agent.drop()
    assert await shard.publish() == 1
    assert agent.attached == 2
    await hub.close()
