"""Layouts read from their blobs: each entry is read and checked once, and the layout is the one that was stored."""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_of
from tensorhub_planner.compiler import layout_reader
from tensorhub_planner.compiler.layout_reader import LayoutReader, LayoutTemplates


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


NAMES = [f"model.layers.{number:02}.of_a_name_that_is_longer_than_what_blobs_begin_with" for number in range(12)]


def row(name: str, size: int = 4) -> TensorEntry:
    return TensorEntry(name, "bfloat16", 2, (size, 3), (8, 3), (0, 0))


def rank(*experts: str, size: int = 4) -> Layout:
    """Return a layout of which one row in four is an expert's."""
    mine = dict(zip(NAMES[1::4], experts, strict=False))
    return layout_of([row(name + mine.get(name, ""), size if name in mine else 4) for name in NAMES])


REFUSED: tuple[type[Exception], ...] = (LayoutMismatch, UnicodeDecodeError)


def outcome(decode: Callable[[], Layout], errors: tuple[type[Exception], ...] = REFUSED) -> Layout | None:
    try:
        return decode()
    except errors:
        return None


def by_itself(data: bytes) -> Layout | None:
    return outcome(
        lambda: layout_of(msgspec.msgpack.decode(data, type=Layout).tensors), (*REFUSED, msgspec.MsgspecError)
    )


RANKS = st.builds(rank, *[st.sampled_from(["", ".e1", ".e20", ".e300"])] * 3, size=st.sampled_from([0, 4, 8]))
ALTERED = st.tuples(RANKS.map(encoded), st.integers(0, 400), st.sampled_from([b"", b"\x01", b"\x96", b"layers.05"]))
BLOBS = RANKS.map(encoded) | ALTERED.map(lambda it: it[0][: it[1]] + it[2] + it[0][it[1] + len(it[2]) :])


@given(st.lists(BLOBS, max_size=12), st.sampled_from([5, 20, 1000]))
def test_a_blob_is_what_it_is_by_itself(blobs: list[bytes], entries_max: int) -> None:
    """Whatever was read before, also of what is no layout."""
    entries = LayoutReader(entries_max)
    for data in [*map(encoded, map(rank, ("", ".e1"), (".e1", ""))), *blobs]:
        assert outcome(lambda data=data: entries.decoded(data, "digest")) == by_itself(data)  # type: ignore[misc]
        assert len(entries) <= entries_max


def test_what_stands_in_the_gaps_of_layouts_that_are_alike_is_kept_gap_by_gap() -> None:
    """Also where its rows are kept one by one, as those of the first two are; beyond the bound all are forgotten."""
    entries, read = LayoutReader(entries_max=21), list[Layout]()
    for number, kept in (("1", 12), ("2", 15), ("1", 18), ("3", 21), ("3", 21), ("4", 3)):
        read.append(entries.decoded(encoded(rank(number, number, number)), ""))
        assert read[-1] == rank(number, number, number)
        assert len(entries) == kept
    assert all(a is b for a, b in zip(read[3].tensors, read[4].tensors, strict=True))


HEAD = b"h" * layout_reader.KEY_BYTES
read_once = cache(row)
"""Equal rows are one object."""


def kind_of(alike: str, kind: str, number: int) -> tuple[bytes, list[bytes], list[TensorEntry]]:
    """Return a blob, its rows, and what was read of them: of a kind all have the rows with a plus alike."""
    names = [f"{kind}{place}" if sign == "+" else f"{kind}{place}.{number}" for place, sign in enumerate(alike)]
    rows = [
        (b"alike" if sign == "+" else b"mine ") * 20 + name.encode() for sign, name in zip(alike, names, strict=True)
    ]
    return HEAD + b"".join(rows), rows, [*map(read_once, names)]


@pytest.mark.parametrize(
    ("alike", "gaps"),
    [("+", []), ("+-+", [1]), ("++-+--+++", [1, 2]), ("+--+", None), ("-+++", None), ("+++-", None)],
)
def test_what_two_layouts_have_alike_is_found_in_the_next(alike: str, gaps: list[int] | None) -> None:
    """If that is two thirds of all at least, and the first one and the last one; the others are in gaps."""
    templates = LayoutTemplates()
    for number in range(2):
        data, rows, entries = kind_of(alike, "a", number)
        assert templates.found(data) is None
        templates.learn(data, rows, entries, known=len(rows))
    data, rows, entries = kind_of(alike, "a", 2)
    found = templates.found(data)
    assert (found is None) == (gaps is None)
    if found is not None:
        template, between = found
        its = [entry for entry, sign in zip(entries, alike, strict=True) if sign == "-"]
        assert ([run.gap for run in template.runs], template.rows) == (gaps, alike.count("+"))
        assert b"".join(between) == b"".join(row for row, sign in zip(rows, alike, strict=True) if sign == "-")
        assert template.filled([[its.pop(0) for _ in range(run.gap)] for run in template.runs]) == entries


def learned(templates: LayoutTemplates, *kinds: str) -> None:
    """Have it learn one more of each of these kinds."""
    for place, kind in enumerate(kinds):
        data, rows, entries = kind_of("++-+", kind, place)
        templates.learn(data, rows, entries, known=len(rows))


def test_of_layouts_that_begin_alike_each_kind_has_its_template() -> None:
    """Though two of a kind do not follow one another."""
    templates = LayoutTemplates()
    learned(templates, *"abba")
    for number, kind in enumerate("aababba", 4):
        found = templates.found(kind_of("++-+", kind, number)[0])
        assert found is not None
        assert [each.name for each in found[0].entries] == [f"{kind}0", f"{kind}1"]


@pytest.mark.parametrize(("kinds", "known"), [("abcac", "a"), ("aabbcc", "ab")])
def test_of_layouts_that_begin_alike_so_many_are_remembered(
    kinds: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layouts without a template, and two templates: a third one is not remembered."""
    monkeypatch.setattr(layout_reader, "ALIKE_MAX", 2)
    templates = LayoutTemplates()
    learned(templates, *kinds)
    assert [kind for kind in "abc" if templates.found(kind_of("++-+", kind, 9)[0])] == [*known]


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
    assert entries.decoded(packed(*with_gap("3")), "") == Layout(tuple(with_gap("3")))
