"""An error that escapes from reading a source is told to its read at once; from closing one it ends the agent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tensorhub_agent.compute.pool import CopyPoolFull
from tensorhub_agent.core.effects import (
    CloseSource,
    ConfirmLease,
    EffectOutcome,
    ReadBatch,
    RequestLease,
    SourceClosed,
    SourceLost,
)
from tensorhub_agent.core.effects import SourceOpened as Opened
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES, LeaseGrant
from tensorhub_common.protocol.plans import Share, SourceId
from tensorhub_common.runtime.supervision import Fault

KEY = ShardKey("m", "engine", 0)
ME = SourceId("here", 1, "engine", 0)
BOUND_S = 10.0
TABLE = pieces(layout_of([TensorEntry("w", "int8", 1, (4,), (4,), (0,))]))
SEGMENT: Any = SimpleNamespace(view=memoryview(bytearray(256)))
SHARE = Share(source=SourceId("there", 1, "trainer", 0), transport="local", pieces=((0, 1),), nbytes=4, why="")


class Failing:
    """A bus, transports and a session, of which one part fails as it is told to."""

    def __init__(self, part: str, error: Exception) -> None:
        self.part, self.error = part, error
        self.said: asyncio.Queue[EffectOutcome] = asyncio.Queue()
        self.faults: asyncio.Queue[Fault] = asyncio.Queue()
        given: Any = self
        self.sources = SourceManager(
            "j", given, given, given, self._tell, deltas=given, on_fault=self.faults.put_nowait
        )

    def _fail(self, part: str) -> None:
        if part == self.part:
            raise self.error

    def _tell(self, news: EffectOutcome) -> None:
        self._fail(type(news).__name__)
        self.said.put_nowait(news)

    async def request(self, _: str, *__: object) -> bytes:
        self._fail("request")
        return msgspec.msgpack.encode(
            LeaseGrant(lease="l", ticket="t", ticket_s=1.0, endpoint="e", pieces=0, digests=b"")
        )

    async def open(self, *_: object, **__: object) -> Any:
        self._fail("open")
        return self

    async def read(self, *_: object, **__: object) -> bytes:
        self._fail("read")
        return bytes(16)

    async def still_holds(self) -> bool:
        self._fail("still_holds")
        return True

    async def close(self) -> None:
        self._fail("close")

    async def news(self) -> EffectOutcome:
        async with asyncio.timeout(BOUND_S):
            return await self.said.get()


@pytest.mark.parametrize(
    "error", [ValueError("a batch does not fit"), CopyPoolFull("the pool is full"), OSError(24, "no descriptor")]
)
@pytest.mark.parametrize("part", ["request", "open", "read", "still_holds"])
async def test_whatever_escapes_from_reading_a_source_is_its_loss_at_once(part: str, error: Exception) -> None:
    failing = Failing(part, error)
    failing.sources.open(RequestLease(KEY, 7, SHARE, 1, None), ME)
    first = await failing.news()
    if part in ("read", "still_holds"):
        assert isinstance(first, Opened)
        if part == "read":
            failing.sources.post(ReadBatch(KEY, 7, 8, ((0, 1),)), SEGMENT, None, TABLE, digests=True)
        else:
            failing.sources.confirm(ConfirmLease(KEY, 7))
        first = await failing.news()
    assert isinstance(first, SourceLost)
    assert str(error.args[-1]) in first.reason
    failing.sources.close(CloseSource(KEY, 7))
    assert isinstance(await failing.news(), SourceClosed)
    assert failing.faults.empty()
    await failing.sources.stop()


async def test_a_source_whose_closing_fails_is_never_told_as_closed() -> None:
    failing = Failing("close", ValueError("who knows what is still written"))
    failing.sources.open(RequestLease(KEY, 7, SHARE, 1, None), ME)
    assert isinstance(await failing.news(), Opened)
    failing.sources.close(CloseSource(KEY, 7))
    async with asyncio.timeout(BOUND_S):
        fault = await failing.faults.get()
    assert failing.said.empty()
    assert fault.error is failing.error


async def test_a_core_that_fails_ends_the_agent_and_loses_no_source() -> None:
    failing = Failing("SourceOpened", AssertionError("the core is wrong"))
    failing.sources.open(RequestLease(KEY, 7, SHARE, 1, None), ME)
    async with asyncio.timeout(BOUND_S):
        await failing.faults.get()
    assert failing.said.empty()
    await failing.sources.stop()


class NoDigests(Failing):
    """Grants a lease on more pieces than a grant tells of, and then says what is no page."""

    async def request(self, subject: str, *_: object) -> bytes:
        if "digests" in subject:
            return b"\xc1 no page"
        count = DIGESTS_PAGE_PIECES + 1
        grant = LeaseGrant(
            lease="l", ticket="t", ticket_s=1.0, endpoint="e", pieces=count, digests=bytes(16 * DIGESTS_PAGE_PIECES)
        )
        return msgspec.msgpack.encode(grant)


async def test_a_page_of_digests_that_can_not_be_read_loses_its_source_at_once() -> None:
    failing = NoDigests("", ValueError())
    failing.sources.open(RequestLease(KEY, 7, SHARE, 1, None), ME)
    lost = await failing.news()
    assert isinstance(lost, SourceLost)
    assert "a page of its digests could not be read" in lost.reason
    await failing.sources.stop()
