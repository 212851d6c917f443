"""A transfer program: which boxes of which source layouts make up one destination layout, as data. Pure.

The planner compiles it once for a pair of layouts (or one layout and several) and keeps it by its digest; agents carry
it out. It speaks of bytes: where a cell begins, its shape, its strides. A *cell* is a box of the destination that lies
wholly in one box of each source layout that has it. A *unit* is a slice of a cell along one dimension, at most
`PIECE_BYTES_MAX` long: what a read asks for, counts and retries.

Tensors that are cut alike (all experts of all layers) share a *pattern* of cells; a *group* are those of them that also
come from the same sources. So a program is a few patterns, and for each tensor where it begins at both ends.

Units are numbered block by block (`execution`): a *block* are the cells of a group that the same sources have. Blocks
are in the order of their sources, so what one source gives is few ranges of numbers, for any number of tensors.

Memory of the destination's own layout has every unit, at the same place: it is a source of any program that fills the
layout, and no program need name it.

Where sources' edges cut through blocks of fp8 that no source has whole, a *fold* is a box of such blocks: *partials*
are units whose elements are the largest magnitudes (amax) in what one source has of each block. They go into the read's
*table* and not into the destination. Once a fold's partials are all there, its scales follow, and its values are asked
for with them (docs/design/adr/0013).

Always true: every element of the destination that is to be filled is in exactly one cell (proved where it is compiled),
partials aside.
"""

from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs.amax_cells import AmaxReduction, UnitKind, is_valid_reduction
from tensorhub_common.programs.regions import Blocks, Sizes
from tensorhub_common.protocol.decoding import MALFORMED

Range = tuple[int, int]


class UnitSplit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How cells of one shape are cut into units: `rows` at a time along `dim`."""

    shape: Sizes
    to_strides: Sizes
    itemsize: int
    dim: int
    rows: int
    units: int

    def sizes(self, unit: int) -> Sizes:
        """Return the shape of one of its units."""
        if self.units == 1:
            return self.shape
        left = self.shape[self.dim] - unit * self.rows
        return (*self.shape[: self.dim], min(self.rows, left), *self.shape[self.dim + 1 :])


class SourceBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A source's box that a cell lies in, and how it lies there."""

    box: int
    """Which of the group's boxes."""
    ahead: int
    """The bytes from the beginning of the box."""
    strides: Sizes
    itemsize: int
    cast: str
    blocks: Blocks | None = None
    """What the whole cell is made of, where that are whole blocks; `ahead` is where these begin."""
    step: int = 1
    """The number of the source's elements along the dimension of the cut that make one of the cell's."""


class Cell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of the destination, `to` bytes behind where its tensor begins; of a partial, where its entries do."""

    to: int
    cut: UnitSplit
    owners: tuple[SourceBox, ...]
    fold: AmaxReduction | None = None

    @property
    def kind(self) -> UnitKind:
        """What its units have to do with folds."""
        return UnitKind.PLAIN if self.fold is None else self.fold.kind


class TensorGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tensors that are cut alike and come from the same sources. Tensor i begins at `to[i]`, its boxes at `at[i]`.

    Ranks that shard evenly have equal tensors at equal places: where all boxes of one begin at the same byte, each of
    its own layout, that is named once.
    """

    pattern: int
    sources: tuple[int, ...]
    """Of each box, the number of its source layout."""
    to: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]
    table: int = 0
    """In the table the first tensor's entries begin here,"""
    table_bytes: int = 0
    """and each tensor has this many bytes of it."""

    def begin(self, tensor: int, box: int) -> int:
        """Return where a box of a tensor begins, in its source's layout."""
        places = self.at[tensor]
        return places[0] if len(places) == 1 else places[box]


UNREAD_MAX: Final = 8
"""A program names at most this many of the tensors that it leaves out."""


class TransferProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a destination layout is filled from those source layouts. `compiling` in the planner makes it."""

    layout: str
    sources: tuple[str, ...]
    patterns: tuple[tuple[Cell, ...], ...]
    groups: tuple[TensorGroup, ...]
    unread: tuple[str, ...] = ()
    """Global tensors of the sources of which the destination has nothing: the first ones."""
    unread_count: int = 0
    """How many they are."""


_decoder: Final = msgspec.msgpack.Decoder(TransferProgram)


def encoded(program: TransferProgram) -> bytes:
    """Return a program as it is kept in the blob store, whose name for it is its digest."""
    return msgspec.msgpack.encode(program)


def decoded(data: bytes) -> TransferProgram:
    """Read a program. Raises `LayoutMismatch` for what is none, or one that names what it does not have."""
    try:
        program: TransferProgram = _decoder.decode(data)
    except MALFORMED as why:
        raise LayoutMismatch(f"the blob that should be a transfer program is none: {why}") from None
    if not all(_is_whole(group, program) for group in program.groups):
        raise LayoutMismatch("the blob that should be a transfer program names what it does not have")
    return program


def _is_whole(group: TensorGroup, program: TransferProgram) -> bool:
    """Tell whether all that a group names is there. Whether boxes fit into memory is asked by who carries them out."""
    boxes = len(group.sources)
    if not 0 <= group.pattern < len(program.patterns) or len(group.to) != len(group.at):
        return False
    if any(not 0 <= source < len(program.sources) for source in group.sources):
        return False
    if any(len(row) not in (1, boxes) or min(row, default=0) < 0 for row in group.at) or min(group.to, default=0) < 0:
        return False
    if min(group.table, group.table_bytes) < 0:
        return False
    cells = program.patterns[group.pattern]
    return all(_is_cut(cell, boxes, group.table_bytes, len(cells)) for cell in cells)


def _is_cut(cell: Cell, boxes: int, table_bytes: int, folds_max: int) -> bool:
    cut, rank = cell.cut, len(cell.cut.shape)
    if len(cut.to_strides) != rank or not 0 <= cut.dim < max(rank, 1):
        return False
    if min((*cut.shape, cut.rows, cut.units, cut.itemsize)) < 1 or min((*cut.to_strides, cell.to)) < 0:
        return False
    if cut.units != (-(-cut.shape[cut.dim] // cut.rows) if rank else 1):
        return False
    if not all(_is_box(owner, rank, boxes) for owner in cell.owners):
        return False
    if cell.fold is None:
        return bool(cell.owners)
    # A reader keeps state for each number: there are at most as many as cells.
    return cell.fold.number < folds_max and is_valid_reduction(
        cell.fold, cut.shape, cut.units, len(cell.owners), table_bytes
    )


def _is_box(owner: SourceBox, rank: int, boxes: int) -> bool:
    if not 0 <= owner.box < boxes or len(owner.strides) != rank:
        return False
    if min((owner.itemsize, owner.step)) < 1 or min((*owner.strides, owner.ahead)) < 0:
        return False
    blocks = owner.blocks
    return blocks is None or len(blocks.shape) == len(blocks.skip) == rank
