"""The ucxx transport: connections that serve several leases; patches and packed pieces; and the thread of UCX."""

import asyncio
import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.unit.agent.transports.hubs import MIB, Hub, cut, digests_of

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.encodings.patch import make
from tensorhub_agent.primitives.lease_messages import Welcome
from tensorhub_agent.storage.segments import Segment
from tensorhub_agent.transports.base import EncodingSession, TransportLost, TransportUnavailable, unheard
from tensorhub_agent.transports.ucxx import engine as ucxx_engine
from tensorhub_agent.transports.ucxx import library, server
from tensorhub_agent.transports.ucxx import transport as ucxx_transport
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.engine import UcxxEngine
from tensorhub_agent.transports.ucxx.protocol.frames import COUNT_BITS, encode
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.devices.fake import FakeDevice

# Connections.


async def test_the_next_lease_goes_over_the_same_connection_and_idle_ones_are_bounded(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucxx_transport, "IDLE_LINKS_MAX", 2)
    segment = ucxx.segment(MIB)
    for number in range(5):
        session = await ucxx.open(segment, lease=f"lease-{number}")
        memory = memoryview(bytearray(segment.nbytes))
        await session.read(memory, cut(segment.nbytes, MIB), digests=True)
        assert memory == segment.view
        await session.close()
        assert ucxx.reader.links == 1
    assert [what for what, _ in ucxx.leases.ends] == ["done"] * 5
    sessions = [await ucxx.open(segment, lease=f"another-{number}") for number in range(4)]
    assert ucxx.reader.links == 4
    for session in sessions:
        await session.close()
    await ucxx.until_links(2, 2)


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


@pytest.mark.parametrize("endpoint", ["", "nonsense", "/run/a.socket", "10.0.0.1:port"])
async def test_an_endpoint_of_another_kind_is_refused(ucxx: Hub, endpoint: str) -> None:
    grant = replace(ucxx.grant(), endpoint=endpoint)
    with pytest.raises(TransportLost, match="no address of this transport"):
        await ucxx.reader.open(grant, reader="reader", on_lost=lambda _: None)


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


# Patches and packed pieces.

PIECES = 10
ALL_BYTES = PIECES * MIB
Patches = list[tuple[bytes, ...] | None]


def old_of(segment: Segment, share: float) -> bytes:
    """Return bytes from which the segment's differ in this share of the values, and not at all in the third piece."""
    old = np.frombuffer(segment.view, np.uint16).copy()
    which = np.random.default_rng(2).random(len(old)) < share
    which[2 * MIB // 2 : 3 * MIB // 2] = False
    old[which] ^= 1
    return old.tobytes()


def patches_of(old: bytes, segment: Segment) -> Patches:
    found: Patches = []
    for at in range(0, ALL_BYTES, MIB):
        patch = make(memoryview(old)[at : at + MIB], segment.view[at : at + MIB], 2)
        found.append(None if patch is None else (patch,) if patch else ())
    return found


def wanted(patches: Patches, numbers: list[int]) -> PatchTargets:
    sizes = [sum(map(len, patches[number] or ())) for number in numbers]
    return PatchTargets(numbers, pieces_at(numbers), sizes, [2] * len(numbers))


def pieces_at(numbers: list[int]) -> Spans:
    at = [number * MIB for number in numbers]
    return Spans(at, at, [MIB] * len(at))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4])
async def test_patches_lead_to_the_sources_bytes(ucxx: Hub, share: float, beside: bool) -> None:  # noqa: FBT001
    """40 % of ten pieces have more patches than fit into one message."""
    segment = ucxx.segment(ALL_BYTES)
    old = old_of(segment, share)
    patches = patches_of(old, segment)
    session = await ucxx.open(segment, patches=patches)
    assert isinstance(session, EncodingSession)
    destination = memoryview(bytearray(len(old)) if beside else bytearray(old))
    targets = wanted(patches, list(range(PIECES)))
    found, came = await session.overwrite(destination, memoryview(old) if beside else None, targets)
    assert destination == segment.view
    assert came == [b"".join(each or ()) for each in patches]
    assert found == digests_of(segment.view, targets.spans)
    await served(ucxx, session, sum(map(len, came)))


async def served(ucxx: Hub, session: Any, nbytes: int) -> None:
    """Close, and see that the connection is kept, and that so much was served."""
    await session.close()
    await ucxx.leases.until("done")
    await ucxx.until_links(1, 1)
    assert ucxx.source.served_bytes == nbytes


async def test_packed_pieces_lead_to_the_sources_bytes(ucxx: Hub) -> None:
    """Weights shrink; random bytes, in the third piece, have no digest and nothing is written for them.

    Several batches may be packed at a time.
    """
    segment, third = ucxx.segment(ALL_BYTES), slice(2 * MIB, 3 * MIB)
    stiff = bytes(segment.view[third])
    values = np.random.default_rng(4).standard_normal(ALL_BYTES // 2, dtype=np.float32) * 0.02
    segment.view[:ALL_BYTES] = values.view(np.uint16)[1::2].tobytes()
    segment.view[third] = stiff
    session = await ucxx.open(segment)
    destination = memoryview(bytearray(segment.nbytes))
    found, came = await session.unpack(destination, pieces_at(list(range(PIECES))), [2] * PIECES)
    again = memoryview(bytearray(segment.nbytes))
    batches = (session.unpack(again, pieces_at([number]), [2]) for number in range(PIECES))
    several = await asyncio.gather(*batches)
    assert (again, b"".join(each for each, _ in several), sum(n for _, n in several)) == (destination, found, came)
    assert 0 < came < 0.75 * segment.nbytes
    assert not any(destination[third])
    assert found[2 * 16 : 3 * 16] == bytes(16)
    destination[third] = segment.view[third]
    assert destination == segment.view
    await served(ucxx, session, 2 * came)


async def test_packed_pieces_go_into_a_gpus_memory_and_what_was_not_packed_is_left_as_it_was(ucxx: Hub) -> None:
    segment, third = ucxx.segment(ALL_BYTES), slice(2 * MIB, 3 * MIB)
    stiff = bytes(segment.view[third])
    values = np.random.default_rng(4).standard_normal(ALL_BYTES // 2, dtype=np.float32) * 0.02
    segment.view[:ALL_BYTES] = values.view(np.uint16)[1::2].tobytes()
    segment.view[third] = stiff
    session = await ucxx.open(segment)
    device = FakeDevice()
    memory = device.allocate(segment.nbytes)
    destination = DeviceRegion.of(device, memory)
    found, came = await session.unpack(destination, pieces_at(list(range(PIECES))), [2] * PIECES)
    after = ctypes.string_at(memory.address, ALL_BYTES)
    assert not any(after[third])
    assert found[2 * 16 : 3 * 16] == bytes(16)
    assert found[:32] == digests_of(segment.view, pieces_at([0, 1]))
    assert after[: 2 * MIB] + stiff + after[3 * MIB :] == segment.view[:ALL_BYTES]
    await served(ucxx, session, came)


async def refused(ucxx: Hub, session: UcxxSession, lost: Lost, asked: PatchTargets | Spans, unit: int = 2) -> None:
    """The source ends the connection; the read ends when its owner, who hears of that, closes the session."""
    memory = memoryview(bytearray(ALL_BYTES))
    if isinstance(asked, Spans):
        reading: Any = asyncio.ensure_future(session.unpack(memory, asked, [unit] * len(asked.nbytes)))
    else:
        reading = asyncio.ensure_future(session.overwrite(memory, None, asked))
    await lost.wait()
    await session.close()
    with pytest.raises(TransportLost):
        await reading
    assert not any(memory)


@pytest.mark.parametrize(
    ("asked", "unit"),
    [
        # A piece without a patch, and one that there is not; sizes that are not those that were told.
        *(
            (PatchTargets(n, Spans([0] * len(n), [0] * len(n), [0] * len(n)), [7] * len(n), [2] * len(n)), 2)
            for n in ([0], [PIECES], [-1], [1, 1, 0])
        ),
        (Spans([0], [0], [100]), 3),
        (Spans([0], [0], [101]), 2),
        (Spans([0], [ALL_BYTES], [100]), 2),
        (Spans([0], [-2], [100]), 2),
        (Spans([0], [0], [8 * MIB]), 2),
        (Spans([0] * 10, [0] * 10, [4 * MIB] * 10), 2),
    ],
)
async def test_what_was_not_offered_and_what_can_not_be_packed_end_the_connection(
    ucxx: Hub, asked: PatchTargets | Spans, unit: int
) -> None:
    segment, lost = ucxx.segment(ALL_BYTES), Lost()
    patches = [None, *patches_of(old_of(segment, 0.01), segment)[1:]]
    session = await ucxx.open(segment, lost, patches=patches)
    await refused(ucxx, session, lost, asked, unit)


@pytest.mark.parametrize("had_before", [False, True])
async def test_a_lease_without_patches_gives_none_also_not_those_of_the_last_one(ucxx: Hub, had_before: bool) -> None:  # noqa: FBT001
    segment, lost = ucxx.segment(ALL_BYTES), Lost()
    patches = patches_of(old_of(segment, 0.01), segment)
    if had_before:
        await (await ucxx.open(segment, patches=patches)).close()
        await ucxx.leases.until("done")
    session = await ucxx.open(segment, lost, "second")
    await refused(ucxx, session, lost, wanted(patches, [1]))


# The thread of UCX looks only at connections on which something happens.


async def until_none_is_looked_at(*transports: UcxxTransport) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while any(transport._engine._busy for transport in transports):  # noqa: ASYNC110 (the thread tells nobody)
            await asyncio.sleep(0.005)


async def test_nobody_looks_at_connections_that_wait_and_their_end_is_heard(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than are looked at at a time."""
    monkeypatch.setattr(library, "READY_MAX", 2)
    segment, losses = ucxx.segment(MIB), [Lost() for _ in range(5)]
    sessions = [await ucxx.open(segment, lost, f"lease-{number}") for number, lost in enumerate(losses)]
    await until_none_is_looked_at(ucxx.reader, ucxx.source)
    assert await asyncio.gather(*(session.still_holds() for session in sessions)) == [True] * 5
    memory = memoryview(bytearray(segment.nbytes))
    await sessions[3].read(memory, cut(segment.nbytes, MIB), digests=True)
    assert memory == segment.view
    await sessions[0].close()
    await until_none_is_looked_at(ucxx.reader, ucxx.source)
    await ucxx.until_links(5, 5)
    await ucxx.source.stop()
    for lost, session in zip(losses[1:], sessions[1:], strict=True):
        assert "connection" in await lost.wait()
        await session.close()
    await until_none_is_looked_at(ucxx.reader)


# Errors in the thread, and its end.


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
async def engine(faults: list[str]) -> UcxxEngine:
    return UcxxEngine("127.0.0.1", lambda _: None, faults.append)


def fails() -> None:
    raise ArithmeticError("planted")


async def test_news_that_fails_takes_no_other_with_it(engine: UcxxEngine, faults: list[str]) -> None:
    taken: list[int] = []
    engine._deliver([(taken.append, (1,)), (fails, ()), (taken.append, (2,))])
    assert taken == [1, 2]
    assert [("UCX" in each, "planted" in each) for each in faults] == [(True, True)]


async def starts_late(engine: UcxxEngine, error: Exception | None) -> None:
    """Let the device be opened, or not, when nobody waits any more."""
    goes_on, shut = threading.Event(), threading.Event()

    def slow() -> int:
        assert goes_on.wait(GIVE_UP_S)
        if error is not None:
            raise error
        return 1

    def turns() -> None:
        assert engine._ending, "it serves although the agent has gone on without it"

    engine._open, engine._turn, engine._shut = slow, turns, shut.set  # type: ignore[method-assign]
    with pytest.raises(TransportUnavailable, match="did not start"):
        await engine.start()
    goes_on.set()
    await engine.stop()
    assert shut.is_set() is (error is None)
    assert engine._thread is not None
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("no device"), None], ids=["fails", "succeeds"])
async def test_a_start_that_takes_too_long_is_no_fault_and_leaves_no_thread(
    faults: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """The agent has gone on without UCX, and has said so. The garbage collector has nothing to add."""
    reached_the_loop = list[dict[str, object]]()
    monkeypatch.setattr(ucxx_engine, "START_S_MAX", 0.05)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reached_the_loop.append(context))
    await starts_late(UcxxEngine("127.0.0.1", lambda _: None, faults.append), error)
    told = asyncio.Event()
    asyncio.get_running_loop().call_soon(told.set)  # Behind what the thread has said.
    await told.wait()
    gc.collect()
    assert (reached_the_loop, faults) == ([], [])


async def test_what_comes_when_the_thread_ends_is_taken_by_one_of_both(
    engine: UcxxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread and event loop answer the commands that are left, and tell the news, one after the other."""
    alone: list[bool] = []

    class Ended:
        def progress(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(engine, "_worker", Ended())
    monkeypatch.setattr(engine, "_poll", Ended(), raising=False)
    engine.do(lambda: alone.append(engine._over_lock.locked()))
    await asyncio.to_thread(engine._shut)
    engine.do(lambda: alone.append(engine._over_lock.locked()))
    assert alone == [True, True]


async def test_a_thread_that_fails_is_a_fault_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    engine = UcxxEngine("127.0.0.1", lambda _: None, told.put_nowait)
    monkeypatch.setattr(engine, "_open", lambda: 1)
    monkeypatch.setattr(engine, "_turn", fails)
    monkeypatch.setattr(engine, "_shut", lambda: None)
    assert await engine.start() == 1
    assert "planted" in await asyncio.wait_for(told.get(), GIVE_UP_S)
    await engine.stop()
