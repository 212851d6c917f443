"""Questions for leases: who waits for a delta that is being made, and who is answered at once."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tensorhub_agent.control import lease_service
from tensorhub_agent.control.lease_service import LeaseService, PendingLeaseRequests
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.leases import LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.runtime.supervision import Supervisor

ASK = LeaseRequest(
    job="run-7", model="policy", source=SourceId("agent-0", 1, "trainer", 0), version=2, root="new",
    reader=SourceId("agent-1", 1, "rollout", 0), transport="ucxx", base="old",
)  # fmt: skip
ANSWER = LeaseRefusal(reason="whatever the core says")


class Agent:
    """What stands around the questions of one job: a delta that is being made, and a core that has an answer."""

    def __init__(self, *, is_made: bool = False) -> None:
        self.is_made, self.answered = is_made, 0
        self.shards: dict[ShardKey, Any] = {}
        self.postponed = PendingLeaseRequests()

    def is_coming(self, _: object, base: str, root: str) -> bool:
        assert (base, root) == ("old", "new")
        return not self.is_made

    def endpoint(self, transport: str) -> str:
        return transport

    def lease_asked(self, *_: object) -> LeaseRefusal:
        self.answered += 1
        return ANSWER

    def deadline(self) -> None:
        return None

    def set(self, _: float | None) -> None: ...

    def asked(self, ask: LeaseRequest) -> "asyncio.Task[Any]":
        it: Any = self

        class Traces:
            def lease_asked(self, *_: object) -> None: ...

        traces: Any = Traces()
        service = LeaseService(
            it, it, it, traces, it, self.postponed, lambda _: None, deltas=it, work=Supervisor("the job of a test"),
            accused=lambda *_: None,
        )  # fmt: skip
        return asyncio.create_task(service.asked(ask, "lease-1", "ticket"))


async def test_who_would_wait_longer_for_the_pieces_waits_until_the_delta_is_made_and_nobody_else() -> None:
    agent = Agent()
    asked = agent.asked(replace(ASK, awaits_patches=False))
    await asyncio.sleep(0)
    assert asked.done()
    assert (asked.result(), agent.answered) == (ANSWER, 1)
    asked = agent.asked(ASK)
    for _ in range(3):
        await asyncio.sleep(0)
        agent.postponed.happened()
    assert agent.answered == 1
    agent.is_made = True
    agent.postponed.happened()
    assert await asked == ANSWER


async def test_nobody_waits_for_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_service, "PATCHES_HOLD_S", 0.01)
    assert await Agent().asked(ASK) == ANSWER


async def test_memory_is_mapped_over_the_local_transport_alone() -> None:
    """Over another one its descriptor would never be given back, and the shard would drain for ever."""
    agent = Agent(is_made=True)
    answer = await agent.asked(replace(ASK, mapped=True))
    assert "mapped over the transport local" in answer.reason
    assert agent.answered == 0


@pytest.mark.parametrize(
    ("device", "origin", "asked", "reason"),
    [
        ("", 0, "", ""),
        ("GPU-1", 0, "GPU-1", ""),
        ("", 4096, "", "a copy in a file on disk"),
        ("GPU-1", 0, "GPU-2", "in the memory of GPU-1, and the reader maps that of GPU-2 alone: register the reader"),
        ("GPU-1", 0, "", "that of the host alone: register the reader with memory='GPU-1', or with install='in-place'"),
        ("", 0, "GPU-1", "that of GPU-1 alone: register the reader with memory='host', or with install='in-place'"),
    ],
)
async def test_only_memory_of_the_readers_own_kind_is_mapped_and_a_refusal_is_final(
    device: str, origin: int, asked: str, reason: str
) -> None:
    agent = Agent(is_made=True)
    agent.shards[ShardKey("policy", "trainer", 0)] = SimpleNamespace(
        segment=SimpleNamespace(device=device, origin=origin)
    )
    answer = await agent.asked(replace(ASK, mapped=True, transport="local", device=asked))
    assert reason in answer.reason
    assert (answer.is_final, agent.answered) == (bool(reason), not reason)
