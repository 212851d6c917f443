"""The local transport: its socket, the mappings that it keeps, copies that a loss does not end, and its strangers."""

import asyncio
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.unit.agent.transports.hubs import MIB, Hub, cut, digests_of

from tensorhub_agent.compute import batch, pool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.lease_messages import (
    AvailabilityUpdate,
    Hello,
    LeaseMessage,
    PiecesAvailable,
    PiecesPromised,
    PromiseRetracted,
    Welcome,
)
from tensorhub_agent.runtime import unix_server
from tensorhub_agent.runtime.rejections import RejectionCounter, RejectionKind
from tensorhub_agent.transports.base import TransportLost, TransportSilent
from tensorhub_agent.transports.local import transport
from tensorhub_agent.transports.local.framing import from_source, send
from tensorhub_agent.transports.local.session import MappedSession
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.runtime.framed_socket import FramedSocket


@pytest.fixture(autouse=True)
def rejections(monkeypatch: pytest.MonkeyPatch) -> RejectionCounter:
    """The counts of a process that has refused nothing yet, and so logs the first."""
    counts = RejectionCounter()
    monkeypatch.setattr(transport, "REJECTIONS", counts)
    monkeypatch.setattr(unix_server, "REJECTIONS", counts)
    return counts


async def test_the_socket_is_this_users_alone_and_is_there_while_it_serves(local: Hub) -> None:
    about = os.stat(local.source.endpoint)  # noqa: PTH116 (a test may block)
    assert stat.S_ISSOCK(about.st_mode)
    assert stat.S_IMODE(about.st_mode) == 0o600
    await local.source.stop()
    assert not os.path.exists(local.source.endpoint)  # noqa: ASYNC240, PTH110 (as above)
    await local.source.start()
    session = await local.open(local.segment(1))
    session._framed.close()
    await local.leases.until("gone")
    await session.close()


async def test_a_socket_path_that_no_socket_takes_and_a_folder_that_is_none_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, why in ((tmp_path / ("x" * 200), "TENSORHUB_SOCKET"), (tmp_path / "file" / "a", "can't listen at")):
        it = transport.LocalTransport(socket=path, agent="a", pool=None, leases=None)  # type: ignore[arg-type]
        with pytest.raises(AgentUnavailable, match=why):
            await it.start()


async def test_the_reader_can_not_write_into_the_source(local: Hub) -> None:
    local.leases.offer("lease", local.segment(1))
    framed = (await local.stranger()).connection
    assert isinstance(framed, FramedSocket)
    await send(framed, Hello(PROTOCOL, "ticket-lease", "reader"))
    assert isinstance(await from_source(framed), Welcome)
    fd = framed.take_fd()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    os.close(fd)
    framed.close()
    await local.leases.until("gone")


async def test_a_read_that_does_not_fit_the_segment_is_lost_and_writes_nothing(local: Hub) -> None:
    session = await local.open(local.segment(1))
    destination = bytearray(10 * MIB)
    with pytest.raises(TransportLost, match="does not fit"):
        await session.read(memoryview(destination), Spans([0], [0], [MIB]), digests=True)
    assert destination == bytes(10 * MIB)
    await session.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, asyncio.Event, list[int]]:
    """Hold every copy up until the first is set; the second tells that one has begun, the list has one item each."""
    goes_on, entered, inside = threading.Event(), asyncio.Event(), list[int]()
    memmove = batch.memmove

    def slow(*args: Any) -> None:
        inside.append(1)
        loop.call_soon_threadsafe(entered.set)
        assert goes_on.wait(GIVE_UP_S)
        memmove(*args)
        inside.pop()

    loop = asyncio.get_event_loop_policy().get_event_loop()
    monkeypatch.setattr(pool, "memmove", slow)
    return goes_on, entered, inside


async def test_close_returns_when_no_thread_writes_any_more(
    local: Hub, gate: tuple[threading.Event, asyncio.Event, list[int]]
) -> None:
    """Also for a caller that is cancelled; the read raises, and later tasks of it are never begun."""
    goes_on, entered, inside = gate
    segment = local.segment(16 * MIB)
    destination = memoryview(bytearray(segment.nbytes))
    session = await local.open(segment)
    reading = asyncio.create_task(session.read(destination, cut(segment.nbytes, MIB), digests=True))
    await entered.wait()
    closing, other = asyncio.create_task(session.close()), asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in (closing, other, reading))
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await other
    assert inside == []
    with pytest.raises(TransportLost, match="closed"):
        await reading
    left = bytes(destination)
    await local.leases.until("done")
    assert destination == left


async def test_a_read_under_way_when_the_source_dies_still_tells_its_digests(
    local: Hub, gate: tuple[threading.Event, asyncio.Event, list[int]]
) -> None:
    lost, segment = Lost(), local.segment(MIB)
    session = await local.open(segment, lost)
    reading = asyncio.create_task(session.read(memoryview(bytearray(MIB)), cut(MIB, MIB), digests=True))
    await asyncio.sleep(0)
    await local.source.stop()
    await lost.wait()
    gate[0].set()
    assert await reading == digests_of(segment.view, cut(MIB, MIB))
    await session.close()


async def test_the_second_read_of_a_segment_maps_nothing_and_a_removed_one_is_released(
    local: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SWEEP_S", 0.01)
    await local.reader.stop()
    await local.reader.start()
    segment = local.segment(1)
    first, second = await local.open(segment), await local.open(segment, lease="second")
    assert second._mapping is first._mapping
    for session in (first, second):
        await session.close()
    assert len(local.reader._cache) == 1
    local.store.remove(segment)
    async with asyncio.timeout(GIVE_UP_S):
        while len(local.reader._cache):  # noqa: ASYNC110 (there is nothing to be told by)
            await asyncio.sleep(0.005)


async def test_a_change_that_comes_while_a_reader_is_let_in_follows_what_it_changes(
    local: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(framed: FramedSocket, frame: LeaseMessage, *fds: int) -> None:
        if isinstance(frame, Welcome):
            local.source.announce("lease", PromiseRetracted(((7, 1),)))
            for _ in range(5):
                await asyncio.sleep(0)
        await send(framed, frame, *fds)

    monkeypatch.setattr(transport, "send", slow)
    updates: asyncio.Queue[AvailabilityUpdate] = asyncio.Queue()
    local.leases.offer("lease", local.segment(1))
    ticket = local.leases.tickets["ticket-lease"]
    local.leases.tickets["ticket-lease"] = replace(ticket, pieces=((0, 5),), promised=((7, 2),))
    session = await local.show_ticket(have=updates.put_nowait)
    kinds = [type(await updates.get()) for _ in range(3)]
    assert kinds == [PiecesPromised, PromiseRetracted, PiecesAvailable]
    await session.close()


async def test_a_segment_that_is_mapped_by_a_worker_is_not_copied_from() -> None:
    session = object.__new__(MappedSession)
    with pytest.raises(TransportLost, match="to be mapped"):
        await session.gather(memoryview(b""), StridedCopies([], [], []), digests=True)


# Strangers.


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b"\x00\x00\x20\x00", b"\x00\x00\x00\x00"]
)
async def test_what_is_no_frame_ends_the_connection(local: Hub, rejections: RejectionCounter, data: bytes) -> None:
    stranger = await local.stranger()
    stranger.connection._sock.send(data)  # type: ignore[union-attr]
    await stranger.until_cut_off()
    assert rejections.counts[RejectionKind.FRAME] == 1


def fails(_: object) -> NoReturn:
    raise OSError("planted")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("CONNECTIONS_MAX", 0, RejectionKind.CROWD),
        ("peer_of", lambda _: (1, os.geteuid() + 1), RejectionKind.USER),
        ("peer_of", fails, None),
    ],
    ids=["one too many", "another user", "unknown process"],
)
async def test_one_too_many_another_user_and_an_unknown_process_are_rejected_and_cost_no_other(
    local: Hub, monkeypatch: pytest.MonkeyPatch, rejections: RejectionCounter, name: str, value: Any, kind: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(unix_server, name, value)
        with pytest.raises(TransportLost, match="can't be read from"):
            await local.open(local.segment(1))
    assert "ticket-lease" in local.leases.tickets
    assert kind is None or rejections.counts[kind] == 1
    await (await local.show_ticket()).close()


async def test_without_a_descriptor_it_waits_and_accepts_again(local: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, refused = asyncio.get_running_loop(), list[int]()
    accept = loop.sock_accept

    async def fails_once(listening: socket.socket) -> tuple[socket.socket, Any]:
        connection = await accept(listening)
        if not refused:
            refused.append(1)
            connection[0].close()
            raise OSError(24, "too many open files")
        return connection

    monkeypatch.setattr(unix_server, "ACCEPT_PAUSE_S", 0.001)
    monkeypatch.setattr(loop, "sock_accept", fails_once)
    await local.source.stop()
    await local.source.start()
    with pytest.raises(TransportLost):
        await local.open(local.segment(1))
    await (await local.open(local.segment(1), lease="second")).close()


@pytest.mark.parametrize("change", [{"fds": ()}, {"frame": Welcome("name", 1 << 40)}])
async def test_a_welcome_without_its_memory_lets_nobody_in(
    local: Hub, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Without a descriptor, or with a descriptor of less memory than said."""

    async def other(framed: FramedSocket, frame: LeaseMessage, *fds: int) -> None:
        changed: dict[str, Any] = {"frame": frame, "fds": fds} | (change if isinstance(frame, Welcome) else {})
        await send(framed, changed["frame"], *changed["fds"])

    monkeypatch.setattr(transport, "send", other)
    with pytest.raises(TransportLost, match="can't be read from"):
        await local.open(local.segment(1))
    await local.leases.until("gone")


async def test_a_source_that_is_stopped_delays_its_reader_within_the_bound(
    local: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "OPEN_S", 0.05)
    with socket.socket(socket.AF_UNIX) as stopped:  # The kernel accepts for it.
        stopped.bind(str(tmp_path / "stopped.peers"))
        stopped.listen()
        with pytest.raises(TransportSilent, match=r"did not let us in within 0.05 s"):
            await local.show_ticket(endpoint=str(tmp_path / "stopped.peers"))
