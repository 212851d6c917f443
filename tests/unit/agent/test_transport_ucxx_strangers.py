"""The ucxx transport between agents of which one keeps to no rule: it says nonsense, asks too much, or says nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.agent.lease_book import GIVE_UP_S, Lost
from tests.unit.agent.ucxx_hub import MIB, Hub, ucxx_hub

from tensorhub_agent.primitives.lease_messages import Hello, LeaseMessage, ReaderDone, Welcome
from tensorhub_agent.transports.base import unheard
from tensorhub_agent.transports.ucxx import server
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import COUNT_BITS, FRAME_BYTES_MAX, PieceRequest, encode
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_common.protocol.log.commands import PROTOCOL

pytest.importorskip("ucxx", reason="the extra 'agent' brings ucxx, on Linux")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with ucxx_hub(tmp_path) as hub:
        yield hub


class Stranger:
    """A connection to the source that says what the test has it say."""

    def __init__(self, hub: Hub) -> None:
        address, _, port = hub.source.endpoint.rpartition(":")
        self.down = Lost()
        self.heard: list[bytes] = []
        self.link: UcxxLink = hub.reader._engine.connect(address, int(port))
        self.link.on_down = self.down
        self.link.on_frame = self.heard.append


@pytest.mark.parametrize(
    "data",
    [
        encode(ReaderDone()),
        encode(PieceRequest(1, [0], [1])),
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
    assert b"upgrade tensorhub where agent source runs" in stranger.heard[0]
    session = await hub.reader.open(grant, reader="reader", on_lost=Lost())
    await session.close()


@pytest.mark.parametrize(
    "want",
    [
        PieceRequest(1, [0], [2 * MIB]),
        PieceRequest(1, [-1], [5]),
        PieceRequest(1, [0], [0]),
        PieceRequest(1, [0, 1], [1]),
        PieceRequest(1, [], []),
        PieceRequest(1, [1 << 60], [1 << 60]),
        PieceRequest(1, [0] * 5000, [1] * 5000),
    ],
)
async def test_what_reaches_beyond_the_grant_ends_the_lease_and_sends_nothing(hub: Hub, want: PieceRequest) -> None:
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
    monkeypatch.setattr(server, "HELLO_S", 0.05)
    stranger = Stranger(hub)
    await stranger.down.wait()
    await stranger.link.close()
    await hub.until_links(0, 0)


async def test_a_reader_that_falls_silent_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE_S", 0.05)
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    await lost.wait()
    await hub.book.until("gone", "lease")
    await session.close()


@pytest.mark.parametrize("frame", [Welcome("again", 5), b"nonsense"])
async def test_a_source_that_says_nonsense_is_lost(hub: Hub, frame: LeaseMessage | bytes) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    (served,) = hub.source._readers
    served._link.send(frame if isinstance(frame, bytes) else encode(frame))
    assert "can't be read" in await lost.wait()
    await session.close()


async def test_a_welcome_that_nobody_waits_for_any_more_is_no_nonsense(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine handshakes are late, and what is late is no fault of the source's."""
    address, _, port = hub.source.endpoint.rpartition(":")
    link = hub.reader._engine.connect(address, int(port))
    lost: list[str] = []
    session = UcxxSession(link, 1 << COUNT_BITS, hub.reader._pool, SlotPool(), lost.append, unheard, lambda _: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.welcomed(), 0.01)
    session._took(encode(Welcome("late", 5)))
    assert lost == ["the source let us in too late"]
    assert not caplog.records
    await session.close()
