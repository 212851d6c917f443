"""Cuts an atom of the destination into cells, where any source's box begins or ends. Pure.

The cuts depend on the edges of the boxes, and not on the tensor's name, so a pattern serves all tensors, layers and
readers with the same geometry.

Invariant: the cells of a pattern are the atom, each element once, and each cell lies wholly in a box of every owner
that it names, or is an amax reduction. Where no box has a region there is a `MissingRegion` and no pattern.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.parts import Shape
from tensorhub_common.programs.program import Cell, SourceBox, UnitSplit
from tensorhub_common.programs.regions import DIMS_MAX, joined_dims
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable
from tensorhub_planner.compiler.fp8_blocks import AmaxReductionBuilder, MissingSource, has_some, parts_of_blocks
from tensorhub_planner.compiler.overlaps import CellBox, Overlap, distance, overlap_of, owner_of, pieces_of

CELLS_MAX: Final = 1_000_000
"""An atom is cut into at most this many cells."""

OWNERS_MAX: Final = 8
"""A cell names at most this many source layouts, since a plan looks at each. What more of them have alike is for other
readers, so that the load is spread: each reader takes those at equal steps from a place of its own, and so some of
every part of the cluster."""

FIRST_OWNERS: Final = 2
"""This many of these are the first ones that there are, for every reader: a holder that is ready comes first, and a
cell that named half-filled ones alone would be of no use to a reader whose turn is earlier."""


_Chosen = tuple[tuple[tuple[int, int], ...], ...]
"""For each box of a grid the owners that a reader takes: as which of its boxes, and the identity of its cutout."""


class TilePattern(NamedTuple):
    """The cells of tensors that are cut alike, in bytes behind where they begin, and which boxes they lie in."""

    cells: tuple[Cell, ...]
    boxes: tuple[int, ...]
    is_for_all: bool
    """Readers of all lots have the same."""
    table_bytes: int = 0
    """The entries of each tensor, where blocks are folded."""


class TileGrid(NamedTuple):
    """What an atom is cut into, and what readers of all lots have alike of that."""

    boxes: list[tuple[Shape, Shape, list[Overlap]]]
    """Where each begins and ends, and all spans that have it, in the order of sources. None has it where blocks have to
    be folded."""
    parts: list[Overlap]
    """What there is of blocks (`parts_of_blocks`)."""
    cells: dict[_Chosen, tuple[Cell, ...]]
    """By what readers choose of it, at most one for each lot: sources that are cut alike make the same cells, whichever
    of them these are."""


class MissingRegion(NamedTuple):
    """A region that no source has."""

    start: Shape
    stop: Shape
    lacking: MissingSource | None = None
    """Sources have parts of what it is computed of, and of this box none."""


def tile_grid(atom: BoxGeometry, boxes: Sequence[int], cutouts: GeometryTable) -> TileGrid | MissingRegion:
    """Return an atom's grid, or a region of it that no box has. `boxes` are numbers of cutouts."""
    # Ranks that hold the same have boxes of one cutout, and so spans that differ in the number alone.
    distinct = {number: overlap_of(0, cutouts[number], atom) for number in dict.fromkeys(boxes)}
    spans = [span for span in distinct.values() if span is not None]
    edges = [_edges(atom, spans, dim) for dim in range(len(atom.start))]
    if prod(len(some) - 1 for some in edges) > CELLS_MAX:
        raise LayoutMismatch(f"would be cut into more than {CELLS_MAX} boxes: cut it along fewer dimensions")
    owned: dict[Shape, list[Overlap]] = {}
    inside = {number: _inside(edges, span) for number, span in distinct.items() if span is not None}
    for number, cutout in enumerate(boxes):
        span = distinct[cutout]
        if span is not None:
            its = Overlap(number, span.start, span.stop, span.cutout, span.cast)
            for index in inside[cutout]:
                owned.setdefault(index, []).append(its)
    grid: list[tuple[Shape, Shape, list[Overlap]]] = []
    parts = parts_of_blocks(atom, [cutouts[each] for each in boxes])
    for index in product(*(range(len(some) - 1) for some in edges)):
        start = tuple(some[at] for some, at in zip(edges, index, strict=True))
        stop = tuple(some[at + 1] for some, at in zip(edges, index, strict=True))
        owners = owned.get(index, [])
        lacking = None if owners or not parts else AmaxReductionBuilder(atom, parts).lacking(start, stop)
        if lacking is not None or not (owners or parts):
            return MissingRegion(start, stop, lacking if has_some(atom, parts, start, stop) else None)
        grid.append((start, stop, owners))
    return TileGrid(grid, parts, {})


def pattern_of(atom: BoxGeometry, grid: TileGrid, lot: int) -> TilePattern:
    """Return the cells of an atom for readers of a lot."""
    if grid.parts:
        return _folded(atom, grid, lot)
    used: dict[int, int] = {}
    chosen = [_some(owners, lot) for _, _, owners in grid.boxes]
    key = tuple([tuple([(_numbered(used, span.box), id(span.cutout)) for span in spans]) for spans in chosen])
    cells = grid.cells.get(key)
    if cells is None:
        made: list[Cell] = []
        for (start, stop, _), owners in zip(grid.boxes, chosen, strict=True):
            made += _cells(atom, start, stop, owners, used)
            _check_count(made)
        cells = grid.cells[key] = tuple(made)
    is_for_all = all(len(owners) <= OWNERS_MAX for _, _, owners in grid.boxes)
    return TilePattern(cells, tuple(used), is_for_all)


def _folded(atom: BoxGeometry, grid: TileGrid, lot: int) -> TilePattern:
    """Return the same where sources have parts of the blocks that the atom is computed of."""
    used: dict[int, int] = {}
    folder = AmaxReductionBuilder(atom, grid.parts, lambda box: _numbered(used, box))
    is_for_all = True

    def some(owners: list[Overlap]) -> list[Overlap]:
        nonlocal is_for_all
        is_for_all = is_for_all and len(owners) <= OWNERS_MAX
        return _some(owners, lot)

    cells: list[Cell] = []
    for start, stop, owners in grid.boxes:
        # Where no source has its blocks whole it is an amax reduction, even if another source has it computed already.
        if any(span.cast for span in owners) or (owners and folder.lacking(start, stop) is not None):
            cells += _cells(atom, start, stop, some(owners), used)
        else:
            cells += folder.cells(start, stop, some(owners), some)
        _check_count(cells)
    table_bytes = folder.table.nbytes if any(cell.fold is not None for cell in cells) else 0
    return TilePattern(tuple(cells), tuple(used), is_for_all, table_bytes)


def _check_count(cells: Sequence[Cell]) -> None:
    if len(cells) > CELLS_MAX:
        raise LayoutMismatch(f"would be cut into more than {CELLS_MAX} boxes: cut it at fewer places")


def _edges(atom: BoxGeometry, spans: Sequence[Overlap], dim: int) -> list[int]:
    """Return where a dimension of an atom is cut: at its own ends, and wherever a span begins or ends in between."""
    begin, end = atom.start[dim], atom.stop[dim]
    inside = {edge for span in spans for edge in (span.start[dim], span.stop[dim]) if begin < edge < end}
    return [begin, *sorted(inside), end]


def _inside(edges: Sequence[Sequence[int]], span: Overlap) -> list[Shape]:
    """Return which boxes of a grid lie in a span, by their numbers in each dimension."""
    return [*product(*map(_between, edges, span.start, span.stop))]


def _between(edges: Sequence[int], start: int, stop: int) -> range:
    """Return the same of one dimension."""
    return range(bisect_left(edges, max(start, edges[0])), bisect_left(edges, min(stop, edges[-1])))


def spread_ways(owners: int) -> int:
    """Return in how many ways readers choose among this number of owners."""
    return max(1, -(-(owners - FIRST_OWNERS) // (OWNERS_MAX - FIRST_OWNERS)))


def _some(owners: list[Overlap], lot: int) -> list[Overlap]:
    """Return at most `OWNERS_MAX` of them, in their order: the first ones, and by lot which of the others."""
    if len(owners) <= OWNERS_MAX:
        return owners
    step = spread_ways(len(owners))
    return [*owners[:FIRST_OWNERS], *owners[FIRST_OWNERS + lot % step :: step]]


def _cells(
    atom: BoxGeometry, start: Shape, stop: Shape, owners: Sequence[Overlap], used: dict[int, int]
) -> Iterator[Cell]:
    """Return a cell of the grid, or several of it where a unit can't reach across its first dimensions."""
    for piece in pieces_of(atom, start, stop):
        there = _owners(owners, atom, piece, used)
        if len(start) >= DIMS_MAX:
            _check_dims(piece.cut, there)
        yield Cell(distance(piece.start, atom.start, atom.strides), piece.cut, there)


def _owners(spans: Sequence[Overlap], atom: BoxGeometry, piece: CellBox, used: dict[int, int]) -> tuple[SourceBox, ...]:
    """Return how a cell lies in the boxes of these. In boxes that are cut alike it lies alike."""
    alike: dict[int, SourceBox] = {}
    found = []
    for span in spans:
        place = _numbered(used, span.box)
        like = alike.get(id(span.cutout))
        if like is None:
            owner = alike[id(span.cutout)] = owner_of(span, place, atom, piece)
        else:
            owner = SourceBox(place, like.ahead, like.strides, like.itemsize, like.cast, like.blocks, like.step)
        found.append(owner)
    return tuple(found)


def _check_dims(cut: UnitSplit, owners: Sequence[SourceBox]) -> None:
    """Raise `LayoutMismatch` for boxes of more dimensions than an agent can copy, which it would find out too late."""
    # Where nothing is converted the bytes of an element are a dimension too.
    counts = [
        len(
            joined_dims(
                [*zip(cut.shape, cut.to_strides, owner.strides, strict=True), (1 if owner.cast else cut.itemsize, 1, 1)]
            )
        )
        for owner in owners
    ]
    if max(counts) > DIMS_MAX:
        raise LayoutMismatch(
            f"lies in boxes of {max(counts)} dimensions that can't be joined, and {DIMS_MAX} are possible: cut it "
            "along fewer dimensions, or register it with fewer"
        )


def _numbered(table: dict[int, int], box: int) -> int:
    return table.setdefault(box, len(table))
