"""The overlap of one box with another in a transfer program: unchanged, cast, or computed of whole blocks. Pure.

An *overlap* is the part of an atom that a source's box gives, in the atom's own indices; those of scales count blocks.
Cells are cut along the edges of overlaps, so a cell lies wholly in the overlap of each of its owners.

Invariants:
- A cell that is computed of blocks and has several units begins with a block, and so does each unit.
- All elements that a unit is computed of are in the owner's box.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from tensorhub_common.layout.casts import CASTABLE, FP8_SOURCES, cast_name
from tensorhub_common.layout.layout import PIECE_BYTES_MAX
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import quantized_kind
from tensorhub_common.programs.program import SourceBox, UnitSplit
from tensorhub_common.programs.regions import Blocks
from tensorhub_planner.compiler.boxes import BoxGeometry


class Overlap(NamedTuple):
    """Elements `start` to `stop` of an atom's tensor, which a box gives; not empty."""

    box: int
    """The box's number."""
    start: Shape
    stop: Shape
    cutout: BoxGeometry
    cast: str


def converts(box: BoxGeometry, atom: BoxGeometry) -> str | None:
    """Return how a box's elements become the atom's: "" as they are, the name of a cast, or None: not at all.

    Only what was published is cast. Casting what was cast before may round twice, and then two readers of one layout
    would differ by which source they had.
    """
    if box.dtype == atom.dtype and box.cast == atom.cast:
        return ""
    if not box.is_original or box.cast:
        return None
    if atom.cast:
        return cast_name(box.dtype, atom.cast) if box.dtype in FP8_SOURCES else None
    return cast_name(box.dtype, atom.dtype) if box.dtype in CASTABLE and atom.dtype in CASTABLE else None


def overlap_of(number: int, box: BoxGeometry, atom: BoxGeometry) -> Overlap | None:
    """Return what a box gives of an atom, or None where it has nothing for it."""
    if box.global_shape != atom.global_shape:
        return None
    cast = converts(box, atom)
    if cast is None:
        return None
    start, stop = box.start, box.stop
    if atom.cast and cast:
        start, stop = quantized_kind(atom.cast).given(start, stop, atom.global_shape)
    # A box within one block gives no block, wherever in the atom that may be. Of hundreds of ranks most have nothing.
    for a, b, c, d in zip(start, stop, atom.start, atom.stop, strict=True):
        if a >= b or a >= d or b <= c:
            return None
    return Overlap(number, start, stop, box, cast)


class CellBox(NamedTuple):
    """A box that is a cell: where it begins and ends, and how it is cut into units."""

    start: Shape
    stop: Shape
    cut: UnitSplit


def pieces_of(atom: BoxGeometry, start: Shape, stop: Shape) -> Iterator[CellBox]:
    """Return a box as one cell, or as several where a unit can't reach across its first dimensions."""
    grain, weight = _grain(atom)
    # Counted in blocks, the first and last of which may be cut: a plain element is a block of its own.
    counts = tuple(-(-b // step) - a // step for a, b, step in zip(start, stop, grain, strict=True))
    dim = _cut_dim(counts, weight)
    if not counts:
        yield CellBox(start, stop, UnitSplit((), atom.strides, atom.itemsize, 0, 1, 1))
        return
    each = max(1, PIECE_BYTES_MAX // (prod(counts[dim + 1 :]) * weight)) * grain[dim]
    ahead = product(*(_slices(start[d], stop[d], grain[d]) for d in range(dim)))
    along = _runs(start[dim], stop[dim], grain[dim], each)
    cuts: dict[Shape, UnitSplit] = {}
    for outer, (begin, end) in product(ahead, along):
        first = (*(a for a, _ in outer), begin, *start[dim + 1 :])
        last = (*(b for _, b in outer), end, *stop[dim + 1 :])
        shape = tuple(b - a for a, b in zip(first, last, strict=True))
        cut = cuts.get(shape)
        if cut is None:
            rows = min(shape[dim], each)
            cut = cuts[shape] = UnitSplit(shape, atom.strides, atom.itemsize, dim, rows, -(-shape[dim] // rows))
        yield CellBox(first, last, cut)


def owner_of(span: Overlap, place: int, atom: BoxGeometry, piece: CellBox) -> SourceBox:
    """Return how a cell lies in one of the boxes that give it, which is number `place` of its group."""
    box = span.cutout
    if not (atom.cast and span.cast):
        ahead = distance(piece.start, box.start, box.strides)
        return SourceBox(place, ahead, box.strides, box.itemsize, span.cast)
    kind = quantized_kind(atom.cast)
    first, last = kind.need(piece.start, piece.stop, atom.global_shape)
    skip = (0,) * len(first) if kind.is_scales else tuple(a - b for a, b in zip(piece.start, first, strict=True))
    blocks = Blocks(tuple(b - a for a, b in zip(first, last, strict=True)), skip)
    step = kind.steps(atom.global_shape)[piece.cut.dim]
    return SourceBox(place, distance(first, box.start, box.strides), box.strides, box.itemsize, span.cast, blocks, step)


def distance(index: Shape, start: Shape, strides: Shape) -> int:
    """Return how many bytes lie between two elements."""
    return sum((a - b) * stride for a, b, stride in zip(index, start, strides, strict=True))


def _grain(atom: BoxGeometry) -> tuple[Shape, int]:
    """Return what must not be cut through, in elements, and what it weighs in a unit, in bytes.

    A scale weighs as much as the values of its block: they are made of as many bytes.
    """
    if not atom.cast:
        return (1,) * len(atom.global_shape), atom.itemsize
    kind = quantized_kind(atom.cast)
    return kind.grain(atom.global_shape), max(atom.itemsize, prod(kind.block(atom.global_shape)))


def _cut_dim(counts: Shape, weight: int) -> int:
    """Return the first dimension of which one slice fits into a unit; a box of no dimension has none to cut."""
    below = prod(counts) * weight
    for dim, count in enumerate(counts):
        below //= count
        if below <= PIECE_BYTES_MAX:
            return dim
    return 0


def _slices(start: int, stop: int, grain: int) -> list[tuple[int, int]]:
    """Cut a dimension wherever a block begins."""
    edges = [start, *range((start // grain + 1) * grain, stop, grain), stop]
    return list(pairwise(edges))


def _runs(start: int, stop: int, grain: int, each: int) -> list[tuple[int, int]]:
    """Cut a dimension once, where its first whole block begins, unless all of it is one unit."""
    first_whole = -(-start // grain) * grain
    if start == first_whole or stop - (first_whole - grain) <= each:
        return [(start, stop)]
    return [(start, first_whole), (first_whole, stop)]
