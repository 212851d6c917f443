"""Real UCX over loopback, real segments; two agents in one process, and one that is stopped and killed in another."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.unit.agent.lease_book import GIVE_UP_S, Book, Lost

from tensorhub_agent import transport_ucxx, ucxx_idle, ucxx_serving, ucxx_session
from tensorhub_agent.copying import CopyPool, Spans
from tensorhub_agent.lease_frames import Done, Frame, Hello, Welcome
from tensorhub_agent.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transport import Transport, TransportLost
from tensorhub_agent.transport_ucxx import UcxxTransport
from tensorhub_agent.ucxx_frames import FRAME_BYTES_MAX, Want, encode
from tensorhub_agent.ucxx_link import Link
from tensorhub_agent.ucxx_serving import Book as ServingBook
from tensorhub_agent.ucxx_session import UcxxSession
from tensorhub_common.wire.commands import PROTOCOL
from tensorhub_common.wire.transfer import LeaseGrant

pytest.importorskip("ucxx", reason="the extra 'agent' brings ucxx, on Linux")

MIB = 1024 * 1024
SOURCE_PROGRAM = Path(__file__).parent / "ucxx_source.py"


class Hub:
    """A source and a reader, each with a UCX of its own."""

    def __init__(self, folder: Path, pool: CopyPool) -> None:
        self.store = SegmentStore(folder, segment_prefix("hub1", "source"), 1 << 30)
        self.book, self.pool = Book(), pool
        self.faults: list[str] = []
        self.source, self.reader = self.transport("source"), self.transport("reader")

    def transport(self, agent: str) -> UcxxTransport:
        book = ServingBook(self.book.redeem, self.book.renew, self.book.holds, self.book.ended)
        return UcxxTransport(address="127.0.0.1", agent=agent, pool=self.pool, book=book, fault=self.faults.append)

    def segment(self, nbytes: int, seed: int = 1) -> Segment:
        segment = self.store.create(nbytes)
        segment.view[:] = np.random.default_rng(seed).bytes(segment.nbytes)
        return segment

    def grant(self, lease: str, segment: Segment) -> LeaseGrant:
        self.book.offer(lease, segment)
        return LeaseGrant(
            lease=lease, ticket=f"ticket-{lease}", ticket_s=5.0, endpoint=self.source.endpoint, pieces=0, digests=b""
        )

    async def open(self, segment: Segment, lost: Lost, lease: str = "lease") -> UcxxSession:
        return await self.reader.open(self.grant(lease, segment), reader="reader", on_lost=lost)

    async def until_links(self, source: int, reader: int) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while (self.source.links, self.reader.links) != (source, reader):  # noqa: ASYNC110 (the threads tell nobody)
                await asyncio.sleep(0.005)


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
    assert hub.faults == []


def cut(nbytes: int, each: int) -> Spans:
    at = list(range(0, nbytes, each))
    return Spans(at, at, [min(each, nbytes - start) for start in at])


def digests_of(view: memoryview, spans: Spans) -> bytes:
    pairs = zip(spans.to, spans.nbytes, strict=True)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + nbytes]) for at, nbytes in pairs)


async def test_it_is_a_transport(hub: Hub) -> None:
    transport: Transport = hub.source
    address, _, port = transport.endpoint.rpartition(":")
    assert address == "127.0.0.1"
    assert int(port) > 0


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("each", [MIB, 20 * MIB + 3, 1000])
async def test_a_read_brings_the_sources_bytes(hub: Hub, each: int, digests: bool) -> None:  # noqa: FBT001
    nbytes = 21 * MIB if each > 1000 else MIB
    segment = hub.segment(nbytes)
    session = await hub.open(segment, Lost())
    spans = cut(segment.nbytes, each)
    destination = memoryview(bytearray(segment.nbytes))
    found = await session.read(destination, spans, digests=digests)
    assert destination == segment.view
    assert found == (digests_of(segment.view, spans) if digests else b"")
    assert await session.still_holds()
    await session.close()
    await hub.book.until("done", "lease")
    await hub.until_links(1, 1)


async def test_pieces_of_all_sizes_go_where_they_belong_and_nowhere_else(hub: Hub) -> None:
    segment = hub.segment(2 * MIB)
    spans = Spans(
        to=[10, 100, 4000, 5000, 600_000, 1_900_000],
        origin=[64, 320, 4096, 5000, 500_000, 1_000_000],
        nbytes=[7, 0, 12, 31, 300_000, 99_999],
    )
    destination = memoryview(bytearray(b"x" * (2 * MIB)))
    session = await hub.open(segment, Lost())
    found = await session.read(destination, spans, digests=True)
    expected = bytearray(b"x" * (2 * MIB))
    for to, origin, nbytes in zip(spans.to, spans.origin, spans.nbytes, strict=True):
        expected[to : to + nbytes] = segment.view[origin : origin + nbytes]
    assert destination == expected
    assert found == digests_of(memoryview(expected), spans)
    await session.close()


async def test_reads_of_one_session_and_of_several_may_overlap(hub: Hub) -> None:
    segments = [hub.segment(8 * MIB, seed) for seed in range(3)]
    sessions = [await hub.open(segment, Lost(), f"lease-{n}") for n, segment in enumerate(segments)]
    memories = [memoryview(bytearray(8 * MIB)) for _ in segments]
    halves = [Spans([at], [at], [4 * MIB]) for at in (0, 4 * MIB)]
    await asyncio.gather(
        *(s.read(memory, half, digests=True) for s, memory in zip(sessions, memories, strict=True) for half in halves)
    )
    for segment, memory in zip(segments, memories, strict=True):
        assert memory == segment.view[: 8 * MIB]
    for session in sessions:
        await session.close()


async def test_a_ticket_is_good_once_and_a_wrong_one_never(hub: Hub) -> None:
    segment = hub.segment(MIB)
    grant = hub.grant("lease", segment)
    session = await hub.reader.open(grant, reader="reader", on_lost=Lost())
    with pytest.raises(TransportLost, match="unknown, used or too old"):
        await hub.reader.open(grant, reader="reader", on_lost=Lost())
    await session.close()
    await hub.until_links(1, 1)


async def test_the_next_lease_goes_over_the_same_connection(hub: Hub) -> None:
    segment = hub.segment(MIB)
    for number in range(5):
        session = await hub.open(segment, Lost(), f"lease-{number}")
        memory = memoryview(bytearray(segment.nbytes))
        await session.read(memory, cut(segment.nbytes, MIB), digests=True)
        assert memory == segment.view
        await session.close()
        assert hub.reader.links == 1
    assert [what for what, _ in hub.book.told] == ["done"] * 5


async def test_an_idle_connection_that_the_source_has_closed_is_replaced(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucxx_serving, "IDLE_S", 0.02)
    segment = hub.segment(MIB)
    for number in range(5):
        session = await hub.open(segment, Lost(), f"lease-{number}")
        await session.close()
        await hub.book.until("done", f"lease-{number}")
        if number % 2:
            await hub.until_links(0, 0)


async def test_idle_connections_are_bounded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_idle, "IDLE_LINKS_MAX", 2)
    segment = hub.segment(MIB)
    sessions = [await hub.open(segment, Lost(), f"lease-{number}") for number in range(4)]
    assert hub.reader.links == 4
    for session in sessions:
        await session.close()
    await hub.until_links(2, 2)


async def test_a_session_that_is_closed_in_a_read_gives_no_connection_back(hub: Hub) -> None:
    session = await hub.open(hub.segment(64 * MIB), Lost())
    read = asyncio.create_task(session.read(memoryview(bytearray(64 * MIB)), cut(64 * MIB, 64 * MIB), digests=False))
    await asyncio.sleep(0)
    await session.close()
    with contextlib.suppress(TransportLost):
        await read
    await hub.until_links(0, 0)


async def test_a_broken_lease_is_told_with_its_reason_and_not_to_the_book(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    hub.source.break_lease("lease", "the shard is wanted back")
    assert "the shard is wanted back" in await lost.wait()
    assert not await session.still_holds()
    with pytest.raises(TransportLost):
        await session.read(memoryview(bytearray(8)), Spans([0], [0], [8]), digests=False)
    await session.close()
    await hub.until_links(0, 0)
    assert hub.book.told == []


async def test_the_book_decides_whether_a_lease_holds(hub: Hub) -> None:
    session = await hub.open(hub.segment(MIB), Lost())
    hub.book.open.clear()
    assert not await session.still_holds()
    await session.close()


async def test_an_open_lease_is_renewed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_session, "RENEW_S", 0.01)
    session = await hub.open(hub.segment(MIB), Lost())
    await hub.book.until("renewed", "lease")
    await session.close()


async def test_both_sides_hear_of_the_others_end(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    await hub.source.stop()
    await lost.wait()
    await session.close()
    assert ("gone", "lease") in hub.book.told


async def test_a_cancelled_read_ends_only_when_nothing_is_under_way(hub: Hub) -> None:
    """The link is gone when the caller is told, so nothing can arrive later."""
    segment = hub.segment(64 * MIB)
    session = await hub.open(segment, Lost())
    destination = memoryview(bytearray(64 * MIB))
    read = asyncio.create_task(session.read(destination, cut(64 * MIB, 64 * MIB), digests=True))
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert hub.reader.links == 0
    await session.close()


async def test_nobody_there_is_lost(hub: Hub) -> None:
    grant = LeaseGrant(lease="l", ticket="t", ticket_s=5, endpoint="127.0.0.1:9", pieces=0, digests=b"")
    with pytest.raises(TransportLost, match=r"127\.0\.0\.1:9"):
        await hub.reader.open(grant, reader="reader", on_lost=Lost())
    assert hub.reader.links == 0


@pytest.mark.parametrize("endpoint", ["", "nonsense", "/run/a.socket", "10.0.0.1:port"])
async def test_an_endpoint_of_another_kind_is_refused(hub: Hub, endpoint: str) -> None:
    grant = LeaseGrant(lease="l", ticket="t", ticket_s=5, endpoint=endpoint, pieces=0, digests=b"")
    with pytest.raises(TransportLost, match="no address of this transport"):
        await hub.reader.open(grant, reader="reader", on_lost=Lost())


# Peers that say what they should not.


class Stranger:
    """A connection to the source that says what the test has it say."""

    def __init__(self, hub: Hub) -> None:
        address, _, port = hub.source.endpoint.rpartition(":")
        self.down = Lost()
        self.heard: list[bytes] = []
        self.link: Link = hub.reader._engine.connect(address, int(port))
        self.link.on_down = self.down
        self.link.on_frame = self.heard.append


@pytest.mark.parametrize(
    "data",
    [
        encode(Done()),
        encode(Want(1, [0], [1])),
        b"\xc1 no frame",
        b"{}",
        encode(Hello(PROTOCOL, "ticket-lease", "reader"))[:-1],
        b"x" * (FRAME_BYTES_MAX + 1),
    ],
)
async def test_whoever_shows_no_ticket_is_cut_off(hub: Hub, data: bytes) -> None:
    hub.grant("lease", hub.segment(MIB))
    stranger = Stranger(hub)
    stranger.link.send(data)
    await stranger.down.wait()
    await stranger.link.close()
    assert hub.book.told == []
    assert stranger.heard == []


async def test_another_protocol_is_refused_in_words_and_its_ticket_stays_good(hub: Hub) -> None:
    segment = hub.segment(MIB)
    grant = hub.grant("lease", segment)
    stranger = Stranger(hub)
    stranger.link.send(encode(Hello(PROTOCOL + 1, grant.ticket, "newer")))
    await stranger.down.wait()
    await stranger.link.close()
    assert b"install the same version" in stranger.heard[0]
    session = await hub.reader.open(grant, reader="reader", on_lost=Lost())
    await session.close()


@pytest.mark.parametrize(
    "want",
    [
        Want(1, [0], [2 * MIB]),
        Want(1, [-1], [5]),
        Want(1, [0], [0]),
        Want(1, [0, 1], [1]),
        Want(1, [], []),
        Want(1, [1 << 60], [1 << 60]),
        Want(1, [0] * 5000, [1] * 5000),
    ],
)
async def test_what_reaches_beyond_the_grant_ends_the_lease_and_sends_nothing(hub: Hub, want: Want) -> None:
    segment = hub.segment(MIB)
    grant = hub.grant("lease", segment)
    stranger = Stranger(hub)
    stranger.link.send(encode(Hello(PROTOCOL, grant.ticket, "reader")))
    memory = memoryview(bytearray(4 * MIB))
    batch = stranger.link.receive([memory], 1)
    stranger.link.send(encode(want))
    await stranger.down.wait()
    await stranger.link.close()
    await asyncio.wait_for(asyncio.shield(batch.ended), GIVE_UP_S)
    assert memory == bytes(4 * MIB)
    await hub.book.until("gone", "lease")


async def test_a_connection_that_says_nothing_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_serving, "HELLO_S", 0.05)
    stranger = Stranger(hub)
    await stranger.down.wait()
    await stranger.link.close()
    await hub.until_links(0, 0)


async def test_a_reader_that_falls_silent_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_serving, "SILENCE_S", 0.05)
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    await lost.wait()
    await hub.book.until("gone", "lease")
    await session.close()


@pytest.mark.parametrize("frame", [Welcome("again", 5), b"nonsense"])
async def test_a_source_that_says_nonsense_is_lost(hub: Hub, frame: Frame | bytes) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    (served,) = hub.source._served
    served._link.send(frame if isinstance(frame, bytes) else encode(frame))
    assert "can't be read" in await lost.wait()
    await session.close()


# A source in a process of its own.


class Source:
    """A process that serves one segment, and can be stopped and killed."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.process, self.endpoint = process, endpoint

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def source_process(folder: Path, nbytes: int) -> AsyncIterator[Source]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SOURCE_PROGRAM),
        str(folder),
        str(nbytes),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(GIVE_UP_S * 3):
            line = (await process.stdout.readline()).decode().strip()
            while not line.startswith("ready "):
                line = (await process.stdout.readline()).decode().strip()
        yield Source(process, line.removeprefix("ready "))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_until_stuck(session: UcxxSession, memory: memoryview, source: Source) -> asyncio.Task[bytes]:
    """Begin to read, and stop the source once the first bytes have come."""
    read = asyncio.create_task(session.read(memory, cut(len(memory), len(memory)), digests=True))
    async with asyncio.timeout(GIVE_UP_S):
        while memory[0] == 0:  # noqa: ASYNC110 (bytes that come tell nobody)
            await asyncio.sleep(0)
    source.signal(signal.SIGSTOP)
    return read


async def test_close_ends_what_a_stopped_source_has_under_way_and_it_stays_ended(hub: Hub, tmp_path: Path) -> None:
    """Late bytes: whatever the source still had to send when it was stopped must not arrive once close has returned."""
    nbytes = 256 * MIB
    async with source_process(tmp_path, nbytes) as source:
        grant = LeaseGrant(lease="l", ticket="any", ticket_s=5, endpoint=source.endpoint, pieces=0, digests=b"")
        session = await hub.reader.open(grant, reader="reader", on_lost=Lost())
        memory = memoryview(bytearray(nbytes))
        read = await read_until_stuck(session, memory, source)
        await session.close()
        with pytest.raises(TransportLost):
            await read
        assert hub.reader.links == 0
        assert memory[-1] == 0, "all had come before the source was stopped, so the test shows nothing: use more bytes"
        memory[:] = bytes(nbytes)
        source.signal(signal.SIGCONT)
        # Once it serves again, it has done whatever it was stopped in.
        again = await hub.reader.open(grant, reader="reader", on_lost=Lost())
        other = memoryview(bytearray(MIB))
        await again.read(other, cut(MIB, MIB), digests=True)
        await again.close()
        assert other[0] != 0
        assert memory == bytes(nbytes)


async def test_a_killed_source_is_noticed(hub: Hub, tmp_path: Path) -> None:
    async with source_process(tmp_path, 64 * MIB) as source:
        grant = LeaseGrant(lease="l", ticket="any", ticket_s=5, endpoint=source.endpoint, pieces=0, digests=b"")
        lost = Lost()
        session = await hub.reader.open(grant, reader="reader", on_lost=lost)
        memory = memoryview(bytearray(64 * MIB))
        read = asyncio.create_task(session.read(memory, cut(len(memory), len(memory)), digests=True))
        source.signal(signal.SIGKILL)
        await lost.wait()
        await session.close()
        with contextlib.suppress(TransportLost):
            await read
        assert hub.reader.links == 0


async def test_a_stopped_source_lets_nobody_in_within_the_bound(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_ucxx, "OPEN_S", 0.2)
    async with source_process(tmp_path, MIB) as source:
        source.signal(signal.SIGSTOP)
        grant = LeaseGrant(lease="l", ticket="any", ticket_s=5, endpoint=source.endpoint, pieces=0, digests=b"")
        with pytest.raises(TransportLost, match="did not let us in"):
            await hub.reader.open(grant, reader="reader", on_lost=Lost())
        assert hub.reader.links == 0
