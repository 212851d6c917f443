"""The canonical pieces of any layout: they cover it exactly, they are contiguous, and they mean what they say."""

import math
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.layout import layout as layouts
from tensorhub_common.layout.layout import (
    ALIGNMENT_BYTES,
    Layout,
    TensorEntry,
    layout_digest,
    layout_of,
    pieces,
    placements,
    segment_bytes,
)

SMALL_PIECE_BYTES: Final = 48
"""So that small tensors are cut in every way in which huge ones are."""

DTYPES: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


@st.composite
def entries(draw: st.DrawFn, name: str) -> TensorEntry:
    whole = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in whole)
    shape = tuple(draw(st.integers(0, size - begin)) for size, begin in zip(whole, offset, strict=True))
    itemsize = draw(st.sampled_from(sorted(DTYPES)))
    return TensorEntry(name, DTYPES[itemsize], itemsize, shape, whole, offset)


@st.composite
def some_layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.lists(st.text(min_size=1, max_size=5), max_size=5, unique=True))
    return layout_of([draw(entries(name)) for name in names])


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "PIECE_BYTES_MAX", SMALL_PIECE_BYTES)
        yield


def global_tensor(entry: TensorEntry) -> np.ndarray:
    count = math.prod(entry.global_shape)
    if entry.itemsize == 16:
        return np.arange(count, dtype=np.complex128).reshape(entry.global_shape)
    return np.arange(count).astype(DTYPES[entry.itemsize]).reshape(entry.global_shape)


def local_bytes(entry: TensorEntry) -> bytes:
    """Return what stands in the segment for this tensor: its box of the global one, row after row."""
    box = tuple(slice(begin, begin + size) for begin, size in zip(entry.offset, entry.shape, strict=True))
    return np.ascontiguousarray(global_tensor(entry)[box]).tobytes()


@given(some_layouts())
def test_a_piece_is_the_slice_of_the_global_tensor_that_its_box_names(layout: Layout) -> None:
    """And it stands contiguous where the table says, so a source of any layout can tell what it is."""
    segment = bytearray(segment_bytes(layout))
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        segment[at : at + entry.nbytes] = local_bytes(entry)
    known = {entry.name: entry for entry in layout.tensors}
    table = pieces(layout)
    for piece in range(len(table)):
        box = table.box(piece)
        slices = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        expected = np.ascontiguousarray(global_tensor(known[box.tensor])[slices]).tobytes()
        assert segment[table.at[piece] : table.at[piece] + table.nbytes[piece]] == expected


@given(some_layouts())
def test_pieces_cover_every_element_exactly_once(layout: Layout) -> None:
    table = pieces(layout)
    seen = [np.zeros(entry.shape, dtype=np.int64) for entry in layout.tensors]
    for piece in range(len(table)):
        number = table.tensor[piece]
        offset = layout.tensors[number].offset
        box = zip(table.start[piece], table.stop[piece], offset, strict=True)
        seen[number][tuple(slice(start - begin, stop - begin) for start, stop, begin in box)] += 1
    assert all((each == 1).all() for each in seen)


@given(some_layouts())
def test_pieces_are_in_segment_order_bounded_and_touch_nothing_else(layout: Layout) -> None:
    table = pieces(layout)
    end = 0
    for piece in range(len(table)):
        entry = layout.tensors[table.tensor[piece]]
        assert table.at[piece] >= end
        assert 0 < table.nbytes[piece] <= max(SMALL_PIECE_BYTES, entry.itemsize)
        assert table.piece_at(table.at[piece]) == table.piece_at(table.at[piece] + table.nbytes[piece] - 1) == piece
        end = table.at[piece] + table.nbytes[piece]
    assert end <= segment_bytes(layout)
    assert all(at % ALIGNMENT_BYTES == 0 for at in placements(layout))


@given(some_layouts(), st.randoms(use_true_random=False))
def test_the_same_tensors_in_another_order_are_the_same_layout(layout: Layout, chance: object) -> None:
    shuffled = list(layout.tensors)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    again = layout_of(shuffled)
    assert again == layout
    assert layout_digest(again) == layout_digest(layout)


@given(some_layouts(), some_layouts())
def test_only_equal_layouts_have_equal_digests(one: Layout, other: Layout) -> None:
    assert (one == other) == (layout_digest(one) == layout_digest(other))
