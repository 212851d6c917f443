"""Frames come out of a stream whole, however it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.transports.ucxx.protocol.frames import FRAME_BYTES_MAX, LENGTH_BYTES, FrameAssembler, framed
from tensorhub_common.errors import BadCommand


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
