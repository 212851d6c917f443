"""However spans and boxes become messages and lots, every byte comes once, within bounds, and no copy is made in vain.

And frames come out of a stream whole.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.agent.boxes import answer, places, regions, rows, source_of

from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.transports.ucxx.protocol import gather_plan, message_plan
from tensorhub_agent.transports.ucxx.protocol.frames import (
    BOXES_MAX,
    FORMS_MAX,
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    MESSAGES_MAX,
    SLOT_BYTES,
    FrameAssembler,
    GatherRequest,
    encode,
    framed,
    from_reader,
)
from tensorhub_agent.transports.ucxx.protocol.gather_plan import LOT_BYTES_MAX, GatherBatch, gather_batches
from tensorhub_agent.transports.ucxx.protocol.message_plan import (
    GAP_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    TINY_BYTES_MAX,
    messages_of,
)
from tensorhub_common.errors import BadCommand
from tensorhub_common.programs.regions import StridedCopies, StridedForm

# Spans.

CUT_BYTES = 100_000
"""Messages are cut at this here."""


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Spans that don't overlap at either end; gaps differ from one end to the other."""
    to, origin, nbytes = [], [], []
    at_to = at_origin = 0
    tiny = st.integers(TINY_BYTES_MAX - 2, TINY_BYTES_MAX + 2)
    sizes = st.one_of(st.integers(0, 300), tiny, st.sampled_from((CUT_BYTES, 2 * CUT_BYTES + 1)))
    gaps = st.one_of(st.just(0), st.integers(1, 200), st.integers(GAP_BYTES_MAX - 1, GAP_BYTES_MAX + 1))
    for _ in range(draw(st.integers(0, 12))):
        gap = draw(gaps)
        at_origin += gap
        at_to += gap if draw(st.booleans()) else draw(gaps)
        size = draw(sizes)
        to.append(at_to)
        origin.append(at_origin)
        nbytes.append(size)
        at_to += size
        at_origin += size
    return to, origin, nbytes


@given(spans())
@settings(deadline=None)
def test_every_byte_of_a_span_comes_once_and_nothing_else_is_written(
    drawn: tuple[list[int], list[int], list[int]],
) -> None:
    to, origin, nbytes = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_plan, "MESSAGE_BYTES_MAX", CUT_BYTES)
        plan = messages_of(to, origin, nbytes)
    length = max([at + size for at, size in zip(to, nbytes, strict=True)], default=0)
    memory, bounce = np.full(length, -1), np.full(plan.bounce_bytes, -1)
    for number, (start, at, size) in enumerate(zip(plan.origin, plan.to, plan.nbytes, strict=True)):
        assert 0 < size <= CUT_BYTES
        target = memory if number < plan.bounced else bounce
        assert (target[at : at + size] == -1).all(), "each byte comes once"
        target[at : at + size] = np.arange(start, start + size)
    assert (bounce >= 0).all()
    for number, at in plan.packed.items():
        assert (memory[to[number] : to[number] + nbytes[number]] == -1).all()
        memory[to[number] : to[number] + nbytes[number]] = bounce[at : at + nbytes[number]]
    for at, start, size in zip(to, origin, nbytes, strict=True):
        assert (memory[at : at + size] == np.arange(start, start + size)).all()
        memory[at : at + size] = -1
    assert (memory == -1).all(), "nothing else is written"


@pytest.mark.parametrize(
    ("to", "origin", "nbytes", "messages", "packed"),
    [
        ([0, 100, 200], [1000, 1100, 1200], [100, 100, 50], [(1000, 0, 250)], 0),
        ([n * 256 for n in range(5000)], [n * 256 for n in range(5000)], [20] * 5000, [(0, 0, 4999 * 256 + 20)], 5000),
        ([0, 10_000], [0, 10_000], [16, 16], [(0, 0, 16), (10_000, 10_000, 16)], 0),
        ([0, 256, 512], [0, 256, 512], [10, 10, 200_000], [(512, 512, 200_000), (0, 0, 266)], 2),
        ([0, 7, 9], [0, 7, 9], [0, 0, 0], [], 0),
    ],
    ids=["seamless", "thousands of tiny ones", "tiny ones far apart", "a large one among small ones", "empty"],
)
def test_spans_come_together_where_that_is_cheap(
    to: list[int], origin: list[int], nbytes: list[int], messages: list[tuple[int, int, int]], packed: int
) -> None:
    plan = messages_of(to, origin, nbytes)
    assert list(zip(plan.origin, plan.to, plan.nbytes, strict=True)) == messages
    assert len(plan.packed) == packed


# Frames.


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_each_frame_comes_once_and_in_order(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(framed(frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    inbox, found = FrameAssembler(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += inbox.take(stream[begin:end])
    assert found == frames


@pytest.mark.parametrize("nbytes", [0, FRAME_BYTES_MAX + 1])
def test_a_length_that_may_not_be_is_refused_before_its_frame_has_come(nbytes: int) -> None:
    with pytest.raises(BadCommand, match=f"a frame of {nbytes} bytes"):
        FrameAssembler().take(nbytes.to_bytes(LENGTH_BYTES, "big"))


# Boxes.


def messages_for(frame: GatherRequest, source: memoryview) -> list[bytes]:
    """Return what a source sends, found with numpy."""
    found = [bytes(source[origin : origin + size]) for origin, size in zip(frame.origin, frame.nbytes, strict=True)]
    boxes = iter(zip(frame.box_origin, frame.box_form, strict=True))
    memory = np.frombuffer(source, np.uint8)
    for count in frame.counts:
        packed = []
        for _ in range(count):
            at, number = next(boxes)
            form = frame.forms[number]
            packed.append(memory[at + places(form, form.origin_strides)].tobytes())
        found.append(b"".join(packed))
    assert next(boxes, None) is None
    return found


def carried_out(lots: list[GatherBatch], destination: bytes, source: memoryview) -> bytes:
    """Do what both ends do, without a wire."""
    memory = bytearray(destination)
    for lot in lots:
        frame = from_reader(encode(lot.frame(1, sums=True)))
        assert isinstance(frame, GatherRequest)
        sent = messages_for(frame, source)
        bounce = b""
        for message, data in zip(lot.messages, sent, strict=True):
            assert len(data) == message.nbytes
            if message.is_whole_here:
                to = message.items[0].to
                memory[to : to + message.nbytes] = data
            else:
                bounce += data
        assert len(bounce) == lot.bounced_bytes
        memory[:] = answer(bytes(memory), memoryview(bounce), lot.unpacking())
    return bytes(memory)


TIGHT = {
    "MESSAGE_BYTES_MAX": 500,
    "TINY_BYTES_MAX": 50,
    "LOT_BYTES_MAX": 1500,
    "SLOT_BYTES": 600,
    "MESSAGE_BOXES_MAX": 3,
    "BOXES_MAX": 7,
    "FORMS_MAX": 3,
    "MESSAGES_MAX": 4,
}
"""Bounds that are met all the time."""


@given(regions(20_000), st.booleans())
@settings(deadline=None)
def test_what_comes_is_what_was_asked_for_within_bounds(
    drawn: tuple[StridedCopies, int, int],
    tight: bool,  # noqa: FBT001 (drawn)
) -> None:
    boxes, nbytes, origin_nbytes = drawn
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in TIGHT.items() if tight else ():
            patch.setattr(gather_plan, name, bound)
        lots = list(gather_batches(boxes))
    source, before = source_of(origin_nbytes), b"\xaa" * nbytes
    assert carried_out(lots, before, source) == answer(before, source, boxes)
    for lot in lots if tight else ():
        assert max(message.nbytes for message in lot.messages) <= TIGHT["MESSAGE_BYTES_MAX"]
        assert lot.nbytes <= TIGHT["LOT_BYTES_MAX"]
        assert max(lot.bounced_bytes, lot.packed_bytes) <= TIGHT["SLOT_BYTES"]
        assert len(lot.messages) <= TIGHT["MESSAGES_MAX"]
        assert len(lot.forms) <= TIGHT["FORMS_MAX"]
        assert lot.boxes <= TIGHT["BOXES_MAX"]


SIZE = TINY_BYTES_MAX * 2
HALF, FAR = SIZE // 2, 1 << 20
RUN, TINY = rows(1, SIZE, 1, 1), rows(1, 4, 1, 1)
THERE, HERE, NOWHERE = (
    rows(2, HALF, to_stride, origin_stride)
    for to_stride, origin_stride in ((99999, HALF), (HALF, 99999), (99999, 99999))
)
"""Boxes that lie in one piece at that end."""


@pytest.mark.parametrize(
    ("boxes", "messages"),
    [
        (StridedCopies([0], [0], [RUN]), [(SIZE, True, True)]),
        (StridedCopies([0], [0], [THERE]), [(SIZE, True, False)]),
        (StridedCopies([0], [0], [HERE]), [(SIZE, False, True)]),
        (StridedCopies([0], [0], [NOWHERE]), [(SIZE, False, False)]),
        (StridedCopies([5, 5 + SIZE], [9, 9 + SIZE], [RUN, RUN]), [(2 * SIZE, True, True)]),
        (StridedCopies([0, FAR], [9, 9 + SIZE], [THERE, THERE]), [(2 * SIZE, True, False)]),
        (StridedCopies([7, 7 + SIZE], [0, FAR], [HERE, HERE]), [(2 * SIZE, False, True)]),
        (StridedCopies([0, FAR], [FAR, 0], [NOWHERE, NOWHERE]), [(2 * SIZE, False, False)]),
        (StridedCopies([0, FAR], [0, FAR], [RUN, RUN]), [(SIZE, True, True)] * 2),
        (StridedCopies([0, FAR], [0, FAR], [THERE, THERE]), [(SIZE, True, False)] * 2),
        (StridedCopies([0, FAR], [0, FAR], [RUN, NOWHERE]), [(SIZE, True, True), (SIZE, False, False)]),
        (
            StridedCopies([0, 8, 16, 1000, 200_000], [50, 40, 30, 1000, 9], [TINY, TINY, TINY, RUN, TINY]),
            [(SIZE, True, True), (4, True, True), (12, False, False)],
        ),
    ],
)
def test_what_lies_in_one_piece_is_not_copied_and_neighbours_come_together_where_that_costs_no_copy(
    boxes: StridedCopies, messages: list[tuple[int, bool, bool]]
) -> None:
    """Tiny boxes come together wherever they are, and long ones do not suffer for it."""
    [lot] = gather_batches(boxes)
    assert [(each.nbytes, each.is_whole_there, each.is_whole_here) for each in lot.messages] == messages


def test_no_message_no_slot_no_lot_and_no_frame_is_too_large() -> None:
    """With long boxes, and with the most forms that there may be, and the most boxes."""
    boxes = StridedCopies([0, 1 << 30], [0, 1 << 30], [rows(1, 41 << 20, 1, 1), rows(10_000, 4099, 5000, 6000)])
    lots = list(gather_batches(boxes))
    assert sum(lot.nbytes for lot in lots) == (41 << 20) + 10_000 * 4099
    assert len(lots) <= 15
    known = [StridedForm((), (), (), size, size) for size in range(1, FORMS_MAX + 50)]
    count = 3 * BOXES_MAX
    to, origin = ([n * stride for n in range(count)] for stride in (4096, 8192))
    many = list(gather_batches(StridedCopies(to, origin, [known[n % len(known)] for n in range(count)])))
    assert sum(lot.boxes for lot in many) == count
    for lot in [*lots, *many]:
        assert max(message.nbytes for message in lot.messages) <= MESSAGE_BYTES_MAX
        assert max(lot.packed_bytes, lot.bounced_bytes) <= SLOT_BYTES
        assert lot.nbytes <= LOT_BYTES_MAX
        assert lot.boxes <= BOXES_MAX
        assert len(lot.forms) <= FORMS_MAX
        assert len(encode(lot.frame(1, sums=True))) <= FRAME_BYTES_MAX
    frame = GatherRequest(
        tag=1 << 63,
        origin=[1 << 62] * (MESSAGES_MAX // 2),
        nbytes=[1 << 22] * (MESSAGES_MAX // 2),
        counts=[BOXES_MAX] * (MESSAGES_MAX // 2),
        box_origin=[1 << 62] * BOXES_MAX,
        box_form=[FORMS_MAX - 1] * BOXES_MAX,
        forms=[StridedForm((3,) * 15 + (2 + n,), (1 << 62,) * 16, (1 << 62,) * 16, 1, 1) for n in range(FORMS_MAX)],
        sums=True,
    )
    assert len(encode(frame)) <= FRAME_BYTES_MAX


def test_no_boxes_are_no_lots_and_a_bad_form_is_refused() -> None:
    assert list(gather_batches(StridedCopies([], [], []))) == []
    with pytest.raises(InvalidForm):
        list(gather_batches(StridedCopies([0], [0], [StridedForm((2,), (-1,), (1,), 1, 1)])))
