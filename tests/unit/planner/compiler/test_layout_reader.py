"""Layouts read from their blobs: each entry is read and checked once, and the layout is the one that was stored."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_of
from tensorhub_common.layout.parts import Part
from tensorhub_planner.compiler.layout_reader import LayoutReader


def rows(name: str, first: int, stop: int, dtype: str = "bfloat16") -> TensorEntry:
    return TensorEntry(name, dtype, 2, (stop - first, 3), (8, 3), (first, 0))


def blob(*entries: Any) -> bytes:
    return msgspec.msgpack.encode({"tensors": entries})


SOME = st.builds(
    lambda name, first, count: rows(name, first, first + count),
    st.sampled_from(["a", "b", "ä", "model.layers.0"]),
    st.integers(0, 4),
    st.integers(0, 4),
)


LAYOUTS = st.lists(st.lists(SOME, max_size=4, unique_by=lambda each: each.name).map(layout_of), max_size=8)


@given(LAYOUTS, st.integers(0, 6))
def test_whatever_is_kept_layouts_come_back_as_they_were(layouts: list[Layout], entries_max: int) -> None:
    entries = LayoutReader(entries_max)
    for layout in [*layouts, *layouts]:
        assert entries.decoded(encoded(layout), "digest") == layout
        assert len(entries) <= entries_max


def test_what_ranks_have_alike_is_one_object() -> None:
    entries = LayoutReader()
    norm = TensorEntry("norm", "float32", 4, (3,), (3,), (0,))
    one, other = (entries.decoded(encoded(layout_of([norm, rows("w", at, at + 4)])), "") for at in (0, 4))
    assert one.tensors[0] is other.tensors[0]
    assert one.tensors[1] != other.tensors[1]
    assert len(entries) == 3


def test_where_nothing_is_alike_nothing_is_looked_for() -> None:
    """Layouts are what they are all the same; and what is known already is still found."""
    unlike = [layout_of([rows(f"{name}{rank}", 0, 4) for name in "abcd"]) for rank in range(6)]
    entries = LayoutReader(trials_max=6)
    assert [entries.decoded(encoded(layout), "") for layout in unlike] == unlike
    assert len(entries) == 4, "one layout was a trial that did not pay"
    known = entries.decoded(encoded(unlike[0]), "")
    assert known.tensors[0] is entries.decoded(encoded(unlike[0]), "").tensors[0]
    half = layout_of([*unlike[0].tensors[:3], rows("z", 0, 4)])
    assert entries.decoded(encoded(half), "").tensors[0] is known.tensors[0]
    assert len(entries) == 5
    assert [entries.decoded(encoded(layout), "") for layout in unlike] == unlike
    assert len(entries) == 9, "what was known has earned trials"


def test_parts_are_read_too() -> None:
    parts = (Part("u", (4, 2), (0, 0), (4, 2), (0, 0), (4, 2)),)
    layout = layout_of([TensorEntry("c", "int16", 2, (4, 2), (4, 2), (0, 0), parts), rows("w", 0, 4)])
    assert LayoutReader().decoded(encoded(layout), "") == layout


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x93", "layout digest123456 is no layout"),
        (msgspec.msgpack.encode({"tensors": 7}), "is no layout"),
        (msgspec.msgpack.encode({}), "is no layout.*tensors"),
        (blob(7), "is no layout"),
        (blob(("w", "int8", 1, (2,), (2,))), "is no layout"),
        (blob(("w", "int8", "1", (2,), (2,), (0,))), "is no layout"),
        (blob(rows("w", 0, 9)), "'w': a box of shape .* does not fit"),
        (blob(rows("w", 0, 4), rows("w", 4, 8)), "'w' is given twice"),
        (blob(rows("w", 0, 4), rows("w", 0, 4)), "'w' is given twice"),
        (blob(rows("", 0, 4)), "is empty"),
        (blob(rows("text", 0, 4)).replace(b"text", b"t\xffxt"), "is no layout"),
        (b"\x81\xa7tensors" + b"\x91" * 100_000, "is no layout"),
    ],
)
def test_what_is_none_is_refused_each_time(data: bytes, words: str) -> None:
    entries = LayoutReader()
    good = layout_of([rows("w", 0, 4)])
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match=words):
            entries.decoded(data, "digest123456789")
        assert entries.decoded(encoded(good), "") == good
