"""The sources of a read: asked, held, opened, read from and closed; an error is a loss of one, or ends the agent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import product, repeat
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tensorhub_agent.compute.pool import CopyPoolFull
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.control.lease_client import HOLD_S
from tensorhub_agent.core.effects import (
    BatchDone,
    CloseSource,
    ConfirmLease,
    LeaseReceived,
    OpenTransport,
    ReadBatch,
    RequestLease,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.leases.delta_store import SIZE
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.sources import source_watch
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_agent.sources.source_watch import SourceWatch
from tensorhub_agent.transports.base import TransportLost, TransportSilent
from tensorhub_agent.transports.local.session import MappedSession
from tensorhub_common.bus.errors import NoAnswer, NoResponder
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES, LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import Share, SourceId
from tensorhub_common.runtime.supervision import Fault

KEY = ShardKey("m", "engine", 0)
ME = SourceId("here", 1, "engine", 0)
BOUND_S = 60.0
TABLE = pieces(layout_of([TensorEntry("w", "int8", 1, (4,), (4,), (0,))]))
SEGMENT: Any = SimpleNamespace(view=memoryview(bytearray(256)))
SHARE = Share(source=SourceId("there", 1, "trainer", 0), transport="ucxx", pieces=((0, 1),), nbytes=4, why="")
REQUEST = RequestLease(KEY, 7, SHARE, 1, None)
GRANT = LeaseGrant(lease="l", ticket="t-l", ticket_s=0.06, endpoint="e", pieces=0, digests=b"")
ALL = ReadBatch(KEY, 7, 8, ((0, 1),))
Answers = Callable[[LeaseRequest, int], LeaseGrant | LeaseRefusal]


class Scene:
    """A source manager. This object is its bus, its transports, its one session and its core."""

    def __init__(self, failures: dict[str, Iterable[Exception]], answers: Answers, *, encodings: bool) -> None:
        self.failures: dict[str, Iterator[Exception]] = {part: iter(errors) for part, errors in failures.items()}
        self.answers = answers
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.faults: asyncio.Queue[Fault] = asyncio.Queue()
        self.requests: asyncio.Queue[LeaseRequest] = asyncio.Queue()
        self.calls: Counter[str] = Counter()
        self.goes_on = asyncio.Event()
        """Until then reads are under way."""
        self.goes_on.set()
        self.shown: list[str] = []
        """The tickets that were shown."""
        it: Any = self
        self.sources = SourceManager(
            "j", it, it, it, self._tell, deltas=it, encodings=encodings, on_fault=self.faults.put_nowait
        )

    async def _call(self, part: str) -> None:
        self.calls[part] += 1
        await asyncio.sleep(0)
        self._fail(part)

    def _fail(self, part: str) -> None:
        error = next(self.failures.get(part, iter(())), None)
        if error is not None:
            raise error

    def _tell(self, outcome: Any) -> None:
        self._fail(type(outcome).__name__)
        self.told.put_nowait(outcome)

    async def expect(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(BOUND_S):
            outcome = await self.told.get()
        assert isinstance(outcome, kind), outcome
        return outcome

    # The bus and the transports.

    async def request(self, subject: str, body: bytes, *_: object) -> bytes:
        if "digests" in subject:
            return b"\xc1 no page"
        await self._call("request")
        ask = msgspec.msgpack.decode(body, type=LeaseRequest)
        self.requests.put_nowait(ask)
        return msgspec.msgpack.encode(self.answers(ask, self.calls["request"]))

    async def open(self, _: str, grant: LeaseGrant, **__: object) -> Any:
        await self._call("open")
        self.shown.append(grant.ticket)
        return self

    # The session, and the deltas.

    async def read(self, _: memoryview, spans: Spans, **__: object) -> bytes:
        await self._call("read")
        await self.goes_on.wait()
        return bytes(16 * len(spans.to))

    async def gather(self, *_: object, **__: object) -> None:
        await self._call("gather")

    async def overwrite(self, *_: object) -> tuple[bytes, list[bytes]]:
        await self._call("overwrite")
        return bytes(16), [b""]

    async def unpack(self, *_: object) -> tuple[bytes, int]:
        await self._call("unpack")
        return bytes(16), 0

    async def still_holds(self) -> bool:
        await self._call("still_holds")
        return True

    async def close(self) -> None:
        await self._call("close")

    def applied(self, *_: object) -> None:
        """Keep no deltas."""


@asynccontextmanager
async def scene(
    failures: dict[str, Iterable[Exception]] | None = None,
    answers: Answers = lambda *_: GRANT,
    *,
    encodings: bool = True,
) -> AsyncIterator[Scene]:
    it = Scene(failures or {}, answers, encodings=encodings)
    async with asyncio.timeout(BOUND_S):
        yield it
        await it.sources.stop()


# Reading.


@pytest.mark.parametrize(("encodings", "way"), [(True, "overwrite"), (False, "read")])
async def test_with_encodings_off_every_piece_comes_as_it_is(encodings: bool, way: str) -> None:  # noqa: FBT001
    offer = replace(GRANT, pieces=1, digests=bytes(16), patch_sizes=SIZE.pack(0))
    request = replace(REQUEST, root="root", base=BaseVersion(1, "before"))
    async with scene(answers=lambda *_: offer, encodings=encodings) as it:
        it.sources.open(request, ME)
        await it.expect(SourceOpened)
        it.sources.post(ALL, SEGMENT, None, TABLE, digests=True)
        await it.expect(BatchDone)
        assert next(part for part in it.calls if part in ("read", "overwrite", "unpack")) == way


CELL = Cell(0, UnitSplit((4,), (1,), 1, 0, 4, 1), (SourceBox(0, 0, (1,), 1, ""),))
PROGRAM = NumberedProgram(TransferProgram("mine", ("theirs",), ((CELL,),), (TensorGroup(0, (0,), (0,), ((0,),)),)))
BOXES = replace(REQUEST, share=replace(SHARE, layout="theirs"), program=PROGRAM)


ERRORS = (
    ValueError("a batch does not fit"),
    CopyPoolFull("the pool is full"),
    OSError(24, "no descriptor"),
    InvalidForm("a box has 17 dimensions"),
)
PARTS = ("request", "open", "read", "gather", "still_holds")


@pytest.mark.parametrize(("part", "error"), [*product(PARTS, ERRORS), ("gather", TransportLost("it went"))])
async def test_an_error_that_escapes_from_reading_a_source_is_its_loss_at_once(part: str, error: Exception) -> None:
    async with scene({part: repeat(error)}) as it:
        it.sources.open(BOXES if part == "gather" else REQUEST, ME)
        if part not in ("request", "open"):
            await it.expect(SourceOpened)
        if part in ("read", "gather"):
            it.sources.post(ALL, SEGMENT, None, TABLE, digests=True)
        elif part == "still_holds":
            it.sources.confirm(ConfirmLease(KEY, 7))
        lost = await it.expect(SourceLost)
        assert lost.source == 7
        assert str(error.args[-1]) in lost.reason
        it.sources.close(CloseSource(KEY, 7))
        while not isinstance(await it.told.get(), SourceClosed):
            pass
        assert it.faults.empty()


async def test_a_source_whose_closing_fails_is_never_told_as_closed_and_ends_the_agent() -> None:
    """It is not known what is still written."""
    it = Scene({"close": repeat(ValueError("who knows"))}, lambda *_: GRANT, encodings=True)
    it.sources.open(REQUEST, ME)
    await it.expect(SourceOpened)
    it.sources.close(CloseSource(KEY, 7))
    async with asyncio.timeout(BOUND_S):
        fault = await it.faults.get()
    assert it.told.empty()
    assert isinstance(fault.error, ValueError)


async def test_a_source_is_closed_only_when_its_reads_have_ended() -> None:
    async with scene() as it:
        it.goes_on.clear()
        it.sources.open(REQUEST, ME)
        await it.expect(SourceOpened)
        it.sources.post(ALL, SEGMENT, None, TABLE, digests=True)
        while not it.calls["read"]:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        it.sources.close(CloseSource(KEY, 7))
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.told.empty()
        it.goes_on.set()
        await it.expect(BatchDone)
        await it.expect(SourceClosed)


async def test_a_core_that_fails_ends_the_agent_and_loses_no_source() -> None:
    async with scene({"SourceOpened": [AssertionError("the core is wrong")]}) as it:
        it.sources.open(REQUEST, ME)
        await it.faults.get()
        assert it.told.empty()


@pytest.mark.parametrize("is_final", [False, True])
async def test_a_refusal_that_is_final_is_told_as_such(*, is_final: bool) -> None:
    async with scene(answers=lambda *_: LeaseRefusal(reason="it is in other memory", is_final=is_final)) as it:
        it.sources.open(REQUEST, ME)
        assert (await it.expect(SourceLost)).is_final == is_final


async def test_an_older_agent_that_lends_other_memory_than_a_gpus_is_left_for_good() -> None:
    """It does not know the field of the question that names the GPU."""
    closed: list[str] = []

    async def close() -> None:
        closed.append("")

    lent: Any = object.__new__(MappedSession)
    lent.device, lent.close = "", close

    async def opened(*_: object, **__: object) -> Any:
        return lent

    async with scene() as it:
        it.open = opened  # type: ignore[method-assign]
        it.sources.open(replace(REQUEST, mapped=True, device="GPU-1"), ME)
        lost = await it.expect(SourceLost)
        assert (lost.is_final, lost.reason, len(closed)) == (
            True,
            "it lends memory of the host, which is not what was asked for",
            1,
        )
        assert (await it.requests.get()).device == "GPU-1"


async def test_a_page_of_digests_that_can_not_be_read_loses_its_source_at_once() -> None:
    more = replace(GRANT, pieces=DIGESTS_PAGE_PIECES + 1, digests=bytes(16 * DIGESTS_PAGE_PIECES))
    async with scene(answers=lambda *_: more) as it:
        it.sources.open(REQUEST, ME)
        assert "a page of its digests could not be read" in (await it.expect(SourceLost)).reason


# A source that is silent when it is asked to open.


SILENCES = {"request": [NoAnswer("silent"), NoAnswer("silent")], "open": [TransportSilent("silent")]}


@pytest.mark.parametrize(
    ("change", "failures", "opens"),
    [
        ({"far": True}, SILENCES, True),
        ({"crosses": True}, SILENCES, True),
        ({}, {"request": [NoAnswer("silent")]}, False),
        ({}, {"open": [TransportSilent("silent")]}, False),
        ({"crosses": True}, {"request": [NoResponder("no agent")]}, False),
        ({"crosses": True}, {"open": [TransportLost("refused")]}, False),
    ],
)
async def test_a_source_that_is_far_or_crosses_is_asked_again_after_a_silence_and_any_other_is_lost(
    change: dict[str, Any], failures: Any, *, opens: bool
) -> None:
    async with scene(failures) as it:
        it.sources.open(replace(REQUEST, share=replace(SHARE, **change)), ME)
        await it.expect(SourceOpened if opens else SourceLost)
        assert not opens or it.calls == {"request": 4, "open": 2}, "with a new lease each time: a ticket is shown once"


async def test_a_source_that_is_closed_while_it_is_asked_again_is_asked_no_more() -> None:
    """Silence has no end by itself: the core's timeout ends it."""
    async with scene({"request": repeat(NoAnswer("silent"))}) as it:
        it.sources.open(replace(REQUEST, share=replace(SHARE, crosses=True)), ME)
        while it.calls["request"] < 3:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        it.sources.close(CloseSource(KEY, 7))
        await it.expect(SourceClosed)
        asked = it.calls["request"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert it.calls["request"] == asked


# A lease whose transport is opened later.

HELD = replace(REQUEST, hold=True)


async def test_a_lease_is_asked_for_again_until_its_transport_is_wanted() -> None:
    async with scene() as it:
        it.sources.open(HELD, ME)
        await it.expect(LeaseReceived)
        first, *later = [await it.requests.get() for _ in range(4)]
        assert (first.again, first.hold_s) == ("", HOLD_S)
        assert {(each.again, each.hold_s) for each in later} == {("l", HOLD_S)}
        assert not it.shown, "nothing is opened before"
        it.sources.enter(OpenTransport(KEY, 7))
        await it.expect(SourceOpened)
        assert it.shown == ["t-l"]


async def test_an_agent_of_an_older_release_gives_another_lease_and_the_last_one_counts() -> None:
    async with scene(answers=lambda _, count: replace(GRANT, lease=f"l{count}", ticket=f"t-l{count}")) as it:
        it.sources.open(HELD, ME)
        for _ in range(3):
            await it.requests.get()
        it.sources.enter(OpenTransport(KEY, 7))
        while not it.shown:
            await it.told.get()
        assert it.shown[0] in ("t-l3", "t-l4")


@pytest.mark.parametrize(("is_silent", "asked"), [(False, 2), (True, 3)])
async def test_a_lease_that_is_not_held_any_more_is_lost(is_silent: bool, asked: int) -> None:  # noqa: FBT001
    """Silence is borne as long as the ticket is good by the last answer."""

    def once(_: LeaseRequest, count: int) -> LeaseGrant | LeaseRefusal:
        if count > 1 and is_silent:
            raise NoAnswer("no agent answers")
        return GRANT if count == 1 else LeaseRefusal(reason="its lease is over")

    async with scene(answers=once) as it:
        it.sources.open(HELD, ME)
        await it.expect(LeaseReceived)
        await it.expect(SourceLost)
        assert it.calls["request"] >= asked


async def test_a_lease_ends_when_the_read_ends_before_its_transport_was_wanted() -> None:
    async with scene() as it:
        it.sources.open(HELD, ME)
        await it.requests.get()
        await it.expect(LeaseReceived)
        it.sources.close(CloseSource(KEY, 7))
        ask = await it.requests.get()
        while ask.hold_s:
            ask = await it.requests.get()
        assert (ask.again, it.shown) == ("l", [])


# Which agents were left.


def test_a_source_is_left_once_and_is_back_once_and_only_so_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_watch, "LOST_MAX", 2)
    seen = SourceWatch()
    seen.back("agent-1")
    for _ in range(3):
        seen.lost("agent-1", "it made no progress")
    for agent in ("agent-2", "agent-1", "agent-1"):
        seen.back(agent)
    assert not seen.any_lost
    lost, back = caplog.messages
    assert lost == "source agent-1 is left: it made no progress"
    assert back.startswith("source agent-1 is read from again after 0.")
    for number in range(5):
        seen.lost(f"agent-{number}", "")
    assert len(seen._lost) == 2
