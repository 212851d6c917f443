"""What a reader asks of a source over ucxx: refused before a byte is read, or answered from a few slots."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.examples_of import examples
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.unit.agent.boxes import dense, forms, source_of
from tests.unit.agent.transports.hubs import MIB, Hub
from tests.unit.agent.transports.test_plans import messages_for

from tensorhub_agent.casting.conversion import CastUnknown
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.forms import packed_strides, sender_form
from tensorhub_agent.primitives.lease_messages import Hello
from tensorhub_agent.transports.base import BeyondGrant, ReadableRange
from tensorhub_agent.transports.ucxx import bounce_buffers, gather_server, server
from tensorhub_agent.transports.ucxx.bounce_buffers import BounceBuffers, SlotPool
from tensorhub_agent.transports.ucxx.gather_server import SLOTS_MAX, GatherServer
from tensorhub_agent.transports.ucxx.link import UcxxBatch, UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import (
    BOXES_MAX,
    FORMS_MAX,
    MESSAGES_MAX,
    SLOT_BYTES,
    GatherRequest,
    PieceRequest,
    encode,
    from_reader,
)
from tensorhub_common.errors import BadCommand
from tensorhub_common.programs.regions import Blocks, StridedForm
from tensorhub_common.protocol.log.commands import PROTOCOL

ROWS = dense((4, 16), 1, (100, 1))


def question(
    origin: Sequence[int] = (),
    nbytes: Sequence[int] = (),
    counts: Sequence[int] = (1,),
    box_origin: Sequence[int] = (0,),
    box_form: Sequence[int] = (0,),
    forms: Sequence[StridedForm] = (ROWS,),
    amax: bytes = b"",
) -> GatherRequest:
    whole, boxes = (list(origin), list(nbytes)), (list(box_origin), list(box_form))
    return GatherRequest(1, *whole, list(counts), *boxes, list(forms), sums=False, amax=amax)


def runs(origin: Sequence[int], nbytes: Sequence[int]) -> GatherRequest:
    """Return a request for no boxes."""
    return question(origin, nbytes, (), (), (), ())


def by_amax(shape: tuple[int, ...], to_itemsize: int = 1, cast: str = "values") -> StridedForm:
    """Return a form of fp8 values that are computed by what comes with the question."""
    strides = packed_strides(shape, to_itemsize)
    return StridedForm(shape, strides, (0,) * (len(shape) - 1) + (2,), 2, to_itemsize, f"bfloat16>fp8-block-128:{cast}")


def computed(shape: tuple[int, int], blocks: Blocks) -> StridedForm:
    """Return a form of fp8 values that reads the same few bytes again and again."""
    return StridedForm(shape, (shape[1], 1), (0, 2), 2, 1, "bfloat16>fp8-block-128:values", blocks)


BEYOND = [
    runs([0], [2 * MIB]),
    runs([-1], [5]),
    runs([0], [0]),
    runs([1 << 60], [1 << 60]),
    runs([0, 1], [1]),
    runs([], []),
    runs([0] * (MESSAGES_MAX + 1), [1] * (MESSAGES_MAX + 1)),
    *(question(box_origin=[at]) for at in (MIB - 315, -1, 1 << 62)),
    *(question(box_form=numbers) for numbers in ([1], [-1], [0, 0])),
    *(question(counts=counts) for counts in ([2], [0, 1], [3, -2], [])),
    question(counts=[BOXES_MAX + 1], box_origin=[0] * (BOXES_MAX + 1), box_form=[0] * (BOXES_MAX + 1)),
    question(forms=[]),
    question(forms=[ROWS] * (FORMS_MAX + 1)),
    *(
        question(forms=[form])
        for form in (
            dense((4, 16), 1, (-100, 1)),
            dense((4, 16), 1, (1 << 62, 1)),
            dense((SLOT_BYTES + 1,), 1, (0,)),
            StridedForm((4, 16), (17, 1), (100, 1), 1, 1),
            StridedForm((4,), (1, 1), (100, 1), 1, 1),
            StridedForm((1 << 62, 1 << 62), (1 << 62, 1), (0, 0), 1, 1),
            StridedForm((4,), (2,), (4,), 4, 2, "float32>nothing"),
            StridedForm((4,), (4,), (4,), 4, 2),
            StridedForm((4,), (0,), (4,), 0, 0),
            computed((2, 2), Blocks((2, 2), (1, 1))),
            computed((2, 2), Blocks((1 << 30, 1 << 30), (0, 0))),
            computed((2, 2), Blocks((2,), (0,))),
            computed((1, 1), Blocks((1 << 40, 1 << 10), (0, 0))),
            replace(computed((2, 2), Blocks((2, 2), (0, 0))), cast=""),
            by_amax((2, 200)),
        )
    ),
    question(amax=bytes(4)),
    *(
        question(forms=[form], amax=bytes(nbytes))
        for form, nbytes in (
            (by_amax((2, 200)), 4),
            (by_amax((200,)), 8),
            (by_amax((2, 2), 4, "scales"), 4),
            (by_amax((2, 2), 4, "amax"), 4),
            (by_amax((1 << 21, 1)), 4 << 14),
        )
    ),
]


@pytest.mark.parametrize("frame", BEYOND)
async def test_what_may_not_be_asked_for_raises_and_sends_nothing(frame: GatherRequest) -> None:
    with pytest.raises((BadCommand, CastUnknown)):  # Each of them ends the connection.
        await asked(frame, memoryview(bytearray(MIB)), MIB)


@pytest.mark.parametrize(
    "frame",
    [
        BEYOND[0],
        question(counts=[2]),
        PieceRequest(1, [0], [2 * MIB]),
        PieceRequest(1, [-1], [5]),
        PieceRequest(1, [0], [0]),
        PieceRequest(1, [0, 1], [1]),
        PieceRequest(1, [], []),
        PieceRequest(1, [1 << 60], [1 << 60]),
        PieceRequest(1, [0] * 5000, [1] * 5000),
    ],
)
async def test_what_reaches_beyond_the_grant_ends_the_lease_and_sends_nothing(
    ucxx: Hub, frame: GatherRequest | PieceRequest
) -> None:
    ucxx.leases.offer("lease", ucxx.segment(MIB))
    stranger = await ucxx.stranger()
    assert isinstance(stranger.connection, UcxxLink)
    await stranger.say(Hello(PROTOCOL, "ticket-lease", "reader"))
    memory = memoryview(bytearray(4 * MIB))
    batch = stranger.connection.receive([memory], 1)
    await stranger.say(frame)
    await stranger.until_cut_off()
    await asyncio.wait_for(asyncio.shield(batch.ended), GIVE_UP_S)
    assert memory == bytes(4 * MIB)
    await ucxx.leases.until("gone")
    assert ucxx.source.served_bytes == 0


@pytest.mark.parametrize("bound", ["FRAMES_UNDER_WAY_MAX", "WANTED_BYTES_MAX"])
async def test_what_is_too_much_at_a_time_ends_the_lease(
    ucxx: Hub, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(gather_server if bound.startswith("FRAMES") else server, bound, 0)
    lost = Lost()
    session = await ucxx.open(ucxx.segment(MIB), lost)
    session._link.send(encode(question()))
    await lost.wait()
    await session.close()
    await ucxx.leases.until("gone")


class Recorder:
    """A link that keeps what it is given to send."""

    def __init__(self, *, ends: bool = True) -> None:
        self.ends = ends
        self.sent: dict[int, bytes] = {}
        self.batches: list[UcxxBatch] = []

    def transmit(self, views: Sequence[memoryview], tag: int) -> UcxxBatch:
        for number, view in enumerate(views):
            self.sent[tag + number] = bytes(view)
        batch = UcxxBatch(views, receives=False)
        self.batches.append(batch)
        if self.ends:
            batch.end()
        return batch


async def asked(frame: GatherRequest, source: memoryview, lacks_from: int) -> list[bytes]:
    """Return what is sent for a frame; raises what ends the connection."""
    link, pool, failed = Recorder(), CopyPool(1), Lost()
    readable = ReadableRange(source, lambda origin, nbytes: origin + nbytes > lacks_from)
    gathering = GatherServer(link, pool, SlotPool(), readable, lambda _: None, failed)  # type: ignore[arg-type]
    try:
        gathering.take(frame, 1 << 32)
        await gathering.ended()
    finally:
        pool.close()
    assert not failed.reasons
    return list(link.sent.values())


numbers = st.one_of(st.integers(-2, 300), st.integers(0, 4000), st.integers(-(1 << 63), (1 << 64) - 1))
few_numbers = st.lists(numbers, max_size=3).map(tuple)
casts = st.sampled_from(["", "", "float32>bfloat16", "nonsense"])
any_forms = st.one_of(
    forms(500).map(sender_form),
    st.builds(StridedForm, few_numbers, few_numbers, few_numbers, numbers, numbers, casts),
)
columns = st.lists(numbers, max_size=4)
few = st.lists(st.integers(-1, 4), max_size=4)
any_frames = st.builds(
    GatherRequest, numbers, columns, columns, few, columns, few, st.lists(any_forms, max_size=3), st.just(value=False)
)


@pytest.mark.long
@given(any_frames)
@settings(max_examples=examples(2.0))
def test_whatever_is_asked_is_refused_or_is_what_stands_there(frame: GatherRequest) -> None:
    source = source_of(4096)
    try:
        sent = asyncio.run(asked(from_reader(encode(frame)), source, 3500))  # type: ignore[arg-type]
    except BadCommand:
        return
    assert sent == messages_for(frame, source[:3500])


@given(
    st.lists(st.tuples(st.integers(0, 3600), forms(200).map(sender_form)), min_size=1, max_size=6), st.integers(0, 4096)
)
@settings(deadline=None)
def test_no_box_of_a_half_filled_source_goes_before_it_stands(
    boxes: list[tuple[int, StridedForm]], lacks_from: int
) -> None:
    source = source_of(4096)
    origins, known = [origin for origin, _ in boxes], [form for _, form in boxes]
    frame = question(counts=[len(boxes)], box_origin=origins, box_form=range(len(boxes)), forms=known)
    reach = max(origin + form.origin_span_bytes for origin, form in boxes)
    if reach > min(lacks_from, len(source)):
        with pytest.raises(BeyondGrant):
            asyncio.run(asked(frame, source, lacks_from))
    else:
        assert asyncio.run(asked(frame, source, lacks_from)) == messages_for(frame, source)


# Bounce buffers.


async def test_a_slot_is_used_again_only_when_nothing_is_sent_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def noted(*args: Any) -> Any:
        packed.append(1)
        return copy_boxes(*args)

    monkeypatch.setattr(gather_server, "copy_boxes", noted)
    link, pool, source, sent = Recorder(ends=False), CopyPool(1), source_of(4096), list[int]()
    gathering = GatherServer(link, pool, SlotPool(), ReadableRange(source), sent.append, Lost())  # type: ignore[arg-type]
    for _ in range(SLOTS_MAX + 1):
        assert gathering.take(question(), 1 << 32) == ROWS.nbytes
    async with asyncio.timeout(GIVE_UP_S):
        while len(link.batches) < SLOTS_MAX:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
    for _ in range(20):
        await pool.digest(source, Spans([0], [0], [4096])).result()
    assert len(packed) == SLOTS_MAX, "a slot was used again while it was sent from"
    assert sent == []
    link.ends = True
    for batch in link.batches[:SLOTS_MAX]:
        batch.end()
    await gathering.ended()
    assert sent == [ROWS.nbytes] * (SLOTS_MAX + 1)
    pool.close()


async def test_users_of_slots_wait_in_turn_within_bounds_of_their_own_and_whatever_ends_the_use_gives_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounce_buffers, "KEPT_SLOTS_MAX", 1)
    store, order = SlotPool(), list[int]()
    one, other = BounceBuffers(store, 1), BounceBuffers(store, 1)

    async def take(number: int) -> int:
        async with one.slot() as slot:
            order.append(number)
            await asyncio.sleep(0)
            assert len(slot) == SLOT_BYTES
            return id(slot)

    with contextlib.suppress(RuntimeError):
        async with one.slot() as first, other.slot() as second:
            assert first is not second
            waiting = [asyncio.create_task(take(number)) for number in range(4)]
            await asyncio.sleep(0)
            assert order == []
            raise RuntimeError
    assert len(store._free) == 1, "no more is kept than the bound"
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert order == [0, 1, 2, 3]
