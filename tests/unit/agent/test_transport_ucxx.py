"""The ucxx transport between agents that keep to its rules: what a read brings, what a lease means, how both end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.agent.lease_book import Lost
from tests.unit.agent.ucxx_hub import MIB, Hub, cut, digests_of, ucxx_hub

from tensorhub_agent.compute.pool import Spans
from tensorhub_agent.transports import lease_session
from tensorhub_agent.transports.base import Transport, TransportLost
from tensorhub_agent.transports.ucxx import server
from tensorhub_agent.transports.ucxx import transport as ucxx_transport
from tensorhub_common.protocol.leases import LeaseGrant

pytest.importorskip("ucxx", reason="the extra 'agent' brings ucxx, on Linux")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with ucxx_hub(tmp_path) as hub:
        yield hub


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
    monkeypatch.setattr(server, "IDLE_S", 0.02)
    segment = hub.segment(MIB)
    for number in range(5):
        session = await hub.open(segment, Lost(), f"lease-{number}")
        await session.close()
        await hub.book.until("done", f"lease-{number}")
        if number % 2:
            await hub.until_links(0, 0)


async def test_idle_connections_are_bounded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_transport, "IDLE_LINKS_MAX", 2)
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
    monkeypatch.setattr(lease_session, "RENEW_S", 0.01)
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
