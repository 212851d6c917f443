"""Fp8 blocks that no source has whole: the part that each source has, and the amax reductions of the parts. Pure.

An *amax reduction* is a box of an atom whose blocks are cut by the edges of sources' boxes. One source gives the
largest magnitude of each part of a block (a *partial*). The read reduces them to one entry of its table for each block.
Scales follow from the entries. Values are cut where sources' boxes end, and computed by the sources that have them,
which get the entries.

Invariants:
- The partials of a reduction cover all elements of its blocks, each at least once. A largest magnitude is the same
  however often an element is counted.
- No reduction is larger than a unit may be.
- Each cell begins with a block, or lies within one, in every dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from tensorhub_common.layout.casts import cast_name
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import QuantizedKind, amax_kind, quantized_kind
from tensorhub_common.programs.amax_cells import AMAX_ENTRY_BYTES, AmaxReduction, UnitKind
from tensorhub_common.programs.program import Cell, SourceBox, UnitSplit
from tensorhub_common.programs.regions import Blocks
from tensorhub_planner.compiler.boxes import BoxGeometry
from tensorhub_planner.compiler.overlaps import Overlap, converts, distance, pieces_of

Number = Callable[[int], int]
"""Gives a box its number within a group."""

Choose = Callable[[list[Overlap]], list[Overlap]]
"""Chooses of many owners."""


class MissingSource(NamedTuple):
    """No source has this box, of which an amax reduction is computed."""

    start: Shape
    stop: Shape


class AmaxTableLayout(NamedTuple):
    """The entries of an atom's blocks, row by row."""

    first: Shape
    """The first block's index in each dimension."""
    strides: Shape
    nbytes: int

    @classmethod
    def of(cls, atom: BoxGeometry) -> "AmaxTableLayout":
        """Return that of all blocks that an atom has to do with."""
        first, last = _blocks(atom, atom.start, atom.stop)
        counts = [b - a for a, b in zip(first, last, strict=True)]
        strides = [AMAX_ENTRY_BYTES * prod(counts[dim + 1 :]) for dim in range(len(counts))]
        return cls(first, tuple(strides), AMAX_ENTRY_BYTES * prod(counts))

    def at(self, block: Shape) -> int:
        """Return where a block's entry stands."""
        return distance(block, self.first, self.strides)


def parts_of_blocks(atom: BoxGeometry, boxes: Sequence[BoxGeometry]) -> list[Overlap]:
    """Return what boxes have of an atom's global tensor as it was published, in the indices of that."""
    if not atom.cast:
        return []
    return [
        Overlap(number, box.start, box.stop, box, cast)
        for number, box in enumerate(boxes)
        if box.global_shape == atom.global_shape and (cast := converts(box, atom))
    ]


def has_some(atom: BoxGeometry, parts: Sequence[Overlap], start: Shape, stop: Shape) -> bool:
    """Tell whether any part is of the blocks that a box of an atom is computed of."""
    if not parts:
        return False
    first, last = quantized_kind(atom.cast).need(start, stop, atom.global_shape)
    return any(_overlaps(part, first, last) for part in parts)


class AmaxReductionBuilder:
    """Makes the folds of one atom."""

    def __init__(self, atom: BoxGeometry, parts: Sequence[Overlap], number: Number = int) -> None:
        """`parts` are what sources have of blocks; `number` numbers the boxes that cells name."""
        self._atom, self._parts, self._number = atom, parts, number
        self._kind: QuantizedKind = quantized_kind(atom.cast)
        self._block = self._kind.block(atom.global_shape)
        self._folds = 0
        self.table = AmaxTableLayout.of(atom)

    def lacking(self, start: Shape, stop: Shape) -> MissingSource | None:
        """Return the region that a box is computed of and that no source has."""
        for box in _fold_boxes(self._atom, start, stop):
            for first, last, owners in self._cut(*self._kind.need(*box, self._atom.global_shape)):
                if not owners:
                    return MissingSource(first, last)
        return None

    def cells(self, start: Shape, stop: Shape, computed: Sequence[Overlap], some: Choose) -> list[Cell]:
        """Return the cells of a box that no source has whole, and of which nothing is lacking.

        `computed` are those who have what is to be computed; `some` chooses of many.
        """
        cells: list[Cell] = []
        for first, last in _fold_boxes(self._atom, start, stop):
            cells += self._partials(first, last, some)
            cells += self._scales(first, last, computed) if self._kind.is_scales else []
            cells += () if self._kind.is_scales else self._values(first, last, computed, some)
            self._folds += 1
        return cells

    def _partials(self, start: Shape, stop: Shape, some: Choose) -> Iterator[Cell]:
        kind = amax_kind(self._kind.scheme.name)
        for first, last, owners in self._cut(*self._kind.need(start, stop, self._atom.global_shape)):
            shape = tuple(b - a for a, b in zip(first, last, strict=True))
            there = [
                SourceBox(
                    self._number(span.box),
                    distance(first, span.start, span.cutout.strides),
                    span.cutout.strides,
                    span.cutout.itemsize,
                    cast_name(span.cutout.dtype, kind.name),
                    Blocks(shape, (0,) * len(shape)),
                )
                for span in some(owners)
            ]
            counts = tuple(-(-size // step) for size, step in zip(shape, self._block, strict=True))
            at = self.table.at(tuple(a // step for a, step in zip(first, self._block, strict=True)))
            cut = UnitSplit(counts, self.table.strides, AMAX_ENTRY_BYTES, 0, counts[0], 1)
            yield Cell(at, cut, tuple(there), self._fold(UnitKind.PARTIAL, at, (1,) * len(shape)))

    def _scales(self, start: Shape, stop: Shape, computed: Sequence[Overlap]) -> list[Cell]:
        ones = (1,) * len(start)
        return [self._cell(start, stop, computed, self._fold(UnitKind.SCALES, self.table.at(start), ones))]

    def _values(self, start: Shape, stop: Shape, computed: Sequence[Overlap], some: Choose) -> Iterator[Cell]:
        for first, last, owners in self._cut(start, stop):
            at = self.table.at(tuple(a // step for a, step in zip(first, self._block, strict=True)))
            yield self._cell(first, last, [*computed, *some(owners)], self._fold(UnitKind.VALUES, at, self._block))

    def _cell(self, start: Shape, stop: Shape, owners: Sequence[Overlap], fold: AmaxReduction) -> Cell:
        atom = self._atom
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        cut = UnitSplit(shape, atom.strides, atom.itemsize, 0, shape[0], 1)
        there = tuple(
            SourceBox(
                self._number(span.box),
                distance(start, span.cutout.start, span.cutout.strides),
                span.cutout.strides,
                span.cutout.itemsize,
                span.cast,
            )
            for span in owners
        )
        return Cell(distance(start, atom.start, atom.strides), cut, there, fold)

    def _fold(self, kind: UnitKind, at: int, grain: Shape) -> AmaxReduction:
        return AmaxReduction(kind, self._folds, at, self.table.strides, grain, self._kind.scheme.name)

    def _cut(self, start: Shape, stop: Shape) -> Iterator[tuple[Shape, Shape, list[Overlap]]]:
        """Cut a box of the source wherever a part begins or ends, and where blocks do that are cut by that."""
        near = [part for part in self._parts if _overlaps(part, start, stop)]
        runs = [list(pairwise(_edges(near, start, stop, dim, step))) for dim, step in enumerate(self._block)]
        for sides in product(*runs):
            first, last = tuple(a for a, _ in sides), tuple(b for _, b in sides)
            yield first, last, [part for part in near if _holds(part, first, last)]


def _edges(parts: Sequence[Overlap], start: Shape, stop: Shape, dim: int, step: int) -> list[int]:
    begin, end = start[dim], stop[dim]
    edges = {begin, *(edge for part in parts for edge in (part.start[dim], part.stop[dim]))}
    # What begins within a block ends with it.
    edges |= {-(-edge // step) * step for edge in edges}
    return [begin, *sorted(edge for edge in edges if begin < edge < end), end]


def _overlaps(part: Overlap, start: Shape, stop: Shape) -> bool:
    return all(a < d and c < b for a, b, c, d in zip(part.start, part.stop, start, stop, strict=True))


def _holds(part: Overlap, start: Shape, stop: Shape) -> bool:
    return all(a <= c and d <= b for a, b, c, d in zip(part.start, part.stop, start, stop, strict=True))


def _fold_boxes(atom: BoxGeometry, start: Shape, stop: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box as units are cut."""
    for piece in pieces_of(atom, start, stop):
        cut, dim = piece.cut, piece.cut.dim
        for unit in range(cut.units):
            begin = piece.start[dim] + unit * cut.rows
            end = min(begin + cut.rows, piece.stop[dim])
            yield (
                (*piece.start[:dim], begin, *piece.start[dim + 1 :]),
                (*piece.stop[:dim], end, *piece.stop[dim + 1 :]),
            )


def _blocks(atom: BoxGeometry, start: Shape, stop: Shape) -> tuple[Shape, Shape]:
    """Return the first block that a box of an atom has to do with, and the one behind the last."""
    kind = quantized_kind(atom.cast)
    if kind.is_scales:
        return start, stop
    return kind.scheme.scales_of(start, stop, atom.global_shape)
