"""Atoms: the boxes of global tensors in a shard's memory, and where they stand."""

from typing import NamedTuple

import pytest

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, placements
from tensorhub_common.layout.parts import Part, padding
from tensorhub_planner.compiler import boxes
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable


class Atom(NamedTuple):
    name: str
    at: int
    cutout: int


def atoms_of(cutouts: GeometryTable, layout: Layout, *, is_original: bool = False) -> list[Atom]:
    """Return a layout's atoms one by one."""
    found = cutouts.atoms(layout, is_original=is_original)
    return [Atom(*each) for each in zip(found.names, found.at, found.cutouts, strict=True)]


def test_padding_is_no_atom() -> None:
    parts = (Part("v", (10, 3), (8, 0), (2, 3), (0, 0), (2, 3)), padding((2, 0), (2, 3)))
    layout = Layout((TensorEntry("embedding", "float32", 4, (4, 3), (4, 3), (0, 0), parts),))
    cutouts = GeometryTable()
    [atom] = atoms_of(cutouts, layout)
    assert (atom.name, atom.at) == ("v", 0)
    assert cutouts[atom.cutout] == BoxGeometry("float32", 4, (10, 3), (8, 0), (10, 3), (12, 4))


def test_tensors_stand_where_the_segment_has_them() -> None:
    """Whole ones, empty ones and those of parts, in turn; equal cutouts have one number."""
    half = Part("v", (4, 6), (0, 3), (4, 3), (0, 2), (4, 3))
    other = Part("u", (4, 2), (0, 0), (4, 2), (0, 0), (4, 2))
    entries = [
        TensorEntry("a", "int16", 2, (3, 5), (6, 5), (3, 0)),
        TensorEntry("b", "int16", 2, (0, 5), (6, 5), (3, 0)),
        TensorEntry("c", "int16", 2, (4, 5), (4, 5), (0, 0), (other, half)),
        TensorEntry("d", "int16", 2, (3, 5), (6, 5), (3, 0)),
        TensorEntry("e", "int16", 2, (), (), ()),
        TensorEntry("f", "int16", 2, (0, 5), (6, 5), (3, 0)),
        TensorEntry("g", "int16", 2, (3, 5), (6, 5), (0, 0)),
    ]
    layout = layout_of(entries)
    at = dict(zip((entry.name for entry in layout.tensors), placements(layout), strict=True))
    cutouts = GeometryTable()
    found = {atom.name: atom for atom in atoms_of(cutouts, layout)}
    assert list(found) == ["a", "u", "v", "d", "e", "g"]
    assert {name: atom.at for name, atom in found.items()} == {
        **{name: at[name] for name in "adeg"},
        "u": at["c"],
        "v": at["c"] + 2 * 2,
    }
    assert found["a"].cutout == found["d"].cutout != found["g"].cutout
    assert len(cutouts) == 5
    assert cutouts[found["a"].cutout] == BoxGeometry("int16", 2, (6, 5), (3, 0), (6, 5), (10, 2))
    assert cutouts[found["v"].cutout] == BoxGeometry("int16", 2, (4, 6), (0, 3), (4, 6), (10, 2))
    assert cutouts[found["e"].cutout] == BoxGeometry("int16", 2, (), (), (), ())


def test_a_box_may_have_more_dimensions_there_or_here() -> None:
    """An expert's matrix is one layer of a stack of them, and the other way round."""
    layer = Part("stack", (8, 4, 6), (5, 0, 0), (1, 4, 6), (0, 0), (4, 6))
    cutouts = GeometryTable()
    [there] = atoms_of(cutouts, layout_of([TensorEntry("m", "int16", 2, (4, 6), (4, 6), (0, 0), (layer,))]))
    assert cutouts[there.cutout] == BoxGeometry("int16", 2, (8, 4, 6), (5, 0, 0), (6, 4, 6), (0, 12, 2))
    stacked = (Part("m0", (4, 6), (0, 0), (4, 6), (0, 0, 0), (1, 4, 6)), Part("m1", (), (), (), (1, 0, 0), (1, 4, 6)))
    whole = TensorEntry("s", "int16", 2, (2, 4, 6), (2, 4, 6), (0, 0, 0), stacked)
    first, second = atoms_of(cutouts, Layout((whole,)))
    assert (first.at, second.at) == (0, 4 * 6 * 2)
    scalar = Part("bias", (), (), (), (0, 0), (1, 1))
    [one] = atoms_of(cutouts, Layout((TensorEntry("s", "int16", 2, (1, 1), (1, 1), (0, 0), (scalar,)),)))
    assert cutouts[one.cutout] == BoxGeometry("int16", 2, (), (), (), ())


def test_what_was_published_is_another_cutout_than_what_others_hold() -> None:
    """Since it may be cast; and what is computed is another one than what it is computed of."""
    plain = TensorEntry("w", "float32", 4, (4, 4), (4, 4), (0, 0))
    scales = Part("w", (4, 4), (0, 0), (1, 1), (0, 0), (1, 1), "fp8-block-128:scales")
    fused = TensorEntry("s", "float32", 4, (1, 1), (1, 1), (0, 0), (scales,))
    cutouts = GeometryTable()
    held = atoms_of(cutouts, layout_of([plain, fused]))
    published = atoms_of(cutouts, layout_of([plain, fused]), is_original=True)
    assert [cutouts[atom.cutout].is_original for atom in (*held, *published)] == [False, False, True, True]
    assert [atom.name for atom in held] == ["w", "w"]
    assert {cutouts[atom.cutout].cast for atom in held} == {"", "fp8-block-128:scales"}
    assert atoms_of(cutouts, layout_of([plain, fused])) == held


def test_what_is_remembered_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few are remembered, all are found: in layouts that have some alike, as originals and not."""
    monkeypatch.setattr(boxes, "ROWS_MAX", 2)
    layouts = [
        layout_of([TensorEntry(name, "int16", 2, (3, 50 * n), (6, 50 * n), (at, 0)) for n, name in enumerate(names, 1)])
        for names, at in (("abc", 0), ("bcd", 0), ("a", 3), ("", 0), ("abc", 0))
    ]
    cutouts = GeometryTable()
    for is_original in (False, True, False):
        for layout in layouts:
            found = atoms_of(cutouts, layout, is_original=is_original)
            assert [atom.name for atom in found] == [entry.name for entry in layout.tensors]
            assert [atom.at for atom in found] == placements(layout)
            for atom, entry in zip(found, layout.tensors, strict=True):
                cutout = cutouts[atom.cutout]
                assert (cutout.start, cutout.global_shape) == (entry.offset, entry.global_shape)
                assert cutout.is_original == is_original
    assert len(cutouts) == 2 * len({(each.offset, each.shape) for layout in layouts for each in layout.tensors})


def test_where_entries_stand_is_one_list_for_layouts_that_differ_in_names_alone() -> None:
    """Thousands of ranks have few such lists."""
    cutouts = GeometryTable()
    one, other, longer = (
        cutouts.atoms(layout_of([TensorEntry(name, "int16", 2, (3, 50 * n), (6, 300), (0, 0)) for n, name in names]))
        for names in ([(1, "a"), (2, "b")], [(1, "b"), (2, "c")], [(1, "b"), (2, "c"), (2, "d")])
    )
    assert one.at is other.at
    assert one.cutouts is other.cutouts
    assert (other.names, longer.at[:2], longer.cutouts[:2]) == (("b", "c"), one.at, one.cutouts)
