"""Blobs read by what others before had alike: they are the layouts that they are by themselves, or none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_of
from tensorhub_planner.compiler import layout_reader
from tensorhub_planner.compiler.layout_reader import LayoutReader

NAMES = [f"model.layers.{number:02}.of_a_name_that_is_longer_than_what_blobs_begin_with" for number in range(12)]


def row(name: str, size: int = 4) -> TensorEntry:
    return TensorEntry(name, "bfloat16", 2, (size, 3), (8, 3), (0, 0))


def rank(*experts: str, size: int = 4) -> Layout:
    """Return a layout of which one row in four is an expert's."""
    mine = dict(zip(NAMES[1::4], experts, strict=False))
    return layout_of([row(name + mine.get(name, ""), size if name in mine else 4) for name in NAMES])


def outcome(data: bytes, entries: LayoutReader) -> Layout | None:
    try:
        return entries.decoded(data, "digest")
    except (LayoutMismatch, UnicodeDecodeError):
        return None


def by_itself(data: bytes) -> Layout | None:
    try:
        return layout_of(msgspec.msgpack.decode(data, type=Layout).tensors)
    except (msgspec.MsgspecError, LayoutMismatch, UnicodeDecodeError):
        return None


RANKS = st.builds(rank, *[st.sampled_from(["", ".e1", ".e20", ".e300"])] * 3, size=st.sampled_from([0, 4, 8]))
ALTERED = st.tuples(RANKS.map(encoded), st.integers(0, 400), st.sampled_from([b"", b"\x01", b"\x96", b"layers.05"]))
BLOBS = RANKS.map(encoded) | ALTERED.map(lambda it: it[0][: it[1]] + it[2] + it[0][it[1] + len(it[2]) :])


@given(st.lists(BLOBS, max_size=12), st.sampled_from([5, 20, 1000]))
def test_a_blob_is_what_it_is_by_itself(blobs: list[bytes], entries_max: int) -> None:
    """Whatever was read before, also of what is no layout."""
    entries = LayoutReader(entries_max)
    for data in [*map(encoded, map(rank, ("", ".e1"), (".e1", ""))), *blobs]:
        assert outcome(data, entries) == by_itself(data)
        assert len(entries) <= entries_max


def test_what_two_layouts_have_alike_is_found_in_the_next() -> None:
    """And what stands in the gaps is read, and kept, as a whole."""
    entries = LayoutReader()
    for each in ("1", "2"):
        entries.decoded(encoded(rank(each, each, each)), "")
    count = len(entries)
    data = encoded(rank("3", "3", "30"))
    found = entries._templates.found(data)
    assert found is not None
    template, gaps = found
    assert (template.rows, [run.gap for run in template.runs]) == (9, [1, 1, 1])
    assert [name in gap for name, gap in zip((b"3", b"3", b"30"), gaps, strict=True)] == [True] * 3
    one, other = (entries.decoded(data, "") for _ in range(2))
    assert one == other == rank("3", "3", "30")
    assert all(a is b for a, b in zip(one.tensors, other.tensors, strict=True))
    assert len(entries) == count + 3


def packed(*rows: TensorEntry, count: int | None = None) -> bytes:
    """Return a blob of these, which says that it has so many."""
    bodies = [encoded(Layout((each,)))[len(encoded(Layout(()))) :] for each in rows]
    return encoded(Layout(()))[:-1] + bytes([0x90 + (len(rows) if count is None else count)]) + b"".join(bodies)


def with_gap(*experts: str) -> list[TensorEntry]:
    """Return rows of which some are experts, in one gap."""
    return [*rank().tensors[:3], *(row(NAMES[2] + each) for each in experts), *rank().tensors[3:10]]


@pytest.mark.parametrize(
    "data",
    [
        packed(*with_gap("1", "2"), count=11),
        packed(*with_gap("1", "2", "3"), count=11),
        packed(*with_gap(), count=11),
        packed(*with_gap("3")) + b"\x00",
        packed(*with_gap("3"))[:-1],
        packed(*with_gap(), row("z", 9)),
        packed(*with_gap()[:3], row(NAMES[2] + "3", 9), *with_gap()[3:]),
        packed(*with_gap()[:3], rank().tensors[0], *with_gap()[3:]),
    ],
)
def test_what_is_no_layout_is_none_though_a_template_fits(data: bytes) -> None:
    """Too many or too few rows in a gap, which may have been read elsewhere; a box that does not fit; a name twice."""
    entries = LayoutReader()
    for experts in ("1", "2", "5"), ("12", "34", "13"), ("123", "456", "124"):
        for some in (*experts, *experts):
            assert entries.decoded(packed(*with_gap(*some)), "") == Layout(tuple(with_gap(*some)))
    assert entries._templates.found(packed(*with_gap("3")))
    assert by_itself(data) is None
    with pytest.raises(LayoutMismatch):
        entries.decoded(data, "")
    assert outcome(packed(*with_gap("3")), entries) == Layout(tuple(with_gap("3")))


def test_so_much_is_remembered_of_layouts_that_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_reader, "ALIKE_MAX", 2)
    entries = LayoutReader()
    for size in range(8):
        for each in ("1", "2", "3"):
            layout = layout_of(
                [row(NAMES[0]), *(row(f"{name}.{size}") for name in NAMES[1:]), row("z" + each), row("zz")]
            )
            assert entries.decoded(encoded(layout), "") == layout
    for alike in entries._templates._alike._known.values():
        assert len(alike.templates) <= 2
        assert len(alike.others) <= 2
