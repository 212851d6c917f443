"""Real sockets, real segments; both agents in one process."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.unit.agent.lease_book import GIVE_UP_S, Book, Lost

from tensorhub_agent import copying, local_session, transport_local
from tensorhub_agent.copying import CopyPool, Spans
from tensorhub_agent.lease_frames import Broken, Confirm, Done, Frame, Hello, No, Renew, Welcome
from tensorhub_agent.local_frames import FRAME_BYTES_MAX, from_reader, from_source, send
from tensorhub_agent.local_session import LocalSession
from tensorhub_agent.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transport import Transport, TransportLost
from tensorhub_agent.transport_local import LocalTransport
from tensorhub_common.framed import Framed, PeerGone, connect
from tensorhub_common.wire.commands import PROTOCOL
from tensorhub_common.wire.transfer import LeaseGrant

MIB = 1024 * 1024


class Hub:
    """A source and a reader."""

    def __init__(self, folder: Path, pool: CopyPool) -> None:
        self.store = SegmentStore(folder, segment_prefix("hub1", "source"), 1 << 30)
        self.book = Book()
        self.pool = pool
        self.source = self.transport(folder / "source.peers", "source")
        self.reader = self.transport(folder / "reader.peers", "reader")

    def transport(self, path: Path, agent: str) -> LocalTransport:
        book = self.book
        return LocalTransport(
            socket=path,
            agent=agent,
            pool=self.pool,
            redeem=book.redeem,
            renew=book.renew,
            holds=book.holds,
            ended=book.ended,
            mappings_max=2,
        )

    def published(self, nbytes: int, seed: int = 1) -> Segment:
        segment = self.store.create(nbytes)
        segment.view[:] = np.random.default_rng(seed).bytes(segment.nbytes)
        return segment

    def grant(self, lease: str, endpoint: str | None = None) -> LeaseGrant:
        return LeaseGrant(
            lease=lease,
            ticket=f"ticket-{lease}",
            ticket_s=5,
            endpoint=endpoint or self.source.endpoint,
            pieces=0,
            digests=b"",
        )

    async def open(self, lease: str, segment: Segment, lost: Callable[[str], None] = lambda _: None) -> LocalSession:
        self.book.offer(lease, segment)
        return await self.reader.open(self.grant(lease), reader="reader", on_lost=lost)

    async def raw(self, hello: Frame | None = None) -> Framed:
        framed = await connect(Path(self.source.endpoint), FRAME_BYTES_MAX, GIVE_UP_S)
        if hello is not None:
            await send(framed, hello)
        return framed


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    pool = CopyPool(2)
    hub = Hub(tmp_path, pool)
    await hub.source.start()
    await hub.reader.start()
    yield hub
    await hub.reader.stop()
    await hub.source.stop()
    pool.close()
    hub.store.close()
    await asyncio.get_running_loop().shutdown_default_executor()


def whole(segment: Segment) -> Spans:
    sizes = [min(MIB, segment.nbytes - at) for at in range(0, segment.nbytes, MIB)]
    at = [MIB * number for number in range(len(sizes))]
    return Spans(at, at, sizes)


def digests_of(view: memoryview, spans: Spans) -> bytes:
    return b"".join(
        xxhash.xxh3_128_digest(view[at : at + nbytes]) for at, nbytes in zip(spans.origin, spans.nbytes, strict=True)
    )


async def end_of(framed: Framed) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        with contextlib.suppress(PeerGone):
            while True:
                await framed.receive()


async def test_it_is_a_transport(hub: Hub) -> None:
    transport: Transport = hub.source
    about = os.stat(transport.endpoint)  # noqa: PTH116 (a test may block)
    assert stat.S_ISSOCK(about.st_mode)
    assert stat.S_IMODE(about.st_mode) == 0o600


@pytest.mark.parametrize("digests", [True, False])
async def test_a_read_brings_the_sources_bytes(hub: Hub, digests: bool) -> None:  # noqa: FBT001 (a parameter)
    segment = hub.published(5 * MIB + 1234)
    destination = memoryview(bytearray(segment.nbytes))
    spans = whole(segment)
    session = await hub.open("L1", segment)
    found = await session.read(destination, spans, digests=digests)
    assert found == (digests_of(segment.view, spans) if digests else b"")
    assert destination == segment.view
    assert await session.still_holds()
    await session.close()
    await hub.book.until("done", "L1")
    assert hub.book.told == [("done", "L1")]
    assert not await session.still_holds()
    with pytest.raises(TransportLost, match="closed"):
        await session.read(destination, spans, digests=digests)


async def test_reads_of_one_session_may_overlap(hub: Hub) -> None:
    segment = hub.published(8 * MIB)
    destination = memoryview(bytearray(segment.nbytes))
    session = await hub.open("L1", segment)
    parts = [Spans([at], [at], [2 * MIB]) for at in range(0, 8 * MIB, 2 * MIB)]
    await asyncio.gather(*(session.read(destination, part, digests=True) for part in parts))
    assert destination == segment.view
    await session.close()


async def test_a_ticket_is_good_once_and_a_wrong_one_never(hub: Hub) -> None:
    segment = hub.published(1)
    session = await hub.open("L1", segment)
    for lease in ("L1", "L2"):
        with pytest.raises(TransportLost, match="refused: the ticket is unknown, used or too old"):
            await hub.reader.open(hub.grant(lease), reader="reader", on_lost=lambda _: None)
    assert await session.still_holds()
    await session.close()


async def test_another_protocol_is_refused_in_words_and_its_ticket_stays_good(hub: Hub) -> None:
    hub.book.offer("L1", hub.published(1))
    framed = await hub.raw(Hello(PROTOCOL + 1, "ticket-L1", "newer"))
    answer = await from_source(framed)
    assert isinstance(answer, No)
    assert f"speaks protocol {PROTOCOL} and newer {PROTOCOL + 1}" in answer.reason
    await end_of(framed)
    framed.close()
    assert "ticket-L1" in hub.book.tickets


async def test_the_reader_can_not_write_into_the_source(hub: Hub) -> None:
    hub.book.offer("L1", hub.published(1))
    framed = await hub.raw(Hello(PROTOCOL, "ticket-L1", "reader"))
    assert isinstance(await from_source(framed), Welcome)
    fd = framed.take_fd()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    os.close(fd)
    framed.close()
    await hub.book.until("gone", "L1")


async def test_both_sides_hear_of_the_others_end(hub: Hub) -> None:
    lost = Lost()
    segment = hub.published(MIB)
    session = await hub.open("L1", segment, lost)
    await hub.source.stop()
    assert "the source is gone" in await lost.wait()
    assert hub.book.told == [("gone", "L1")]
    assert not await session.still_holds()
    with pytest.raises(TransportLost, match="the source is gone"):
        await session.read(memoryview(bytearray(MIB)), whole(segment), digests=True)
    await session.close()
    assert len(lost.reasons) == 1
    assert not os.path.exists(hub.source.endpoint)  # noqa: ASYNC240, PTH110 (a test may block)
    await hub.source.start()
    again = await hub.open("L2", segment)
    again._framed.close()
    await hub.book.until("gone", "L2")
    await again.close()


async def test_a_broken_lease_is_told_with_its_reason_and_not_to_the_book(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open("L1", hub.published(1), lost)
    hub.source.break_lease("L1", "the shard is drained " * 100)
    hub.source.break_lease("L1", "twice")
    hub.source.break_lease("L7", "unknown")
    assert "broken the lease: the shard is drained" in await lost.wait()
    assert not await session.still_holds()
    await session.close()
    await hub.source.stop()
    assert hub.book.told == []


async def test_the_book_decides_whether_a_lease_holds(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open("L1", hub.published(1), lost)
    assert await asyncio.gather(*(session.still_holds() for _ in range(3))) == [True] * 3
    hub.book.open.clear()
    assert not await session.still_holds()
    assert lost.reasons == []
    await session.close()


async def test_an_open_lease_is_renewed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_session, "RENEW_S", 0.01)
    session = await hub.open("L1", hub.published(1))
    await hub.book.until("renewed", "L1")
    await session.close()


async def test_a_read_that_does_not_fit_the_segment_is_lost_and_writes_nothing(hub: Hub) -> None:
    segment = hub.published(1)
    session = await hub.open("L1", segment)
    destination = bytearray(10 * MIB)
    with pytest.raises(TransportLost, match="does not fit"):
        await session.read(memoryview(destination), Spans([0], [0], [MIB]), digests=True)
    assert destination == bytes(10 * MIB)
    await session.close()


async def test_close_comes_back_when_nobody_writes_any_more(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a caller that is cancelled; the read raises, and later tasks of it are never begun."""
    gate, entered = threading.Event(), asyncio.Event()
    loop, memmove, inside = asyncio.get_running_loop(), copying._memmove, []

    def slow(*args: Any) -> None:
        inside.append(1)
        loop.call_soon_threadsafe(entered.set)
        assert gate.wait(GIVE_UP_S)
        memmove(*args)
        inside.pop()

    monkeypatch.setattr(copying, "_memmove", slow)
    segment = hub.published(16 * MIB)
    destination = memoryview(bytearray(segment.nbytes))
    session = await hub.open("L1", segment)
    reading = asyncio.create_task(session.read(destination, whole(segment), digests=True))
    await entered.wait()
    closing = asyncio.create_task(session.close())
    other = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    assert not other.done()
    assert not reading.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await other
    assert inside == []
    with pytest.raises(TransportLost, match="closed"):
        await reading
    left = bytes(destination)
    await hub.book.until("done", "L1")
    assert destination == left


async def test_a_read_under_way_when_the_source_dies_still_tells_its_digests(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, memmove = threading.Event(), copying._memmove

    def slow(*args: Any) -> None:
        assert gate.wait(GIVE_UP_S)
        memmove(*args)

    monkeypatch.setattr(copying, "_memmove", slow)
    lost = Lost()
    segment = hub.published(MIB)
    destination = memoryview(bytearray(segment.nbytes))
    session = await hub.open("L1", segment, lost)
    reading = asyncio.create_task(session.read(destination, whole(segment), digests=True))
    await asyncio.sleep(0)
    await hub.source.stop()
    await lost.wait()
    gate.set()
    assert await reading == digests_of(segment.view, whole(segment))
    await session.close()


async def test_the_second_read_of_a_segment_maps_nothing(hub: Hub) -> None:
    segments = [hub.published(1, seed) for seed in range(4)]
    first = await hub.open("a", segments[0])
    await first.close()
    second = await hub.open("b", segments[0])
    assert second._mapping is first._mapping
    for number, segment in enumerate(segments):
        session = await hub.open(f"c{number}", segment)
        await session.close()
    assert len(hub.reader._cache) == 3, "two that nobody uses, and one in use"
    assert second._mapping.view == segments[0].view
    await second.close()
    assert len(hub.reader._cache) == 2


async def test_a_removed_segment_is_let_go(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_local, "SWEEP_S", 0.01)
    await hub.reader.stop()
    await hub.reader.start()
    segment = hub.published(1)
    await (await hub.open("a", segment)).close()
    assert len(hub.reader._cache) == 1
    hub.store.remove(segment)
    async with asyncio.timeout(GIVE_UP_S):
        while len(hub.reader._cache):  # noqa: ASYNC110 (there is nothing to be told by)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("first", [Renew(), Confirm(1), Done()])
async def test_a_frame_out_of_order_ends_the_connection(
    hub: Hub, first: Frame, caplog: pytest.LogCaptureFixture
) -> None:
    framed = await hub.raw(first)
    await end_of(framed)
    framed.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "first frame must be Hello" in caplog.text


async def test_a_second_hello_ends_the_lease(hub: Hub) -> None:
    hub.book.offer("L1", hub.published(1))
    framed = await hub.raw(Hello(PROTOCOL, "ticket-L1", "reader"))
    await send(framed, Hello(PROTOCOL, "ticket-L1", "reader"))
    await end_of(framed)
    framed.close()
    await hub.book.until("gone", "L1")


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b"\x00\x00\x20\x00", b"\x00\x00\x00\x00"]
)
async def test_what_is_no_frame_ends_the_connection(hub: Hub, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    framed = await hub.raw()
    framed._sock.send(data)
    await end_of(framed)
    framed.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_connection_that_says_nothing_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_local, "HELLO_S", 0.02)
    framed = await hub.raw()
    await end_of(framed)
    framed.close()


async def test_a_reader_that_falls_silent_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_local, "SILENCE_S", 0.02)
    lost = Lost()
    session = await hub.open("L1", hub.published(1), lost)
    assert "gone" in await lost.wait()
    await hub.book.until("gone", "L1")
    await session.close()


async def test_there_is_a_bound_on_connections(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_local, "CONNECTIONS_MAX", 1)
    segment = hub.published(1)
    session = await hub.open("L1", segment)
    with pytest.raises(TransportLost, match="can't be read from"):
        await hub.open("L2", segment)
    await session.close()


async def test_another_user_is_not_let_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_local, "peer_of", lambda _: (1, os.geteuid() + 1))
    with pytest.raises(TransportLost):
        await hub.open("L1", hub.published(1))
    assert "ticket-L1" in hub.book.tickets


async def test_nobody_there_is_lost_at_once(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(TransportLost, match="nobody answers"):
        await hub.reader.open(hub.grant("L1", str(tmp_path / "no")), reader="reader", on_lost=lambda _: None)


class FakeSource:
    """A source that does what the test says, at a socket of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.setblocking(False)  # noqa: FBT003

    async def accept(self) -> Framed:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        return Framed(connection, FRAME_BYTES_MAX)

    async def welcome(self, segment: Segment) -> Framed:
        framed = await self.accept()
        assert isinstance(await from_reader(framed), Hello)
        await send(framed, Welcome(segment.name, segment.nbytes), segment.fd)
        return framed

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSource]:
    source = FakeSource(tmp_path / "fake.peers")
    with contextlib.closing(source):
        yield source


async def test_a_source_that_stands_still_holds_nobody_up(
    hub: Hub, fake: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts for it, as for a stopped process, and nothing comes."""
    monkeypatch.setattr(transport_local, "OPEN_S", 0.05)
    with pytest.raises(TransportLost, match=r"did not let us in within 0.05 s"):
        await hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lambda _: None)


async def test_a_source_that_stands_still_later_is_lost_when_asked(
    hub: Hub, fake: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_session, "CONFIRM_S", 0.05)
    segment, lost = hub.published(MIB), Lost()
    opening = asyncio.create_task(hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lost))
    framed = await fake.welcome(segment)
    session = await opening
    destination = memoryview(bytearray(segment.nbytes))
    assert await session.read(destination, whole(segment), digests=True) == digests_of(segment.view, whole(segment))
    assert not await session.still_holds()
    assert "has not said within" in await lost.wait()
    await session.close()
    framed.close()


@pytest.mark.parametrize("frame", [Welcome("name", 1), No("too late"), Done()])
async def test_a_source_that_says_nonsense_is_lost(hub: Hub, fake: FakeSource, frame: Frame) -> None:
    lost = Lost()
    opening = asyncio.create_task(hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lost))
    framed = await fake.welcome(hub.published(1))
    session = await opening
    await send(framed, frame)
    assert "can't be read" in await lost.wait()
    await session.close()
    framed.close()


@pytest.mark.parametrize("frame", [Broken("too early"), Welcome("name", 1), Welcome("name", 1 << 40), Done()])
async def test_a_source_that_lets_in_wrongly_is_lost(hub: Hub, fake: FakeSource, frame: Frame) -> None:
    """Too early, without a descriptor, with a descriptor of less memory than said, in no known words."""
    segment = hub.published(1)
    opening = asyncio.create_task(
        hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lambda _: None)
    )
    framed = await fake.accept()
    await from_reader(framed)
    await send(framed, frame, segment.fd if frame == Welcome("name", 1 << 40) else None)
    with pytest.raises(TransportLost, match="can't be read from"):
        await opening
    await end_of(framed)
    framed.close()
