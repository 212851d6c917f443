"""Atoms cut into cells: the cells are the atom, and each lies where its owners say, element by element."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.layout.parts import Shape
from tensorhub_common.programs.program import Cell
from tensorhub_planner.compiler import tiling
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable
from tensorhub_planner.compiler.tiling import (
    FIRST_OWNERS,
    OWNERS_MAX,
    MissingRegion,
    TileGrid,
    TilePattern,
    pattern_of,
    spread_ways,
    tile_grid,
)

WHOLE = (6, 5)
ITEMSIZE = 2

Box = tuple[Shape, Shape]


def one(box: Box) -> Layout:
    start, stop = box
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return layout_of([TensorEntry("w", "int16", ITEMSIZE, shape, WHOLE, start)])


def cut(
    atom: Box, boxes: Sequence[Box], lot: int = 0
) -> tuple[TilePattern | MissingRegion, BoxGeometry, list[BoxGeometry]]:
    """Cut an atom up for readers of a lot; return its own cutout and those of the boxes too."""
    cutouts = GeometryTable()
    numbers = [cutouts.atoms(one(box)).cutouts[0] for box in boxes]
    mine = cutouts[cutouts.atoms(one(atom)).cutouts[0]]
    grid = tile_grid(mine, numbers, cutouts)
    theirs = [cutouts[each] for each in numbers]
    return (grid if isinstance(grid, MissingRegion) else pattern_of(mine, grid, lot)), mine, theirs


def elements(cell: Cell) -> dict[int, list[tuple[int, int]]]:
    """Return by byte of the destination where each owner has the element: (number of its box, byte in that box)."""
    found = {}
    for index in product(*map(range, cell.cut.shape)):
        to = cell.to + sum(i * stride for i, stride in zip(index, cell.cut.to_strides, strict=True))
        found[to] = [
            (owner.box, owner.ahead + sum(i * stride for i, stride in zip(index, owner.strides, strict=True)))
            for owner in cell.owners
        ]
    return found


def bytes_of(cutout: BoxGeometry) -> dict[Shape, int]:
    """Return where each element of a box stands, counted from the box's first one."""
    spans = [range(a, b) for a, b in zip(cutout.start, cutout.stop, strict=True)]
    return {
        index: sum((i - a) * stride for i, a, stride in zip(index, cutout.start, cutout.strides, strict=True))
        for index in product(*spans)
    }


BOXES = st.tuples(*(st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in WHOLE)).map(
    lambda spans: (
        tuple(first for first, _ in spans),
        tuple(min(first + count, size) for (first, count), size in zip(spans, WHOLE, strict=True)),
    )
)


@given(BOXES, st.lists(BOXES, min_size=1, max_size=2 * OWNERS_MAX), st.integers(0, 9))
def test_cells_are_the_atom_and_lie_where_their_owners_say(atom: Box, boxes: list[Box], lot: int) -> None:
    """Against all elements, one by one; what nobody has is a gap, and no element of it is anybody's."""
    found, mine, theirs = cut(atom, boxes, lot)
    here, there = bytes_of(mine), [bytes_of(box) for box in theirs]
    if isinstance(found, MissingRegion):
        lacking = [*product(*(range(a, b) for a, b in zip(found.start, found.stop, strict=True)))]
        assert lacking
        assert all(index in here and not any(index in box for box in there) for index in lacking)
        return
    told: dict[int, list[tuple[int, int]]] = {}
    for cell in found.cells:
        of_cell = elements(cell)
        assert not told.keys() & of_cell.keys(), "an element is in two cells"
        told |= of_cell
    assert sorted(told) == sorted(here.values())
    for index, to in here.items():
        owners = [(found.boxes[box], ahead) for box, ahead in told[to]]
        having = [(number, box[index]) for number, box in enumerate(there) if index in box]
        assert owners
        assert set(owners) <= set(having)
        assert len(owners) == len(set(owners)) <= OWNERS_MAX
        assert owners[:FIRST_OWNERS] == having[:FIRST_OWNERS]
        assert len(having) > OWNERS_MAX or owners == having


def test_readers_of_all_lots_together_use_every_owner() -> None:
    everything: Box = ((0, 0), WHOLE)
    for count in range(1, 4 * OWNERS_MAX):
        named = set()
        for lot in range(spread_ways(count)):
            found, _, _ = cut(everything, [everything] * count, lot)
            assert isinstance(found, TilePattern)
            assert found.is_for_all == (count <= OWNERS_MAX)
            named |= set(found.boxes)
        assert named == set(range(count))
        assert spread_ways(count) == 1 or count > OWNERS_MAX


def test_lots_whose_owners_are_cut_alike_have_the_same_cells_and_others_their_own() -> None:
    """Of a matrix that all have, and then of one of which some have a row less, in no order."""
    atom: Box = ((1, 0), (3, 5))
    for fewer, kept_max in ((33, 1), (7, 5)):
        boxes: list[Box] = [((0 if (number + 1) % fewer else 1, 0), (6, 5)) for number in range(32)]
        cutouts = GeometryTable()
        mine = cutouts[cutouts.atoms(one(atom)).cutouts[0]]
        grid = tile_grid(mine, [cutouts.atoms(one(box)).cutouts[0] for box in boxes], cutouts)
        assert isinstance(grid, TileGrid)
        found = [pattern_of(mine, grid, lot) for lot in range(spread_ways(len(boxes)))]
        assert found == [cut(atom, boxes, lot)[0] for lot in range(spread_ways(len(boxes)))]
        assert len({each.boxes for each in found}) == len(found)
        assert len({id(each.cells) for each in found}) == len({str(each.cells) for each in found}) <= kept_max


def test_what_would_be_cut_too_often_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "CELLS_MAX", 5)
    rows: list[Box] = [((row, 0), (row + 1, 5)) for row in range(6)]
    assert not isinstance(cut(((0, 0), (5, 5)), rows)[0], MissingRegion)
    with pytest.raises(LayoutMismatch, match="cut into more than 5 boxes: cut it along fewer dimensions"):
        cut(((0, 0), WHOLE), rows)
