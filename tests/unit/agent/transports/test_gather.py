"""Boxes that lie strided at either end come over both transports; over ucxx they are packed, compared and unpacked."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.kit.waiting import until
from tests.unit.agent.boxes import Gate, answer, check_gathering, rows, widen
from tests.unit.agent.transports.hubs import MIB, Hub, Kind, cut, running_hub

from tensorhub_agent.casting import conversion
from tensorhub_agent.casting.conversion import CastUnknown
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.storage.mapping_cache import Mapping, MappingCache
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.ucxx import bounce_buffers
from tensorhub_agent.transports.ucxx.gather_client import LOTS_MAX
from tensorhub_agent.transports.ucxx.gather_server import SLOTS_MAX, GatherServer
from tensorhub_agent.transports.ucxx.protocol.frames import GatherDigests
from tensorhub_common.programs.regions import StridedCopies, StridedForm

STRIDED = rows(4000, 4096, 5000, 6000)
PACKED_HERE = rows(4000, 4096, 4096, 6000)
PACKED_THERE = rows(4000, 4096, 5000, 4096)
ROW = rows(1, 8, 1, 1)


def box(form: StridedForm, to: int = 0, origin: int = 0) -> StridedCopies:
    return StridedCopies([to], [origin], [form])


@pytest.mark.parametrize("kind", ["local", "ucxx"])
def test_random_boxes_are_numpys_and_nothing_else_is_touched(kind: Kind, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        hub = runner.run(stack.enter_async_context(running_hub(kind, tmp_path)))
        segment = hub.segment(MIB)
        session = runner.run(hub.open(segment))
        check_gathering(runner, session, segment.view)
        runner.run(session.close())
        runner.run(stack.aclose())


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("form", [STRIDED, PACKED_HERE, PACKED_THERE, rows(1, 21 * MIB + 3, 1, 1)])
async def test_megabytes_come_whole_and_the_connection_is_kept(hub: Hub, form: StridedForm, digests: bool) -> None:  # noqa: FBT001
    segment = hub.segment(form.origin_span_bytes + 9)
    session = await hub.open(segment)
    memory, boxes = bytearray(b"\xaa" * (form.span_bytes + 20)), box(form, 13, 7)
    await session.gather(memoryview(memory), boxes, digests=digests)
    assert memory == answer(b"\xaa" * len(memory), segment.view, boxes)
    assert await session.still_holds()
    await session.close()
    await hub.leases.until("done")
    assert hub.reader.links == (hub.kind == "ucxx")
    assert hub.source.served_bytes == form.nbytes


@pytest.mark.long
async def test_gathers_and_reads_of_one_session_may_overlap_and_memory_is_bounded(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = bounce_buffers.SlotPool.take

    def noted(store: bounce_buffers.SlotPool) -> memoryview:
        taken.append(1)
        return take(store)

    monkeypatch.setattr(bounce_buffers.SlotPool, "take", noted)
    monkeypatch.setattr(bounce_buffers, "KEPT_SLOTS_MAX", 1000)
    segment = ucxx.segment(48 * MIB)
    session = await ucxx.open(segment)
    forms = [STRIDED, PACKED_HERE, PACKED_THERE, STRIDED]
    memories = [memoryview(bytearray(24 * MIB)) for _ in forms]
    read = memoryview(bytearray(48 * MIB))
    gathers = [
        session.gather(memory, box(form, 3, 9), digests=True) for memory, form in zip(memories, forms, strict=True)
    ]
    await asyncio.gather(*gathers, session.read(read, cut(48 * MIB, 4 * MIB), digests=True))
    assert read == segment.view
    for memory, form in zip(memories, forms, strict=True):
        assert memory == answer(bytes(24 * MIB), segment.view, box(form, 3, 9))
    await session.close()
    assert len(taken) > LOTS_MAX + SLOTS_MAX, "too few boxes to show anything"
    assert len(ucxx.source._slots._free) <= SLOTS_MAX
    assert len(ucxx.reader._slots._free) <= LOTS_MAX


async def test_a_bad_form_and_an_unknown_cast_are_refused_and_the_session_is_as_good_as_before(hub: Hub) -> None:
    """Over ucxx it is the source that finds what reaches beyond its segment, see test_gather_server.py."""
    session = await hub.open(hub.segment(MIB))
    memory = memoryview(bytearray(MIB))
    bad: list[tuple[StridedCopies, type[Exception], str]] = [
        (box(rows(2, 4, 8, -8)), InvalidForm, "negative stride"),
        (box(StridedForm((8,), (4,), (2,), 2, 4, "u2>u4")), CastUnknown, "not in this version"),
        (box(rows(2, 4, 8, 8), MIB - 3), ValueError if hub.kind == "ucxx" else TransportLost, "destination"),
        (box(rows(2, 4, 8, 9 * MIB)), TransportLost, "not what was asked for"),
    ]
    for boxes, error, why in bad[: 4 if hub.kind == "local" else 3]:
        with pytest.raises(error, match=why):
            await session.gather(memory, boxes, digests=True)
    await session.gather(memory, StridedCopies([], [], []), digests=True)
    assert memory == bytes(MIB)
    assert await session.still_holds()
    await session.close()


@pytest.mark.parametrize(("origin", "to"), [("<u2", "<u4"), ("<u4", "<u2"), ("<u4", "<i4")])
async def test_a_cast_is_done_where_it_makes_less_to_send(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, origin: str, to: str
) -> None:
    monkeypatch.setitem(conversion.CONVERTERS, "one>other", widen)
    segment = hub.segment(4 * MIB)
    session = await hub.open(segment)
    itemsize, to_itemsize = np.dtype(origin).itemsize, np.dtype(to).itemsize
    for origin_row, to_row in ((700 * itemsize, 700 * to_itemsize), (750 * itemsize, 710 * to_itemsize)):
        strides = (to_row, to_itemsize), (origin_row, itemsize)
        form = StridedForm((900, 700), *strides, itemsize, to_itemsize, "one>other")
        memory = bytearray(form.span_bytes)
        await session.gather(memoryview(memory), box(form, 0, 4), digests=True)
        there = np.ndarray((900, 700), origin, segment.view, 4, strides[1])
        assert np.array_equal(np.ndarray((900, 700), to, memory, 0, strides[0]), there.astype(to))
    await session.close()
    await hub.leases.until("done")
    sent = itemsize if hub.kind == "local" else min(itemsize, to_itemsize)
    assert hub.source.served_bytes == 2 * 900 * 700 * sent


@pytest.mark.parametrize("form", [STRIDED, PACKED_THERE])
async def test_a_half_filled_source_gives_what_stands_there_and_nothing_else(ucxx: Hub, form: StridedForm) -> None:
    segment, stands = ucxx.segment(32 * MIB), form.origin_span_bytes
    lost = Lost()
    ucxx.leases.offer("lease", segment)
    ucxx.leases.tickets["ticket-lease"] = replace(
        ucxx.leases.tickets["ticket-lease"], pieces=(), lacks=lambda origin, nbytes: origin + nbytes > stands
    )
    session = await ucxx.show_ticket(lost)
    memory = bytearray(form.span_bytes)
    await session.gather(memoryview(memory), box(form), digests=True)
    assert memory == answer(bytes(form.span_bytes), segment.view, box(form))
    memory[:] = bytes(form.span_bytes)
    beyond = box(rows(1, 4096, 1, 1), origin=stands - 4095)
    gathering = asyncio.create_task(session.gather(memoryview(memory), beyond, digests=True))
    await lost.wait()
    await session.close()
    with pytest.raises(TransportLost):
        await gathering
    assert memory == bytes(form.span_bytes)
    await ucxx.leases.until("gone")


def last_changed(sums: bytes) -> bytes:
    return sums[:-1] + bytes([sums[-1] ^ 1])


@pytest.mark.parametrize(
    ("form", "change"),
    [
        (STRIDED, last_changed),
        (PACKED_HERE, last_changed),
        (PACKED_THERE, last_changed),
        (rows(1, 9 * MIB, 1, 1), last_changed),
        (ROW, lambda _: b""),
        (ROW, lambda sums: sums[:15]),
        (ROW, lambda sums: sums * 2),
    ],
)
async def test_bytes_that_are_not_what_the_source_says_do_not_count(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch, form: StridedForm, change: Callable[[bytes], bytes]
) -> None:
    sums = GatherServer._sums

    async def wrong(*args: Any) -> bytes:
        return change(await sums(*args))

    monkeypatch.setattr(GatherServer, "_sums", wrong)
    lost = Lost()
    session = await ucxx.open(ucxx.segment(32 * MIB), lost)
    memory = bytearray(form.span_bytes)
    with pytest.raises(TransportLost) as why:
        await session.gather(memoryview(memory), box(form), digests=True)
    assert ("the bytes of a box are not what the source has sent" in str(why.value)) or change is not last_changed
    assert await lost.wait() in str(why.value)
    if not form.is_packed_here:
        assert memory == bytes(form.span_bytes), "what came was unpacked before it was compared"
    await session.close()
    await ucxx.until_links(0, 0)


async def test_what_the_source_says_without_being_asked_ends_the_session(ucxx: Hub) -> None:
    lost = Lost()
    session = await ucxx.open(ucxx.segment(MIB), lost)
    await ucxx.source_says(GatherDigests(5, b"x" * 16))
    assert "without a request for them" in await lost.wait()
    with pytest.raises(TransportLost, match="without a request for them"):
        await session.gather(memoryview(bytearray(8)), box(ROW), digests=True)
    await session.close()


# What is under way when it ends.


class Stuck:
    """A gather whose copies are held up by `gate`."""

    def __init__(self, hub: Hub, form: StridedForm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub, self.form, self.gate, self.lost = hub, form, Gate(monkeypatch), Lost()
        self.memory = memoryview(bytearray(form.span_bytes))

    async def begin(self) -> None:
        self.session = await self.hub.open(self.hub.segment(self.form.origin_span_bytes), self.lost)
        self.gathering = asyncio.create_task(self.session.gather(self.memory, box(self.form), digests=True))
        await self.gate.until_entered()

    async def ends(self, error: type[BaseException] = TransportLost) -> None:
        """The gather raises, and nothing is written any more."""
        left = bytes(self.memory)
        with pytest.raises(error):
            await self.gathering
        if self.hub.kind == "ucxx" and not self.form.is_packed_there:
            # What the source packs into its own buffers may end later.
            await until(lambda: self.gate.inside == 0, "the source packs no more")
        assert self.gate.inside == 0
        await self.session.close()
        await self.hub.until_links(0, 0)
        assert self.memory == left

    def some_was_left_out(self) -> bool:
        return self.gate.writes < self.form.nbytes // MIB


async def test_close_waits_for_what_is_being_unpacked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(hub, PACKED_THERE, monkeypatch)
    await stuck.begin()
    closing = asyncio.create_task(stuck.session.close())
    if hub.kind == "ucxx":
        await hub.until_links(0, 0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done(), "close has come back while the copy pool was still to write"
    assert not stuck.gathering.done()
    stuck.gate.open.set()
    await closing
    await stuck.ends()


@pytest.mark.parametrize(("to_stride", "origin_stride"), [(4096, 4200), (4100, 4096), (4100, 4200)])
async def test_a_cancelled_caller_is_kept_until_nothing_is_under_way(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, to_stride: int, origin_stride: int
) -> None:
    """In the middle of packing, and of unpacking: the link is gone when the caller is told, so nothing comes later."""
    stuck = Stuck(hub, rows(8_000, 4096, to_stride, origin_stride), monkeypatch)
    await stuck.begin()
    for _ in range(2):
        stuck.gathering.cancel()
        await asyncio.sleep(0)
    stuck.gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await stuck.gathering
    assert hub.reader.links == 0
    await stuck.ends(asyncio.CancelledError)
    assert stuck.some_was_left_out(), "everything was copied in spite of the cancellation"


async def test_a_lease_that_is_broken_in_the_middle_packs_nothing_more(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(ucxx, PACKED_HERE, monkeypatch)
    await stuck.begin()
    ucxx.source.break_lease("lease", "wanted back")
    assert "wanted back" in await stuck.lost.wait()
    stuck.gate.open.set()
    await stuck.session.close()
    await stuck.ends()
    assert stuck.some_was_left_out(), "everything was packed for a lease that is over"


async def test_the_source_ends_while_it_packs(ucxx: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment stays mapped until nobody packs out of it any more."""
    stuck = Stuck(ucxx, PACKED_HERE, monkeypatch)
    reading: list[int] = []
    release = MappingCache.release

    def noted(cache: MappingCache, mapping: Mapping) -> None:
        reading.append(stuck.gate.inside)
        release(cache, mapping)

    monkeypatch.setattr(MappingCache, "release", noted)
    await stuck.begin()
    stopping = asyncio.create_task(ucxx.source.stop())
    await stuck.lost.wait()
    async with asyncio.timeout(GIVE_UP_S):
        while ucxx.source.links:  # noqa: ASYNC110 (the thread tells nobody)
            await asyncio.sleep(0.005)
    for _ in range(5):
        await asyncio.sleep(0)
    stuck.gate.open.set()
    await stopping
    assert reading == [0]
    await stuck.session.close()
    await stuck.ends()


@pytest.mark.long
async def test_a_session_that_ends_in_order_waits_for_the_sends(ucxx: Hub) -> None:
    segment = ucxx.segment(32 * MIB)
    for number in range(3):
        session = await ucxx.open(segment, lease=f"lease-{number}")
        memory, boxes = bytearray(STRIDED.span_bytes), box(STRIDED, origin=number)
        await session.gather(memoryview(memory), boxes, digests=bool(number % 2))
        await session.close()
        assert memory == answer(bytes(len(memory)), segment.view, boxes)
        assert ucxx.reader.links == 1
    assert [what for what, _ in ucxx.leases.ends] == ["done"] * 3
