"""Boxes cut into cells: the cells are the box, and each lies where its owners say, element by element."""

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.layout.casts import CASTABLE
from tensorhub_common.layout.layout import PIECE_BYTES_MAX
from tensorhub_common.layout.parts import Shape
from tensorhub_common.programs.amax_cells import UnitKind
from tensorhub_common.programs.program import Cell
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable
from tensorhub_planner.compiler.overlaps import Overlap, converts, overlap_of, pieces_of
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

VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"
WHOLE = (6, 5)
Box = tuple[Shape, Shape]
EVERYTHING: Box = ((0, 0), WHOLE)


def geometry(
    shape: Shape, box: Box | None = None, dtype: str = "bfloat16", cast: str = "", *, is_original: bool = True
) -> BoxGeometry:
    """Return a box of a tensor of this global shape, packed in memory."""
    (start, stop), itemsize = box or ((0,) * len(shape), shape), CASTABLE.get(dtype, 1)
    sizes = tuple(b - a for a, b in zip(start, stop, strict=True))
    strides = tuple(itemsize * prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return BoxGeometry(dtype, itemsize, shape, start, stop, strides, is_original, cast)


@pytest.mark.parametrize(
    ("box", "atom", "how"),
    [
        (geometry((4,)), geometry((4,)), ""),
        (geometry((4,), is_original=False), geometry((4,)), ""),
        (geometry((4,)), geometry((4,), dtype="float32"), "bfloat16>float32"),
        (geometry((4,), is_original=False), geometry((4,), dtype="float32"), None),
        (geometry((4,), dtype="int8"), geometry((4,)), None),
        (geometry((4,)), geometry((4,), dtype="int8"), None),
        (geometry((4, 4)), geometry((4, 4), dtype="float8_e4m3fn", cast=VALUES), f"bfloat16>{VALUES}"),
        (geometry((4, 4), dtype="float64"), geometry((4, 4), dtype="float8_e4m3fn", cast=VALUES), None),
        (geometry((4, 4), dtype="float8_e4m3fn", cast=VALUES), geometry((4, 4)), None),
        (geometry((4, 4), dtype="float32", cast=SCALES), geometry((4, 4), dtype="float8_e4m3fn", cast=VALUES), None),
    ],
)
def test_what_was_published_is_cast_once_and_nothing_else_is(
    box: BoxGeometry, atom: BoxGeometry, how: str | None
) -> None:
    assert converts(box, atom) == how


def test_boxes_that_touch_give_nothing_and_of_values_whole_blocks_are_given() -> None:
    atom = geometry((8, 8), ((2, 2), (6, 6)))
    for box in (((0, 0), (2, 8)), ((6, 0), (8, 8)), ((0, 0), (8, 2)), ((0, 6), (8, 8))):
        assert overlap_of(0, geometry((8, 8), box), atom) is None
    corner = geometry((8, 8), ((5, 5), (8, 8)))
    assert overlap_of(3, corner, atom) == Overlap(3, (5, 5), (8, 8), corner, "")
    assert overlap_of(3, geometry((8, 9), ((5, 5), (8, 8))), atom) is None
    values = geometry((300, 128), dtype="float8_e4m3fn", cast=VALUES)
    part = geometry((300, 128), ((100, 0), (300, 128)))
    assert overlap_of(0, part, values) == Overlap(0, (128, 0), (300, 128), part, f"bfloat16>{VALUES}")
    for box in (((130, 0), (250, 128)), ((0, 0), (300, 127))):
        assert overlap_of(0, geometry((300, 128), box), values) is None


def test_cells_that_are_cut_alike_share_how() -> None:
    rows = list(pieces_of(geometry((3, PIECE_BYTES_MAX)), (0, 0), (3, PIECE_BYTES_MAX)))
    assert [each.start for each in rows] == [(0, 0), (1, 0), (2, 0)]
    assert rows[0].cut is rows[1].cut


def cut(atom: Box, boxes: Sequence[Box]) -> tuple[TileGrid | MissingRegion, BoxGeometry, list[BoxGeometry]]:
    """Return the grid of a box, and the geometries of it and of those that give it."""
    table = GeometryTable()
    numbers = [table._number(geometry(WHOLE, box)) for box in boxes]
    mine = geometry(WHOLE, atom)
    return tile_grid(mine, numbers, table), mine, [table[each] for each in numbers]


def elements(cell: Cell) -> dict[int, list[tuple[int, int]]]:
    """Return by byte of the destination where each owner has the element: (number of its box, byte in that box)."""
    return {
        cell.to + sum(i * stride for i, stride in zip(index, cell.cut.to_strides, strict=True)): [
            (owner.box, owner.ahead + sum(i * stride for i, stride in zip(index, owner.strides, strict=True)))
            for owner in cell.owners
        ]
        for index in product(*map(range, cell.cut.shape))
    }


def bytes_of(box: BoxGeometry) -> dict[Shape, int]:
    """Return where each element of a box stands, counted from the box's first one."""
    return {
        index: sum((i - a) * stride for i, a, stride in zip(index, box.start, box.strides, strict=True))
        for index in product(*map(range, box.start, box.stop))
    }


BOXES = st.tuples(*(st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in WHOLE)).map(
    lambda spans: (
        tuple(first for first, _ in spans),
        tuple(min(first + count, size) for (first, count), size in zip(spans, WHOLE, strict=True)),
    )
)


@given(BOXES, st.lists(BOXES, min_size=1, max_size=2 * OWNERS_MAX), st.integers(0, 9))
def test_cells_are_the_box_and_lie_where_their_owners_say(atom: Box, boxes: list[Box], lot: int) -> None:
    """Against all elements, one by one; what nobody has is a gap, and no element of it is anybody's."""
    grid, mine, theirs = cut(atom, boxes)
    here, there = bytes_of(mine), [bytes_of(box) for box in theirs]
    if isinstance(grid, MissingRegion):
        lacking = [*product(*map(range, grid.start, grid.stop))]
        assert lacking
        assert all(index in here and not any(index in box for box in there) for index in lacking)
        return
    found = pattern_of(mine, grid, lot)
    told = [pair for cell in found.cells for pair in elements(cell).items()]
    assert sorted(to for to, _ in told) == sorted(here.values()), "each element is in one cell"
    by_byte, most = dict(told), 0
    for index, to in here.items():
        owners = [(found.boxes[box], ahead) for box, ahead in by_byte[to]]
        having = [(number, box[index]) for number, box in enumerate(there) if index in box]
        most = max(most, len(having))
        assert len(owners) == len(set(owners)) <= OWNERS_MAX
        assert set(owners) <= set(having)
        assert owners[:FIRST_OWNERS] == having[:FIRST_OWNERS]
        assert len(having) > OWNERS_MAX or owners == having
    assert found.is_for_all == (most <= OWNERS_MAX)


@pytest.mark.parametrize("cast", ["", VALUES])
def test_readers_of_all_lots_together_use_every_owner(cast: str) -> None:
    """Also where some boxes are computed of cut blocks: these rows are two blocks, of which each half is cut once."""
    whole = (256, 128)
    for count in range(1, 4 * OWNERS_MAX):
        table, named = GeometryTable(), set[int]()
        boxes = [(a, b) for a, b in ([(0, 128), (128, 200), (200, 256)] if cast else [(0, 256)]) for _ in range(count)]
        numbers = [table._number(geometry(whole, ((a, 0), (b, 128)))) for a, b in boxes]
        mine = geometry(whole, dtype="float8_e4m3fn" if cast else "bfloat16", cast=cast)
        grid = tile_grid(mine, numbers, table)
        assert isinstance(grid, TileGrid)
        for lot in range(spread_ways(count)):
            found = pattern_of(mine, grid, lot)
            assert found.is_for_all == (count <= OWNERS_MAX)
            named |= set(found.boxes)
            assert sum(prod(each.cut.shape) for each in found.cells if each.kind is not UnitKind.PARTIAL) == prod(whole)
        assert named == set(range(len(numbers)))
        assert spread_ways(count) == 1 or count > OWNERS_MAX


def test_lots_whose_owners_are_cut_alike_have_the_same_cells_and_others_their_own() -> None:
    """Of a matrix that all have, and then of one of which some have a row less, in no order."""
    atom: Box = ((1, 0), (3, 5))
    for fewer, kept_max in ((33, 1), (7, 5)):
        boxes: list[Box] = [((0 if (number + 1) % fewer else 1, 0), WHOLE) for number in range(32)]

        def made(lot: int, boxes: list[Box] = boxes) -> TilePattern:
            grid, mine, _ = cut(atom, boxes)
            assert isinstance(grid, TileGrid)
            return pattern_of(mine, grid, lot)

        grid, mine, _ = cut(atom, boxes)
        assert isinstance(grid, TileGrid)
        found = [pattern_of(mine, grid, lot) for lot in range(spread_ways(len(boxes)))]
        assert found == [made(lot) for lot in range(spread_ways(len(boxes)))]
        assert len({each.boxes for each in found}) == len(found)
        assert len({id(each.cells) for each in found}) == len({str(each.cells) for each in found}) <= kept_max
