"""Whoever was silent when asked to open is asked anew where it is worth it, until the core has enough of it."""

import asyncio
from collections import Counter
from typing import Any, cast

import msgspec
import pytest

from tensorhub_agent.control.program_cache import ProgramCache
from tensorhub_agent.core.effects import CloseSource, RequestLease, SourceClosed, SourceLost, SourceOpened
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_agent.transports.base import TransportLost, TransportSilent
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer, NoResponder
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import Share, SourceId

ME = SourceId("agent-1", 1, "rollout", 0)
KEY = ShardKey("m", "rollout", 0)
BOUND_S = 60.0


class Session:
    async def close(self) -> None:
        """End at once."""


class Surroundings:
    """A bus and transports that fail as they are told to, first one thing and then the next; then they answer."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked: Counter[str] = Counter()

    async def request(self, *_: object) -> bytes:
        self.asked["lease"] += 1
        await asyncio.sleep(0)
        self._fail(NoAnswer, NoResponder)
        grant = LeaseGrant(lease="l", ticket="t", ticket_s=5.0, endpoint="here", pieces=0, digests=b"")
        return msgspec.msgpack.encode(grant)

    async def open(self, *_: object, **__: object) -> Session:
        self.asked["open"] += 1
        await asyncio.sleep(0)
        self._fail(TransportLost)
        return Session()

    def _fail(self, *kinds: type[Exception]) -> None:
        if self.failures and isinstance(self.failures[0], kinds):
            raise self.failures.pop(0)


def opening(*, far: bool = False, crosses: bool = False) -> RequestLease:
    source = SourceId("agent-2", 1, "mate", 0)
    share = Share(source=source, transport="ucxx", pieces=(), nbytes=0, why="", far=far, crosses=crosses)
    return RequestLease(KEY, 1, share, 7, "root", None, False, None, None)  # noqa: FBT003 (not mapped)


async def told_by(around: Surroundings, effect: RequestLease) -> Any:
    """Return what is told first of a source that is opened."""
    news: asyncio.Queue[Any] = asyncio.Queue()
    sources = SourceManager(
        "j",
        cast("Bus", around),
        cast("TransportRegistry", around),
        cast("ProgramCache", None),
        news.put_nowait,
        deltas=cast("JobDeltas", None),
    )
    sources.open(effect, ME)
    async with asyncio.timeout(BOUND_S):
        first = await news.get()
        sources.close(CloseSource(KEY, 1))
        assert isinstance(await news.get(), SourceClosed)
    return first


SILENT = (NoAnswer("silent"), TransportSilent("silent"), NoAnswer("silent"))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["far", "crosses"])
async def test_a_far_one_or_a_mate_that_was_silent_is_asked_anew(kind: str) -> None:
    around = Surroundings(*SILENT)
    assert isinstance(await told_by(around, opening(**{kind: True})), SourceOpened)
    assert around.asked == {"lease": 4, "open": 2}, "with a new lease each time: a ticket is shown once"


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", SILENT[:2])
async def test_any_other_is_left_when_it_was_silent(failure: Exception) -> None:
    assert isinstance(await told_by(Surroundings(failure), opening()), SourceLost)


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", [NoResponder("nobody"), TransportLost("refused")])
async def test_one_that_refuses_or_is_not_there_is_left_at_once(failure: Exception) -> None:
    lost = await told_by(Surroundings(failure), opening(crosses=True))
    assert isinstance(lost, SourceLost)


@pytest.mark.asyncio
async def test_one_that_is_closed_while_it_is_asked_anew_is_asked_no_more() -> None:
    """Silence has no end by itself: it is the core's patience that ends it."""
    around = Surroundings(*(NoAnswer("silent") for _ in range(100_000)))
    news: asyncio.Queue[Any] = asyncio.Queue()
    sources = SourceManager(
        "j",
        cast("Bus", around),
        cast("TransportRegistry", around),
        cast("ProgramCache", None),
        news.put_nowait,
        deltas=cast("JobDeltas", None),
    )
    sources.open(opening(crosses=True), ME)
    async with asyncio.timeout(BOUND_S):
        while around.asked["lease"] < 3:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0)
        sources.close(CloseSource(KEY, 1))
        assert isinstance(await news.get(), SourceClosed)
