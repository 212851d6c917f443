"""Every byte of a span comes in exactly one message, tiny ones come together, and frames come out of a stream whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.transports.ucxx.protocol import message_plan
from tensorhub_agent.transports.ucxx.protocol.frames import FRAME_BYTES_MAX, LENGTH_BYTES, FrameAssembler, framed
from tensorhub_agent.transports.ucxx.protocol.message_plan import (
    GAP_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    TINY_BYTES_MAX,
    messages_of,
)
from tensorhub_common.errors import BadCommand

KIB = 1024


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Spans that don't overlap at either end; gaps differ from one end to the other."""
    to, origin, nbytes = [], [], []
    at_to = at_origin = 0
    sizes = st.one_of(st.integers(0, 300), st.integers(TINY_BYTES_MAX - 2, TINY_BYTES_MAX + 2), st.just(3_000_000))
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
def test_every_byte_comes_once_and_nothing_else_is_written(given_spans: tuple[list[int], list[int], list[int]]) -> None:
    to, origin, nbytes = given_spans
    messages = messages_of(to, origin, nbytes)
    comes: dict[int, int] = {}
    bounce: dict[int, int] = {}
    for number, (start, at, size) in enumerate(zip(messages.origin, messages.to, messages.nbytes, strict=True)):
        assert 0 < size <= MESSAGE_BYTES_MAX
        target = comes if number < messages.bounced else bounce
        # Both ends of a message move together, so its ends tell of all of it.
        for offset in {0, size // 2, size - 1}:
            assert at + offset not in target
            target[at + offset] = start + offset
    wanted = {}
    for number, (at, start, size) in enumerate(zip(to, origin, nbytes, strict=True)):
        for offset in range(size) if size <= 300 else ():
            wanted[at + offset] = (number, start + offset)
    intervals = sorted(
        (at, at + size, start)
        for number, (start, at, size) in enumerate(zip(messages.origin, messages.to, messages.nbytes, strict=True))
        if number < messages.bounced
    )
    for at, (number, start) in wanted.items():
        if number in messages.packed:
            begin = messages.packed[number] + start - origin[number]
            assert any(
                messages.to[m] <= begin < messages.to[m] + messages.nbytes[m]
                and messages.origin[m] + begin - messages.to[m] == start
                for m in range(messages.bounced, len(messages.nbytes))
            )
        else:
            hits = [lo for lo, hi, first in intervals if lo <= at < hi and first + at - lo == start]
            assert len(hits) == 1
    direct = sum(size for number, size in enumerate(nbytes) if number not in messages.packed)
    assert sum(messages.nbytes[: messages.bounced]) == direct
    assert sum(messages.nbytes[messages.bounced :]) == messages.bounce_bytes


def test_five_thousand_tiny_tensors_are_one_message() -> None:
    at = [number * 256 for number in range(5000)]
    messages = messages_of(at, at, [20] * 5000)
    assert len(messages.nbytes) == 1
    assert messages.bounce_bytes == 4999 * 256 + 20
    assert len(messages.packed) == 5000


def test_what_follows_seamlessly_is_one_message_straight_into_its_place() -> None:
    messages = messages_of([0, 100, 200], [1000, 1100, 1200], [100, 100, 50])
    assert (messages.origin, messages.to, messages.nbytes) == ([1000], [0], [250])
    assert not messages.packed


def test_a_long_span_is_cut() -> None:
    messages = messages_of([0], [64], [2 * MESSAGE_BYTES_MAX + 5])
    assert messages.nbytes == [MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX, 5]
    assert messages.origin == [64, 64 + MESSAGE_BYTES_MAX, 64 + 2 * MESSAGE_BYTES_MAX]


def test_empty_spans_need_no_message() -> None:
    assert messages_of([0, 7, 9], [0, 7, 9], [0, 0, 0]) == message_plan.MessagePlan()


def test_tiny_pieces_far_apart_come_alone() -> None:
    at = [0, 10_000, 20_000]
    messages = messages_of(at, at, [16, 16, 16])
    assert messages.nbytes == [16, 16, 16]
    assert not messages.packed


def test_a_large_piece_is_not_packed_with_its_small_neighbours() -> None:
    messages = messages_of([0, 256, 512, 512 + 200 * KIB], [0, 256, 512, 512 + 200 * KIB], [10, 10, 200 * KIB, 10])
    assert set(messages.packed) == {0, 1}
    assert sorted(messages.nbytes) == [10 + 0, 266, 200 * KIB] or messages.nbytes[:1] == [200 * KIB + 10]


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
