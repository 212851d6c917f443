"""What holds for every transport: what a read brings, what a lease means, how both sides end, who is let in."""

import asyncio
import contextlib

import pytest
from msgspec.structs import replace
from tests.kit.fakes import Lost
from tests.unit.agent.transports.hubs import MIB, Hub, cut, digests_of

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.lease_messages import (
    AvailabilityUpdate,
    ConfirmReply,
    ConfirmRequest,
    Hello,
    LeaseBroken,
    LeaseMessage,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
    ReaderDone,
    Renew,
    SourceMessage,
    Welcome,
)
from tensorhub_agent.transports import lease_session
from tensorhub_agent.transports.base import Transport, TransportLost
from tensorhub_agent.transports.lease_server import LeaseServer
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.plans import SourceId

# Reads.


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("each", [MIB, 20 * MIB + 3, 1000])
async def test_a_read_brings_the_sources_bytes(hub: Hub, each: int, digests: bool) -> None:  # noqa: FBT001
    transport: Transport = hub.source
    segment = hub.segment(21 * MIB if each > 1000 else MIB)
    session = await hub.open(segment)
    spans, destination = cut(segment.nbytes, each), memoryview(bytearray(segment.nbytes))
    found = await session.read(destination, spans, digests=digests)
    assert destination == segment.view
    assert found == (digests_of(segment.view, spans) if digests else b"")
    assert await session.still_holds()
    await session.close()
    await hub.leases.until("done")
    assert hub.leases.ends == [("done", "lease")]
    assert transport.served_bytes == segment.nbytes
    assert not await session.still_holds()
    with pytest.raises(TransportLost, match="closed"):
        await session.read(destination, spans, digests=digests)


async def test_pieces_of_all_sizes_go_where_they_belong_and_nowhere_else(hub: Hub) -> None:
    segment = hub.segment(2 * MIB)
    spans = Spans(
        to=[10, 100, 4000, 5000, 600_000, 1_900_000],
        origin=[64, 320, 4096, 5000, 500_000, 1_000_000],
        nbytes=[7, 0, 12, 31, 300_000, 99_999],
    )
    destination, expected = memoryview(bytearray(b"x" * (2 * MIB))), bytearray(b"x" * (2 * MIB))
    session = await hub.open(segment)
    found = await session.read(destination, spans, digests=True)
    for to, origin, nbytes in zip(spans.to, spans.origin, spans.nbytes, strict=True):
        expected[to : to + nbytes] = segment.view[origin : origin + nbytes]
    assert destination == expected
    assert found == digests_of(memoryview(expected), spans)
    await session.close()


async def test_reads_of_one_session_and_of_several_may_overlap(hub: Hub) -> None:
    segments = [hub.segment(8 * MIB, seed) for seed in range(3)]
    sessions = [await hub.open(segment, lease=f"lease-{n}") for n, segment in enumerate(segments)]
    memories = [memoryview(bytearray(8 * MIB)) for _ in segments]
    halves = [Spans([at], [at], [4 * MIB]) for at in (0, 4 * MIB)]
    await asyncio.gather(
        *(s.read(memory, half, digests=True) for s, memory in zip(sessions, memories, strict=True) for half in halves)
    )
    for segment, memory in zip(segments, memories, strict=True):
        assert memory == segment.view[: 8 * MIB]
    for session in sessions:
        await session.close()


async def test_a_session_that_is_closed_in_a_read_stops_it_and_is_not_lost(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(64 * MIB), lost)
    memory = memoryview(bytearray(64 * MIB))
    read = asyncio.create_task(session.read(memory, cut(64 * MIB, 64 * MIB), digests=False))
    await asyncio.sleep(0)
    await session.close()
    left = bytes(memory)
    with contextlib.suppress(TransportLost):
        await read
    session.lose("a reason that comes late")
    await hub.until_links(0, 0)
    assert memory == left
    assert lost.reasons == []


async def test_a_cancelled_read_ends_only_when_nothing_is_under_way(hub: Hub) -> None:
    session = await hub.open(hub.segment(64 * MIB))
    memory = memoryview(bytearray(64 * MIB))
    read = asyncio.create_task(session.read(memory, cut(64 * MIB, 64 * MIB), digests=True))
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    left = bytes(memory)
    assert hub.reader.links == 0
    await session.close()
    assert memory == left


# Leases.


async def test_a_ticket_is_good_once_and_a_wrong_one_never(hub: Hub) -> None:
    session = await hub.open(hub.segment(MIB))
    for lease in ("lease", "another"):
        with pytest.raises(TransportLost, match="refused: the ticket is unknown, used or too old"):
            await hub.show_ticket(lease=lease)
    assert await session.still_holds()
    await session.close()


async def test_another_protocol_is_refused_in_words_and_its_ticket_stays_good(hub: Hub) -> None:
    hub.leases.offer("lease", hub.segment(MIB))
    stranger = await hub.stranger()
    await stranger.say(Hello(PROTOCOL + 1, "ticket-lease", "newer"))
    await stranger.until_cut_off()
    (answer,) = stranger.answers
    assert f"(protocol {PROTOCOL}) is too old for newer (protocol {PROTOCOL + 1}): upgrade".encode() in answer
    session = await hub.show_ticket()
    await session.close()


async def test_both_sides_are_told_of_the_others_end(hub: Hub) -> None:
    segment, lost = hub.segment(MIB), Lost()
    session = await hub.open(segment, lost)
    await hub.source.stop()
    await lost.wait()
    assert hub.leases.ends == [("gone", "lease")]
    assert not await session.still_holds()
    with pytest.raises(TransportLost):
        await session.read(memoryview(bytearray(MIB)), cut(MIB, MIB), digests=True)
    session.lose("a second reason")
    await session.close()
    assert len(lost.reasons) == 1


async def test_a_broken_lease_is_told_once_with_its_reason_and_not_to_the_authority(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    for lease, reason in (("lease", "the shard is drained " * 100), ("lease", "twice"), ("other", "unknown")):
        hub.source.break_lease(lease, reason)
    reason = await lost.wait()
    assert "broken the lease: the shard is drained" in reason
    assert len(reason) < 1000, "it is cut to what a frame takes"
    assert not await session.still_holds()
    with pytest.raises(TransportLost, match="drained"):
        await session.read(memoryview(bytearray(8)), Spans([0], [0], [8]), digests=False)
    await session.close()
    await hub.until_links(0, 0)
    assert hub.leases.ends == []


async def test_the_authority_decides_whether_a_lease_holds(hub: Hub) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    assert await asyncio.gather(*(session.still_holds() for _ in range(3))) == [True] * 3
    hub.leases.open.clear()
    assert not await session.still_holds()
    assert lost.reasons == []
    await session.close()


async def test_each_answer_is_for_the_question_that_it_names(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come late, in another order, twice, and to no question; the end of the session is no yes."""
    kept: list[int] = []
    receive = LeaseServer.receive

    def keep(server: LeaseServer, message: object) -> list[SourceMessage]:
        if not isinstance(message, ConfirmRequest):
            return receive(server, message)
        kept.append(message.number)
        if len(kept) < 2:
            return []
        return [ConfirmReply(99, holds=True), *(ConfirmReply(each, each == kept[1]) for each in kept[::-1] + kept)]

    monkeypatch.setattr(LeaseServer, "receive", keep)
    session = await hub.open(hub.segment(MIB))
    first, second = await asyncio.gather(session.still_holds(), session.still_holds())
    assert (first, second) == (False, True)
    unanswered = asyncio.create_task(session.still_holds())
    await asyncio.sleep(0)
    await session.close()
    assert not await unanswered


async def test_a_source_that_gives_no_answer_is_lost(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_session, "CONFIRM_S", 0.05)
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    monkeypatch.setattr(LeaseServer, "receive", lambda *_: [])
    assert not await session.still_holds()
    assert "has not said within 0.05 s whether the lease holds" in await lost.wait()
    await session.close()


async def test_an_open_lease_is_renewed_and_a_reader_that_waits_is_answered(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_session, "RENEW_S", 0.01)
    updates: asyncio.Queue[AvailabilityUpdate] = asyncio.Queue()
    hub.leases.waits = True
    hub.leases.offer("lease", hub.segment(MIB))
    session = await hub.show_ticket(have=updates.put_nowait)
    await hub.leases.until("renewed")
    assert await updates.get() == PiecesAvailable()
    await session.close()


async def test_a_half_filled_source_tells_of_its_pieces_in_order(hub: Hub) -> None:
    """First what is there and what is promised, then each change; more ranges than a frame takes come in several."""
    updates: asyncio.Queue[AvailabilityUpdate] = asyncio.Queue()
    hub.leases.offer("lease", hub.segment(MIB))
    ticket, many = hub.leases.tickets["ticket-lease"], tuple((2 * n, 1) for n in range(1000))
    hub.leases.tickets["ticket-lease"] = replace(ticket, pieces=((0, 5),), promised=((7, 2),))
    session = await hub.show_ticket(have=updates.put_nowait)
    first = [await updates.get() for _ in range(2)]
    assert sorted(first, key=repr) == [PiecesAvailable(((0, 5),)), PiecesPromised(((7, 2),))]
    new_owner = SourceId("agent-1", 1, "rollout", 0)
    changes = [PromiseRetracted(((7, 1),)), PiecesHandedOff(((8, 1),), new_owner), PiecesAvailable(many)]
    for change in changes:
        hub.source.announce("lease", change)
    hub.source.announce("other", PiecesAvailable())
    assert [await updates.get(), await updates.get()] == changes[:2]
    pieces: list[tuple[int, int]] = []
    while len(pieces) < len(many):
        pieces += (await updates.get()).pieces
    assert tuple(pieces) == many
    await session.close()


# Who is let in.


async def test_a_source_at_which_no_agent_listens_is_lost(hub: Hub) -> None:
    """Of one on this host it is said which setting makes the planner believe that it is here."""
    why = ".*set TENSORHUB_HOST to a name of" if hub.kind == "local" else ""
    with pytest.raises(TransportLost, match=hub.nowhere + why):
        await hub.show_ticket(endpoint=hub.nowhere)
    assert hub.reader.links == 0


@pytest.mark.parametrize("frame", [LeaseBroken("too early"), ReaderDone()])
async def test_a_source_that_lets_in_wrongly_is_lost(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, frame: LeaseMessage
) -> None:
    monkeypatch.setattr(LeaseServer, "receive", lambda *_: [frame])
    with pytest.raises(TransportLost):
        await hub.open(hub.segment(MIB))
    await hub.until_links(0, 0)


@pytest.mark.parametrize(
    "first", [Renew(), ConfirmRequest(1), ReaderDone(), b"\xc1 no frame", b"{}", b"x" * 4097, b"x" * (256 * 1024 + 1)]
)
async def test_a_connection_that_shows_no_ticket_is_cut_off(hub: Hub, first: LeaseMessage | bytes) -> None:
    hub.leases.offer("lease", hub.segment(MIB))
    stranger = await hub.stranger()
    await stranger.say(first)
    await stranger.until_cut_off()
    assert (hub.leases.told, stranger.answers) == ([], [])


async def test_a_connection_that_says_nothing_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.serving, "HELLO_S", 0.05)
    stranger = await hub.stranger()
    await stranger.until_cut_off()
    await hub.until_links(0, 0)


async def test_a_second_hello_ends_the_lease(hub: Hub) -> None:
    hub.leases.offer("lease", hub.segment(MIB))
    stranger = await hub.stranger()
    for _ in range(2):
        await stranger.say(Hello(PROTOCOL, "ticket-lease", "reader"))
    await stranger.until_cut_off()
    await hub.leases.until("gone")


async def test_a_reader_that_falls_silent_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.serving, "SILENCE_S", 0.05)
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    await lost.wait()
    await hub.leases.until("gone")
    await session.close()


@pytest.mark.parametrize("frame", [Welcome("again", 5), ReaderDone(), b"nonsense"])
async def test_a_source_that_says_nonsense_is_lost(hub: Hub, frame: LeaseMessage | bytes) -> None:
    lost = Lost()
    session = await hub.open(hub.segment(MIB), lost)
    await hub.source_says(frame)
    assert "can't be read" in await lost.wait()
    await session.close()
