"""Questions for leases: who waits for a delta that is being made, and who is answered at once."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tensorhub_agent.control import lease_service
from tensorhub_agent.control.lease_service import LeaseService, PendingLeaseRequests
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.runtime.supervision import Supervisor

ASK = LeaseRequest(
    job="run-7",
    model="policy",
    source=SourceId("agent-0", 1, "trainer", 0),
    version=2,
    root="new",
    reader=SourceId("agent-1", 1, "rollout", 0),
    transport="ucxx",
    base="old",
)
ANSWER = LeaseRefusal(reason="whatever the core says")


@dataclass
class Agent:
    """What stands around the questions of one job: a delta that is being made, and a core that has an answer."""

    is_made: bool = False
    answered: int = 0
    postponed: PendingLeaseRequests = field(default_factory=PendingLeaseRequests)

    def is_coming(self, key: object, base: str, root: str) -> bool:
        assert (base, root) == ("old", "new")
        return not self.is_made

    def endpoint(self, transport: str) -> str:
        return transport

    def lease_asked(self, *_: object) -> LeaseAnswer:
        self.answered += 1
        return ANSWER

    def deadline(self) -> None:
        return None

    def set(self, _: float | None) -> None: ...


@dataclass
class Traces:
    def lease_asked(self, *_: object) -> None: ...


def lender(agent: Agent) -> LeaseService:
    it = cast("Any", agent)
    return LeaseService(
        it,
        it,
        it,
        cast("Any", Traces()),
        it,
        agent.postponed,
        lambda _: None,
        deltas=it,
        work=Supervisor("the job of a test"),
        accused=lambda *_: None,
    )


async def test_who_has_the_pieces_sooner_does_not_wait_for_a_delta() -> None:
    agent = Agent()
    asked = asyncio.create_task(lender(agent).asked(replace(ASK, awaits_patches=False), "lease-1", "ticket"))
    await asyncio.sleep(0)
    assert asked.done()
    assert asked.result() == ANSWER


async def test_who_would_wait_longer_for_the_pieces_waits_until_it_is_made() -> None:
    agent = Agent()
    asked = asyncio.create_task(lender(agent).asked(ASK, "lease-1", "ticket"))
    for _ in range(3):
        await asyncio.sleep(0)
        agent.postponed.happened()
    assert agent.answered == 0
    agent.is_made = True
    agent.postponed.happened()
    assert await asked == ANSWER


async def test_nobody_waits_for_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_service, "PATCHES_HOLD_S", 0.01)
    assert await lender(Agent()).asked(ASK, "lease-1", "ticket") == ANSWER


async def test_memory_is_mapped_over_the_local_transport_alone() -> None:
    """Over another one its descriptor would never be given back, and the shard would drain for ever."""
    agent = Agent(is_made=True)
    answer = await lender(agent).asked(replace(ASK, mapped=True), "q", "t")
    assert isinstance(answer, LeaseRefusal)
    assert "mapped over the transport local" in answer.reason
    assert agent.answered == 0
