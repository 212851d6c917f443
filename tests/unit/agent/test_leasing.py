"""A lease whose transport is opened later: kept as long as it is asked for again, let go when the read ends."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from tensorhub_agent.control.lease_client import HOLD_S
from tensorhub_agent.control.program_cache import ProgramCache
from tensorhub_agent.core.effects import (
    CloseSource,
    LeaseReceived,
    OpenTransport,
    RequestLease,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import Share, SourceId

ME = SourceId("agent-1", 1, "rollout", 0)
KEY = ShardKey("m", "rollout", 0)
BOUND_S = 60.0
TICKET_S = 0.06
Answers = Callable[[LeaseRequest, int], LeaseGrant | LeaseRefusal]


class Session:
    async def close(self) -> None:
        """End at once."""


class Surroundings:
    """A bus on which the source's agent answers as it is told to, and a transport that opens."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.shown = answers, list[str]()
        self.asked: asyncio.Queue[LeaseRequest] = asyncio.Queue()
        self._count = 0
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.sources = SourceManager(
            "j",
            cast("Bus", self),
            cast("TransportRegistry", self),
            cast("ProgramCache", None),
            self.news.put_nowait,
            deltas=cast("JobDeltas", None),
        )

    async def request(self, _: str, body: bytes, *__: object) -> bytes:
        ask = msgspec.msgpack.decode(body, type=LeaseRequest)
        self.asked.put_nowait(ask)
        self._count += 1
        return msgspec.msgpack.encode(self.answers(ask, self._count))

    async def open(self, _: str, grant: LeaseGrant, **__: object) -> Session:
        self.shown.append(grant.ticket)
        return Session()

    def hold(self) -> None:
        share = Share(source=SourceId("agent-2", 1, "mate", 0), transport="ucxx", pieces=(), nbytes=0, why="")
        self.sources.open(RequestLease(KEY, 1, share, 7, "root", hold=True), ME)


def grant(lease: str) -> LeaseGrant:
    return LeaseGrant(lease=lease, ticket=f"t-{lease}", ticket_s=TICKET_S, endpoint="here", pieces=0, digests=b"")


@pytest.mark.asyncio
async def test_a_lease_is_asked_for_again_until_its_transport_is_wanted() -> None:
    around = Surroundings(lambda _, __: grant("l"))
    async with asyncio.timeout(BOUND_S):
        around.hold()
        assert isinstance(await around.news.get(), LeaseReceived)
        first, *later = [await around.asked.get() for _ in range(4)]
        assert (first.again, first.hold_s) == ("", HOLD_S)
        assert {(each.again, each.hold_s) for each in later} == {("l", HOLD_S)}
        assert not around.shown, "nothing is opened before"
        around.sources.enter(OpenTransport(KEY, 1))
        assert isinstance(await around.news.get(), SourceOpened)
        assert around.shown == ["t-l"]
        await around.sources.stop()


@pytest.mark.asyncio
async def test_an_agent_of_an_older_release_gives_another_lease_and_the_last_one_counts() -> None:
    around = Surroundings(lambda _, count: grant(f"l{count}"))
    async with asyncio.timeout(BOUND_S):
        around.hold()
        for _ in range(3):
            await around.asked.get()
        around.sources.enter(OpenTransport(KEY, 1))
        while not around.shown:
            await around.news.get()
        assert around.shown[0] in ("t-l3", "t-l4")
        await around.sources.stop()


def silent(_: LeaseRequest, count: int) -> LeaseGrant:
    if count > 1:
        raise NoAnswer("nobody answers")
    return grant("l")


def over(_: LeaseRequest, count: int) -> LeaseGrant | LeaseRefusal:
    return grant("l") if count == 1 else LeaseRefusal(reason="its lease is over")


@pytest.mark.asyncio
@pytest.mark.parametrize(("answers", "asked"), [(over, 2), (silent, 3)])
async def test_a_lease_that_is_not_held_any_more_is_lost(answers: Answers, asked: int) -> None:
    """Silence is borne as long as the ticket is good by what was said last."""
    around = Surroundings(answers)
    async with asyncio.timeout(BOUND_S):
        around.hold()
        assert isinstance(await around.news.get(), LeaseReceived)
        assert isinstance(await around.news.get(), SourceLost)
        assert around.asked.qsize() >= asked
        await around.sources.stop()


@pytest.mark.asyncio
async def test_a_lease_is_let_go_when_the_read_ends_before_it_came_to_it() -> None:
    around = Surroundings(lambda _, __: grant("l"))
    async with asyncio.timeout(BOUND_S):
        around.hold()
        await around.asked.get()
        assert isinstance(await around.news.get(), LeaseReceived)
        around.sources.close(CloseSource(KEY, 1))
        ask = await around.asked.get()
        while ask.hold_s:
            ask = await around.asked.get()
        assert ask.again == "l"
        assert not around.shown
        await around.sources.stop()
