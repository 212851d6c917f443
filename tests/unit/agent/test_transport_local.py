"""The local transport between agents that keep to its rules: what a read brings, what a lease means, how both end."""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.lease_book import GIVE_UP_S, Lost
from tests.unit.agent.local_hub import MIB, Hub, digests_of, end_of, local_hub, whole

from tensorhub_agent.compute import pool
from tensorhub_agent.compute.pool import Spans
from tensorhub_agent.primitives.lease_messages import Denied, Hello, Welcome
from tensorhub_agent.transports import lease_session
from tensorhub_agent.transports.base import Transport, TransportLost
from tensorhub_agent.transports.local import transport as local_transport
from tensorhub_agent.transports.local.framing import from_source
from tensorhub_agent.transports.local.session import LocalSession
from tensorhub_common.protocol.log.commands import PROTOCOL


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with local_hub(tmp_path) as hub:
        yield hub


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


async def test_an_agent_that_is_on_another_machine_of_the_same_name_is_told_so(hub: Hub) -> None:
    """Its socket is nowhere here, and the error says which setting makes the planner believe that it is."""
    with pytest.raises(
        TransportLost, match=r"nobody answers on /nowhere/a\.peers.*set TENSORHUB_HOST to a name of its own"
    ):
        await hub.reader.open(hub.grant("L1", "/nowhere/a.peers"), reader="reader", on_lost=lambda _: None)


async def test_another_protocol_is_refused_in_words_and_its_ticket_stays_good(hub: Hub) -> None:
    hub.book.offer("L1", hub.published(1))
    framed = await hub.raw(Hello(PROTOCOL + 1, "ticket-L1", "newer"))
    answer = await from_source(framed)
    assert isinstance(answer, Denied)
    assert f"(protocol {PROTOCOL}) is too old for newer (protocol {PROTOCOL + 1}): upgrade tensorhub" in answer.reason
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
    monkeypatch.setattr(lease_session, "RENEW_S", 0.01)
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
    loop, memmove, inside = asyncio.get_running_loop(), pool.memmove, []

    def slow(*args: Any) -> None:
        inside.append(1)
        loop.call_soon_threadsafe(entered.set)
        assert gate.wait(GIVE_UP_S)
        memmove(*args)
        inside.pop()

    monkeypatch.setattr(pool, "memmove", slow)
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
    gate, memmove = threading.Event(), pool.memmove

    def slow(*args: Any) -> None:
        assert gate.wait(GIVE_UP_S)
        memmove(*args)

    monkeypatch.setattr(pool, "memmove", slow)
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
    assert isinstance(first, LocalSession)
    assert isinstance(second, LocalSession)
    assert second._mapping is first._mapping
    for number, segment in enumerate(segments):
        session = await hub.open(f"c{number}", segment)
        await session.close()
    assert len(hub.reader._cache) == 3, "two that nobody uses, and one in use"
    assert second._mapping.view == segments[0].view
    await second.close()
    assert len(hub.reader._cache) == 2


async def test_a_removed_segment_is_let_go(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transport, "SWEEP_S", 0.01)
    await hub.reader.stop()
    await hub.reader.start()
    segment = hub.published(1)
    await (await hub.open("a", segment)).close()
    assert len(hub.reader._cache) == 1
    hub.store.remove(segment)
    async with asyncio.timeout(GIVE_UP_S):
        while len(hub.reader._cache):  # noqa: ASYNC110 (there is nothing to be told by)
            await asyncio.sleep(0.005)
