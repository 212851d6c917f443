"""However boxes become messages and lots, every byte comes once, within the bounds, and no copy is made in vain."""

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.agent.boxes import answer, places, regions, rows, source_of

from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.transports.ucxx.protocol import gather_plan
from tensorhub_agent.transports.ucxx.protocol.frames import (
    BOXES_MAX,
    FORMS_MAX,
    FRAME_BYTES_MAX,
    MESSAGES_MAX,
    SLOT_BYTES,
    GatherRequest,
    encode,
    from_reader,
)
from tensorhub_agent.transports.ucxx.protocol.gather_plan import LOT_BYTES_MAX, GatherBatch, gather_batches
from tensorhub_agent.transports.ucxx.protocol.message_plan import MESSAGE_BYTES_MAX, TINY_BYTES_MAX
from tensorhub_common.programs.regions import StridedCopies, StridedForm


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


@given(regions())
@settings(deadline=None)
def test_what_comes_is_what_was_asked_for(drawn: tuple[StridedCopies, int, int]) -> None:
    boxes, nbytes, origin_nbytes = drawn
    source, before = source_of(origin_nbytes), b"\xaa" * nbytes
    assert carried_out(list(gather_batches(boxes)), before, source) == answer(before, source, boxes)


@given(regions(20_000))
@settings(deadline=None)
def test_the_same_with_bounds_that_are_met_all_the_time(drawn: tuple[StridedCopies, int, int]) -> None:
    boxes, nbytes, origin_nbytes = drawn
    with pytest.MonkeyPatch.context() as patch:
        bounds = {"MESSAGE_BYTES_MAX": 500, "TINY_BYTES_MAX": 50, "LOT_BYTES_MAX": 1500, "SLOT_BYTES": 600}
        for name, bound in {
            **bounds,
            "MESSAGE_BOXES_MAX": 3,
            "BOXES_MAX": 7,
            "FORMS_MAX": 3,
            "MESSAGES_MAX": 4,
        }.items():
            patch.setattr(gather_plan, name, bound)
        lots = list(gather_batches(boxes))
    source, before = source_of(origin_nbytes), b"\xaa" * nbytes
    assert carried_out(lots, before, source) == answer(before, source, boxes)
    for lot in lots:
        assert max(message.nbytes for message in lot.messages) <= 500
        assert lot.nbytes <= 1500
        assert max(lot.bounced_bytes, lot.packed_bytes) <= 600
        assert len(lot.messages) <= 4
        assert len(lot.forms) <= 3
        assert lot.boxes <= 7


def shapes(boxes: StridedCopies) -> list[list[tuple[int, bool, bool]]]:
    return [[(m.nbytes, m.is_whole_there, m.is_whole_here) for m in lot.messages] for lot in gather_batches(boxes)]


def test_what_lies_in_one_piece_at_an_end_is_not_copied_there() -> None:
    size = TINY_BYTES_MAX * 2
    assert shapes(StridedCopies([0], [0], [rows(2, size // 2, 99999, size // 2)])) == [[(size, True, False)]]
    assert shapes(StridedCopies([0], [0], [rows(2, size // 2, size // 2, 99999)])) == [[(size, False, True)]]
    assert shapes(StridedCopies([0], [0], [rows(2, size // 2, 99999, 99999)])) == [[(size, False, False)]]
    assert shapes(StridedCopies([0], [0], [rows(1, size, 1, 1)])) == [[(size, True, True)]]


def test_neighbours_become_longer_messages_where_that_costs_no_copy() -> None:
    size = TINY_BYTES_MAX * 2
    run, there, here = rows(1, size, 1, 1), rows(2, size // 2, 99999, size // 2), rows(2, size // 2, size // 2, 99999)
    both = rows(2, size // 2, 99999, 99999)
    far = 1 << 20
    assert shapes(StridedCopies([5, 5 + size], [9, 9 + size], [run, run])) == [[(2 * size, True, True)]]
    assert shapes(StridedCopies([0, far], [9, 9 + size], [there, there])) == [[(2 * size, True, False)]]
    assert shapes(StridedCopies([7, 7 + size], [0, far], [here, here])) == [[(2 * size, False, True)]]
    assert shapes(StridedCopies([0, far], [far, 0], [both, both])) == [[(2 * size, False, False)]]
    assert shapes(StridedCopies([0, far], [0, far], [run, run])) == [[(size, True, True)] * 2]
    assert shapes(StridedCopies([0, far], [0, far], [there, there])) == [[(size, True, False)] * 2]
    assert shapes(StridedCopies([0, far], [0, far], [run, both])) == [[(size, True, True), (size, False, False)]]


def test_tiny_boxes_come_together_wherever_they_are_and_long_ones_do_not_suffer_for_it() -> None:
    tiny, long = rows(1, 4, 1, 1), rows(1, TINY_BYTES_MAX + 1, 1, 1)
    boxes = StridedCopies([0, 8, 16, 1000, 200_000], [50, 40, 30, 1000, 9], [tiny, tiny, tiny, long, tiny])
    assert shapes(boxes) == [[(TINY_BYTES_MAX + 1, True, True), (4, True, True), (12, False, False)]]


def test_no_message_no_slot_and_no_lot_is_too_large() -> None:
    boxes = StridedCopies([0, 1 << 30], [0, 1 << 30], [rows(1, 41 << 20, 1, 1), rows(10_000, 4099, 5000, 6000)])
    lots = list(gather_batches(boxes))
    assert sum(lot.nbytes for lot in lots) == (41 << 20) + 10_000 * 4099
    for lot in lots:
        assert max(message.nbytes for message in lot.messages) <= MESSAGE_BYTES_MAX
        assert max(lot.packed_bytes, lot.bounced_bytes) <= SLOT_BYTES
        assert lot.nbytes <= LOT_BYTES_MAX
    assert len(lots) <= 15


def test_a_frame_never_is_too_long() -> None:
    """The most forms that there may be, of the most dimensions, and the most boxes."""
    many = [StridedForm((3,) * 15 + (2 + n,), (1 << 62,) * 16, (1 << 62,) * 16, 1, 1) for n in range(FORMS_MAX)]
    frame = GatherRequest(
        tag=1 << 63,
        origin=[1 << 62] * (MESSAGES_MAX // 2),
        nbytes=[1 << 22] * (MESSAGES_MAX // 2),
        counts=[BOXES_MAX] * (MESSAGES_MAX // 2),
        box_origin=[1 << 62] * BOXES_MAX,
        box_form=[FORMS_MAX - 1] * BOXES_MAX,
        forms=many,
        sums=True,
    )
    assert len(encode(frame)) <= FRAME_BYTES_MAX


def test_lots_are_bounded_in_boxes_and_forms_too() -> None:
    known = [StridedForm((), (), (), size, size) for size in range(1, FORMS_MAX + 50)]
    boxes = StridedCopies(
        [n * 4096 for n in range(3 * BOXES_MAX)],
        [n * 8192 for n in range(3 * BOXES_MAX)],
        [known[n % len(known)] for n in range(3 * BOXES_MAX)],
    )
    lots = list(gather_batches(boxes))
    assert sum(lot.boxes for lot in lots) == 3 * BOXES_MAX
    for lot in lots:
        assert lot.boxes <= BOXES_MAX
        assert len(lot.forms) <= FORMS_MAX
        assert len(encode(lot.frame(1, sums=True))) <= FRAME_BYTES_MAX


def test_no_boxes_are_no_lots() -> None:
    assert list(gather_batches(StridedCopies([], [], []))) == []


def test_a_bad_form_is_refused() -> None:
    with pytest.raises(InvalidForm):
        list(gather_batches(StridedCopies([0], [0], [StridedForm((2,), (-1,), (1,), 1, 1)])))
