"""What one box gives of another, and how a cell is cut into units: at their exact limits."""

from itertools import pairwise, product
from math import prod

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorhub_common.layout.casts import CASTABLE
from tensorhub_common.layout.layout import PIECE_BYTES_MAX
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import quantized_kind
from tensorhub_common.programs.program import SourceBox, UnitSplit
from tensorhub_common.programs.regions import Blocks
from tensorhub_planner.compiler.boxes import BoxGeometry
from tensorhub_planner.compiler.overlaps import CellBox, Overlap, converts, overlap_of, owner_of, pieces_of

VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"
ROW_BYTES = PIECE_BYTES_MAX // 4


def cutout(
    shape: Shape,
    start: Shape | None = None,
    stop: Shape | None = None,
    dtype: str = "bfloat16",
    cast: str = "",
    *,
    is_original: bool = True,
) -> BoxGeometry:
    """Return a box of a tensor of this global shape, alone and packed in memory."""
    begin, end, itemsize = start or (0,) * len(shape), stop or shape, CASTABLE.get(dtype, 1)
    sizes = tuple(b - a for a, b in zip(begin, end, strict=True))
    strides = tuple(itemsize * prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return BoxGeometry(dtype, itemsize, shape, begin, end, strides, is_original, cast)


@pytest.mark.parametrize(
    ("box", "atom", "how"),
    [
        (cutout((4,)), cutout((4,)), ""),
        (cutout((4,), is_original=False), cutout((4,)), ""),
        (cutout((4,)), cutout((4,), dtype="float32"), "bfloat16>float32"),
        (cutout((4,), is_original=False), cutout((4,), dtype="float32"), None),
        (cutout((4,), dtype="int8"), cutout((4,)), None),
        (cutout((4,)), cutout((4,), dtype="int8"), None),
        (cutout((4, 4)), cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), f"bfloat16>{VALUES}"),
        (cutout((4, 4), dtype="float64"), cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), None),
        (cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), ""),
        (cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), cutout((4, 4)), None),
        (cutout((4, 4), dtype="float8_e4m3fn"), cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), None),
        (cutout((4, 4), dtype="float32", cast=SCALES), cutout((4, 4), dtype="float8_e4m3fn", cast=VALUES), None),
    ],
)
def test_what_becomes_what(box: BoxGeometry, atom: BoxGeometry, how: str | None) -> None:
    """As it is, or by one cast of what was published; never by a second one."""
    assert converts(box, atom) == how


def test_boxes_that_touch_give_nothing() -> None:
    atom = cutout((8, 8), (2, 2), (6, 6))
    for start, stop in [((0, 0), (2, 8)), ((6, 0), (8, 8)), ((0, 0), (8, 2)), ((0, 6), (8, 8))]:
        assert overlap_of(0, cutout((8, 8), start, stop), atom) is None
    corner = cutout((8, 8), (5, 5), (8, 8))
    assert overlap_of(3, corner, atom) == Overlap(3, (5, 5), (8, 8), corner, "")
    assert overlap_of(3, cutout((8, 9), (5, 5), (8, 8)), atom) is None
    assert overlap_of(3, cutout((8, 8), (5, 5), (8, 8), dtype="int8"), atom) is None


def test_of_values_a_box_gives_whole_blocks() -> None:
    atom = cutout((300, 128), dtype="float8_e4m3fn", cast=VALUES)
    assert overlap_of(0, cutout((300, 128), (100, 0), (300, 128)), atom) == Overlap(
        0, (128, 0), (300, 128), cutout((300, 128), (100, 0), (300, 128)), f"bfloat16>{VALUES}"
    )
    assert overlap_of(0, cutout((300, 128), (130, 0), (250, 128)), atom) is None
    assert overlap_of(0, cutout((300, 128), (0, 0), (300, 127)), atom) is None


def pieces(shape: Shape, start: Shape | None = None, stop: Shape | None = None) -> list[CellBox]:
    atom = cutout(shape, dtype="float8_e4m3fn")
    return list(pieces_of(atom, start or (0,) * len(shape), stop or shape))


def test_what_fits_into_a_unit_is_one() -> None:
    (piece,) = pieces((4, ROW_BYTES))
    assert piece == CellBox((0, 0), (4, ROW_BYTES), UnitSplit((4, ROW_BYTES), (ROW_BYTES, 1), 1, 0, 4, 1))


def test_what_does_not_is_cut_by_as_many_rows_as_fit() -> None:
    (piece,) = pieces((9, ROW_BYTES))
    assert (piece.cut.dim, piece.cut.rows, piece.cut.units) == (0, 4, 3)
    (piece,) = pieces((9, ROW_BYTES + 1))
    assert (piece.cut.rows, piece.cut.units) == (3, 3)


def test_a_row_of_exactly_a_unit_is_one_and_a_longer_one_is_cut() -> None:
    (piece,) = pieces((3, PIECE_BYTES_MAX))
    assert (piece.cut.dim, piece.cut.rows, piece.cut.units) == (0, 1, 3)
    rows = pieces((3, PIECE_BYTES_MAX + 1))
    assert [(each.start, each.stop) for each in rows] == [
        ((row, 0), (row + 1, PIECE_BYTES_MAX + 1)) for row in range(3)
    ]
    assert {(each.cut.dim, each.cut.rows, each.cut.units) for each in rows} == {(1, PIECE_BYTES_MAX, 2)}
    assert rows[0].cut is rows[1].cut, "alike ones are kept once"


def test_a_scalar_is_a_unit() -> None:
    assert pieces(()) == [CellBox((), (), UnitSplit((), (), 1, 0, 1, 1))]


def test_values_are_cut_where_blocks_begin() -> None:
    """A box that begins within a block: what is left of that one is a cell of its own once there are several units."""
    columns = PIECE_BYTES_MAX // 256
    atom = cutout((1024, columns), dtype="float8_e4m3fn", cast=VALUES)
    cells = list(pieces_of(atom, (100, 0), (1024, columns)))
    assert [(cell.start[0], cell.stop[0]) for cell in cells] == [(100, 128), (128, 1024)]
    assert [(cell.cut.rows, cell.cut.units) for cell in cells] == [(28, 1), (256, 4)]
    (cell,) = pieces_of(atom, (100, 0), (256, columns))
    assert (cell.start[0], cell.cut.units) == (100, 1), "with the whole of its first block it is no larger than a unit"
    assert len(list(pieces_of(atom, (100, 0), (257, columns)))) == 2
    (cell,) = pieces_of(atom, (100, 0), (120, columns))
    assert (cell.start[0], cell.stop[0]) == (100, 120)
    (cell,) = pieces_of(atom, (128, 0), (1024, columns))
    assert (cell.cut.rows, cell.cut.units) == (256, 4)


def test_a_scale_weighs_as_much_as_its_block() -> None:
    atom = cutout((128 * 1000, 128), dtype="float32", cast=SCALES)
    (cell,) = pieces_of(atom, (0, 0), (1000, 1))
    assert (cell.cut.rows, cell.cut.units) == (PIECE_BYTES_MAX // 128**2, -(-1000 * 128**2 // PIECE_BYTES_MAX))


def units_of(piece: CellBox) -> list[tuple[Shape, Shape]]:
    """Return the boxes of a cell's units, in their order."""
    cut, found = piece.cut, []
    for unit in range(cut.units):
        start = list(piece.start)
        start[cut.dim] += unit * cut.rows
        found.append((tuple(start), tuple(a + b for a, b in zip(start, cut.sizes(unit), strict=True))))
    return found


@st.composite
def boxes_to_cut(draw: st.DrawFn) -> tuple[BoxGeometry, Shape, Shape]:
    """Draw a box in the middle of a large tensor of some dtype, or of what is computed of one."""
    cast = draw(st.sampled_from(["", VALUES, SCALES]))
    dtype = {"": draw(st.sampled_from(["float8_e4m3fn", "bfloat16", "float64"])), SCALES: "float32"}.get(cast, "x")
    around = st.sampled_from([1, 2, 3, 127, 128, 129, 300, 1000, 2048, 40_000])
    weight = 128 * 128 if cast == SCALES else 8
    # Of a few hundred units at most.
    sizes = draw(st.lists(around, min_size=2, max_size=4).filter(lambda some: prod(some) * weight < 2**30))
    start = tuple(draw(st.integers(0, 700)) for _ in sizes)
    stop = tuple(a + b for a, b in zip(start, sizes, strict=True))
    step = (1,) * (len(sizes) - 2) + (128, 128) if cast == SCALES else (1,) * len(sizes)
    return cutout(tuple(b * each for b, each in zip(stop, step, strict=True)), dtype=dtype, cast=cast), start, stop


@settings(deadline=None)
@given(boxes_to_cut())
@example((cutout((400, 40_000), dtype="x", cast=VALUES), (100, 5), (400, 40_000)))
@example((cutout((300, 16_384), dtype="x", cast=VALUES), (228, 0), (300, 16_384)))
def test_units_are_as_large_as_they_may_be_and_begin_with_blocks(drawn: tuple[BoxGeometry, Shape, Shape]) -> None:
    """They are the rows of the first dimension of which one fits: wherever a box begins, none is cut finer."""
    atom, start, stop = drawn
    kind = quantized_kind(atom.cast) if atom.cast else None
    grain = (1,) * len(start) if kind is None else kind.grain(atom.global_shape)
    weight = atom.itemsize if kind is None else max(atom.itemsize, prod(kind.block(atom.global_shape)))
    blocks = [range(a // step, -(-b // step)) for a, b, step in zip(start, stop, grain, strict=True)]
    inner = [weight * prod(len(each) for each in blocks[dim + 1 :]) for dim in range(len(blocks))]
    dim = next(dim for dim, nbytes in enumerate(inner) if nbytes <= PIECE_BYTES_MAX)
    rows = PIECE_BYTES_MAX // inner[dim]
    # Those before that dimension block by block; it itself in runs that begin with a block, but for the first one.
    edges = [
        [a, *(each * step for each in some[1:]), b] for a, b, step, some in zip(start, stop, grain, blocks, strict=True)
    ]
    along = edges[dim]
    whole_from = 0 if start[dim] % grain[dim] == 0 or len(blocks[dim]) <= rows else 1
    runs = [*along[:whole_from], *along[whole_from:-1:rows], along[-1]]
    sides = [*(list(pairwise(each)) for each in edges[:dim]), list(pairwise(runs))]
    sides += [[(a, b)] for a, b in list(zip(start, stop, strict=True))[dim + 1 :]]
    expected = {(tuple(a for a, _ in some), tuple(b for _, b in some)) for some in product(*sides)}
    found = [unit for piece in pieces_of(atom, start, stop) for unit in units_of(piece)]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_how_a_cell_lies_in_its_owner() -> None:
    atom, box = cutout((8, 8), (2, 2), (6, 6)), cutout((8, 8), (1, 0), (8, 8))
    span = overlap_of(0, box, atom)
    assert span is not None
    (piece,) = pieces_of(atom, (3, 2), (6, 6))
    assert owner_of(span, 5, atom, piece) == SourceBox(5, 2 * 16 + 2 * 2, (16, 2), 2, "")


def test_how_values_and_scales_lie_in_what_they_are_computed_of() -> None:
    shape = (300, 256)
    box = cutout(shape)
    values, scales = (cutout(shape, dtype="x", cast=cast) for cast in (VALUES, SCALES))
    span = overlap_of(0, box, values)
    assert span is not None
    (piece,) = pieces_of(values, (130, 5), (140, 256))
    blocks = Blocks((128, 256), (2, 5))
    assert owner_of(span, 1, values, piece) == SourceBox(1, 128 * 512, (512, 2), 2, f"bfloat16>{VALUES}", blocks, 1)
    span = overlap_of(0, box, scales)
    assert span is not None
    (piece,) = pieces_of(scales, (1, 0), (3, 2))
    blocks = Blocks((172, 256), (0, 0))
    assert owner_of(span, 1, scales, piece) == SourceBox(1, 128 * 512, (512, 2), 2, f"bfloat16>{SCALES}", blocks, 128)


def test_what_others_have_computed_is_taken_as_it_stands() -> None:
    """From whoever has the values already no block is needed."""
    atom = cutout((300, 256), dtype="float8_e4m3fn", cast=VALUES)
    box = atom._replace(start=(7, 0), is_original=False)
    span = overlap_of(0, box, atom)
    assert span is not None
    assert (span.start, span.cast) == ((7, 0), "")
    (piece,) = pieces_of(atom, (130, 5), (140, 256))
    assert owner_of(span, 0, atom, piece).blocks is None
    assert msgspec.structs.asdict(owner_of(span, 0, atom, piece))["ahead"] == (130 - 7) * 256 + 5
