"""The ucxx transport: connections that serve several leases, and the end of a stranger that asks for too much."""

import asyncio

import pytest
from msgspec.structs import replace
from tests.kit.fakes import GIVE_UP_S
from tests.unit.agent.transports.hubs import MIB, Hub, cut

from tensorhub_agent.primitives.lease_messages import Hello, Welcome
from tensorhub_agent.transports.base import TransportLost, unheard
from tensorhub_agent.transports.ucxx import server
from tensorhub_agent.transports.ucxx import transport as ucxx_transport
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import COUNT_BITS, PieceRequest, encode
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_common.protocol.log.commands import PROTOCOL


async def test_the_next_lease_goes_over_the_same_connection(ucxx: Hub) -> None:
    segment = ucxx.segment(MIB)
    for number in range(5):
        session = await ucxx.open(segment, lease=f"lease-{number}")
        memory = memoryview(bytearray(segment.nbytes))
        await session.read(memory, cut(segment.nbytes, MIB), digests=True)
        assert memory == segment.view
        await session.close()
        assert ucxx.reader.links == 1
    assert [what for what, _ in ucxx.leases.ends] == ["done"] * 5


async def test_an_idle_connection_that_the_source_has_closed_is_replaced(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.02)
    segment = ucxx.segment(MIB)
    for number in range(5):
        session = await ucxx.open(segment, lease=f"lease-{number}")
        await session.close()
        await ucxx.leases.until("done", f"lease-{number}")
        if number % 2:
            await ucxx.until_links(0, 0)


async def test_idle_connections_are_bounded(ucxx: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_transport, "IDLE_LINKS_MAX", 2)
    segment = ucxx.segment(MIB)
    sessions = [await ucxx.open(segment, lease=f"lease-{number}") for number in range(4)]
    assert ucxx.reader.links == 4
    for session in sessions:
        await session.close()
    await ucxx.until_links(2, 2)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "/run/a.socket", "10.0.0.1:port"])
async def test_an_endpoint_of_another_kind_is_refused(ucxx: Hub, endpoint: str) -> None:
    grant = replace(ucxx.grant(), endpoint=endpoint)
    with pytest.raises(TransportLost, match="no address of this transport"):
        await ucxx.reader.open(grant, reader="reader", on_lost=lambda _: None)


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
async def test_what_reaches_beyond_the_grant_ends_the_lease_and_sends_nothing(ucxx: Hub, want: PieceRequest) -> None:
    ucxx.leases.offer("lease", ucxx.segment(MIB))
    stranger = await ucxx.stranger()
    assert isinstance(stranger.connection, UcxxLink)
    await stranger.say(Hello(PROTOCOL, "ticket-lease", "reader"))
    memory = memoryview(bytearray(4 * MIB))
    batch = stranger.connection.receive([memory], 1)
    await stranger.say(want)
    await stranger.until_cut_off()
    await asyncio.wait_for(asyncio.shield(batch.ended), GIVE_UP_S)
    assert memory == bytes(4 * MIB)
    await ucxx.leases.until("gone")


async def test_a_welcome_that_nobody_waits_for_any_more_is_no_nonsense(
    ucxx: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine handshakes are late, and what is late is no fault of the source's."""
    address, _, port = ucxx.source.endpoint.rpartition(":")
    link = ucxx.reader._engine.connect(address, int(port))
    lost: list[str] = []
    session = UcxxSession(link, 1 << COUNT_BITS, ucxx.reader._pool, SlotPool(), lost.append, unheard, lambda _: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.welcomed(), 0.01)
    session._took(encode(Welcome("late", 5)))
    assert lost == ["the source let us in too late"]
    assert not caplog.records
    await session.close()
