"""Patches over the ucxx transport: what was offered comes and is applied, and nothing else is to be had."""

import asyncio

import numpy as np
import pytest
import xxhash
from tests.kit.fakes import Lost
from tests.unit.agent.transports.hubs import MIB, Hub

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.encodings.patch import make
from tensorhub_agent.storage.segments import Segment
from tensorhub_agent.transports.base import EncodingSession, TransportLost
from tensorhub_agent.transports.ucxx.session import UcxxSession

PIECES = 10
NBYTES = MIB


def old_of(segment: Segment, share: float) -> bytes:
    """Return bytes from which the segment's differ in this share of the values, and not at all in the third piece."""
    chance = np.random.default_rng(2)
    old = np.frombuffer(segment.view, np.uint16).copy()
    which = chance.random(len(old)) < share
    which[2 * NBYTES // 2 : 3 * NBYTES // 2] = False
    old[which] ^= 1
    return old.tobytes()


def patches_of(old: bytes, segment: Segment) -> list[tuple[bytes, ...] | None]:
    found: list[tuple[bytes, ...] | None] = []
    for at in range(0, PIECES * NBYTES, NBYTES):
        patch = make(memoryview(old)[at : at + NBYTES], segment.view[at : at + NBYTES], 2)
        found.append(None if patch is None else (patch,) if patch else ())
    return found


def wanted(patches: list[tuple[bytes, ...] | None], numbers: list[int]) -> PatchTargets:
    at = [number * NBYTES for number in numbers]
    sizes = [sum(map(len, patches[number] or ())) for number in numbers]
    return PatchTargets(numbers, Spans(at, at, [NBYTES] * len(at)), sizes, [2] * len(at))


async def refused(session: UcxxSession, lost: Lost, memory: memoryview, asked: PatchTargets) -> None:
    """The source ends the connection; the read ends when its owner, who hears of that, closes the session."""
    reading = asyncio.ensure_future(session.overwrite(memory, None, asked))
    await lost.wait()
    await session.close()
    with pytest.raises(TransportLost):
        await reading


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4])
async def test_patches_lead_to_the_sources_bytes(ucxx: Hub, share: float, beside: bool) -> None:  # noqa: FBT001
    """40 % of ten pieces have more patches than fit into one message."""
    segment = ucxx.segment(PIECES * NBYTES)
    old = old_of(segment, share)
    patches = patches_of(old, segment)
    session = await ucxx.open(segment, patches=patches)
    assert isinstance(session, EncodingSession)
    destination = memoryview(bytearray(len(old)) if beside else bytearray(old))
    numbers = list(range(PIECES))
    found, came = await session.overwrite(destination, memoryview(old) if beside else None, wanted(patches, numbers))
    assert destination == segment.view
    assert came == [b"".join(each or ()) for each in patches]
    assert found == b"".join(xxhash.xxh3_128_digest(segment.view[n * NBYTES : (n + 1) * NBYTES]) for n in numbers)
    await session.close()
    await ucxx.leases.until("done")
    await ucxx.until_links(1, 1)
    assert ucxx.source.served_bytes == sum(map(len, came))


@pytest.mark.parametrize("numbers", [[0], [PIECES], [-1], [1, 1, 0]])
async def test_what_was_not_offered_ends_the_connection(ucxx: Hub, numbers: list[int]) -> None:
    """A piece without a patch, and one that there is not; sizes that are not those that were told."""
    segment = ucxx.segment(PIECES * NBYTES)
    patches = patches_of(old_of(segment, 0.01), segment)
    patches[0] = None
    lost = Lost()
    session = await ucxx.open(segment, lost, patches=patches)
    memory = memoryview(bytearray(segment.nbytes))
    nothing = [0] * len(numbers)
    asked = PatchTargets(numbers, Spans(nothing, nothing, nothing), [7] * len(numbers), [2] * len(numbers))
    await refused(session, lost, memory, asked)
    assert not any(memory)


async def test_a_lease_without_patches_gives_none(ucxx: Hub) -> None:
    segment = ucxx.segment(PIECES * NBYTES)
    lost = Lost()
    session = await ucxx.open(segment, lost)
    await refused(session, lost, memoryview(bytearray(10)), PatchTargets([0], Spans([0], [0], [10]), [5], [2]))


async def test_the_next_lease_on_a_connection_has_no_patches_of_the_last_one(ucxx: Hub) -> None:
    segment = ucxx.segment(PIECES * NBYTES)
    patches = patches_of(old_of(segment, 0.01), segment)
    first = await ucxx.open(segment, patches=patches)
    await first.close()
    await ucxx.leases.until("done")
    lost = Lost()
    session = await ucxx.open(segment, lost, "second")
    await refused(session, lost, memoryview(bytearray(segment.nbytes)), wanted(patches, [1]))


def cut(numbers: list[int]) -> Spans:
    at = [number * NBYTES for number in numbers]
    return Spans(at, at, [NBYTES] * len(at))


async def test_packed_pieces_lead_to_the_sources_bytes(ucxx: Hub) -> None:
    """Weights shrink; random bytes, in the third piece, have no digest and nothing is written for them."""
    segment = ucxx.segment(PIECES * NBYTES)
    chance = np.random.default_rng(4)
    weights = (chance.standard_normal(PIECES * NBYTES // 2, dtype=np.float32) * 0.02).view(np.uint16)[1::2].tobytes()
    segment.view[: 2 * NBYTES], segment.view[3 * NBYTES :] = weights[: 2 * NBYTES], weights[3 * NBYTES :]
    session = await ucxx.open(segment)
    destination = memoryview(bytearray(segment.nbytes))
    numbers = list(range(PIECES))
    found, came = await session.unpack(destination, cut(numbers), [2] * PIECES)
    assert 0 < came < 0.75 * segment.nbytes
    assert not any(destination[2 * NBYTES : 3 * NBYTES])
    assert found[2 * 16 : 3 * 16] == bytes(16)
    destination[2 * NBYTES : 3 * NBYTES] = segment.view[2 * NBYTES : 3 * NBYTES]
    assert destination == segment.view
    await session.close()
    await ucxx.leases.until("done")
    await ucxx.until_links(1, 1)
    assert ucxx.source.served_bytes == came


async def test_several_batches_are_packed_at_a_time(ucxx: Hub) -> None:
    segment = ucxx.segment(PIECES * NBYTES)
    segment.view[:] = bytes(segment.nbytes)
    session = await ucxx.open(segment)
    destination = memoryview(bytearray(b"x" * segment.nbytes))
    await asyncio.gather(*(session.unpack(destination, cut([number]), [2]) for number in range(PIECES)))
    assert not any(destination)
    await session.close()


@pytest.mark.parametrize(
    ("spans", "unit"),
    [
        (Spans([0], [0], [100]), 3),
        (Spans([0], [0], [101]), 2),
        (Spans([0], [PIECES * NBYTES], [100]), 2),
        (Spans([0], [-2], [100]), 2),
        (Spans([0], [0], [8 * MIB]), 2),
        (Spans([0] * 10, [0] * 10, [4 * MIB] * 10), 2),
    ],
)
async def test_what_can_not_be_packed_ends_the_connection(ucxx: Hub, spans: Spans, unit: int) -> None:
    segment = ucxx.segment(PIECES * NBYTES)
    lost = Lost()
    session = await ucxx.open(segment, lost)
    reading = asyncio.ensure_future(session.unpack(memoryview(bytearray(10 * MIB)), spans, [unit] * len(spans.nbytes)))
    await lost.wait()
    await session.close()
    with pytest.raises(TransportLost):
        await reading
