"""A transfer program: which boxes of which source layouts make up one destination layout, as data. Pure.

The planner compiles it once for a pair of layouts (or one layout and several) and keeps it by its digest; agents carry
it out. It speaks of bytes: where a cell begins, its shape, its strides. A *cell* is a box of the destination that lies
wholly in one box of each source layout that has it. A *unit* is a slice of a cell along one dimension, at most
`PIECE_BYTES_MAX` long: what a read asks for, counts and retries.

Tensors that are cut alike (all experts of all layers) share a *pattern* of cells; a *group* are those of them that also
come from the same sources. So a program is a few patterns, and for each tensor where it begins at both ends.

Units are numbered block by block: a *block* are the cells of a group that the same sources have. Blocks stand in the
order of their sources, so what one source gives is few ranges of numbers, however many tensors there are.

Memory of the destination's own layout has every unit, at the same place: it is a source of any program that fills the
layout, and no program need name it.

Where sources' edges cut through blocks of fp8 nobody has whole, a *fold* is a box of such blocks: *partials* are units
whose elements are the largest magnitudes (amax) in what one source has of each block. They go into the read's *table*
and not into the destination. Once a fold's partials are all there, its scales follow, and its values are asked for with
them (docs/adr/0013).

Always true: every element of the destination that is to be filled is in exactly one cell (proved where it is compiled),
partials aside; a program's units have the same numbers wherever they are counted: partials first, then scales that can
be folded of them, values that can be asked for by them, and all others.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.fold_cells import ENTRY_BYTES, TABLE_BYTES_MAX, Entries, Fold, Kind, is_good
from tensorhub_common.regions import Blocks, Form, Regions, Sizes

UNITS_MAX: Final = 4_000_000
"""A program has at most so many units, as a layout has pieces."""

HERE: Final = 0
"""Stands for no owner, where the forms of units are kept: an identity is never 0."""

Range = tuple[int, int]


class Cut(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class Owner(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A source's box that a cell lies in, and how it lies there."""

    box: int
    """Which of the group's boxes."""
    ahead: int
    """So many bytes behind the beginning of the box."""
    strides: Sizes
    itemsize: int
    cast: str
    blocks: Blocks | None = None
    """What the whole cell is made of, where that are whole blocks; `ahead` is where these begin."""
    step: int = 1
    """So many of the source's elements along the dimension of the cut make one of the cell's."""


class Cell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of the destination, `to` bytes behind where its tensor begins; of a partial, where its entries do."""

    to: int
    cut: Cut
    owners: tuple[Owner, ...]
    fold: Fold | None = None

    @property
    def kind(self) -> Kind:
        """What its units have to do with folds."""
        return Kind.PLAIN if self.fold is None else self.fold.kind


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tensors that are cut alike and come from the same sources. Tensor i begins at `to[i]`, its boxes at `at[i]`.

    Ranks that shard evenly have equal tensors at equal places: where all boxes of one begin at the same byte, each of
    its own layout, that is named once.
    """

    pattern: int
    sources: tuple[int, ...]
    """Of each box, the number of the source layout that it stands in."""
    to: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]
    table: int = 0
    """In the table the first tensor's entries begin here,"""
    table_bytes: int = 0
    """and each tensor has so many bytes there."""

    def begin(self, tensor: int, box: int) -> int:
        """Return where a box of a tensor begins, in its source's layout."""
        places = self.at[tensor]
        return places[0] if len(places) == 1 else places[box]


class Program(msgspec.Struct, frozen=True):
    """How a destination layout is filled from those source layouts. `compiling` in the planner makes it."""

    layout: str
    sources: tuple[str, ...]
    patterns: tuple[tuple[Cell, ...], ...]
    groups: tuple[Group, ...]


class Place(NamedTuple):
    """Where a unit goes in the destination."""

    to: int
    nbytes: int
    is_packed: bool
    """Its elements follow one another there."""


class Run(NamedTuple):
    """Units of one kind that repeat: `count` of them for each of so many tensors, the first one's from `first` on."""

    kind: Kind
    first: int
    group: int
    tensors: int
    cells: Sequence[Cell]


class _Block:
    """The cells of a group that the same sources have."""

    __slots__ = ("cells", "first_units", "group", "kind", "number", "owners", "units")

    def __init__(self, kind: Kind, number: int, group: Group, owners: tuple[int, ...], cells: Sequence[Cell]) -> None:
        self.kind, self.number, self.group, self.owners, self.cells = kind, number, group, owners, cells
        self.first_units = list(accumulate((cell.cut.units for cell in cells), initial=0))
        self.units = self.first_units[-1] * len(group.to)


_decoder: Final = msgspec.msgpack.Decoder(Program)


class Execution:
    """A program, made ready to be carried out: units by number."""

    def __init__(self, program: Program, digest: str = "") -> None:
        """Number the units. Raises `LayoutMismatch` when they are too many. `digest` is the program's name."""
        self.program, self.digest = program, digest
        self.table_bytes = max((each.table + each.table_bytes * len(each.to) for each in program.groups), default=0)
        """All entries that its partials are folded into."""
        self._blocks = _blocks(program)
        self._first = list(accumulate((block.units for block in self._blocks), initial=0))
        if self.table_bytes > TABLE_BYTES_MAX:
            blocks, possible = self.table_bytes // ENTRY_BYTES, TABLE_BYTES_MAX // ENTRY_BYTES
            raise LayoutMismatch(
                f"the holders' shards cut {blocks} blocks of what is to be quantised, and {possible} are possible: "
                "use more shards, or larger blocks"
            )
        if len(self) > UNITS_MAX:
            raise LayoutMismatch(
                f"a shard would be filled by {len(self)} units, and {UNITS_MAX} are possible: use more shards"
            )
        self._number = {layout: number for number, layout in enumerate(program.sources)}
        self.partials, self.scales, self.values = (self._behind(kind) for kind in list(Kind)[:-1])
        """Behind the last unit of each kind that has to do with folds."""
        self._forms: dict[tuple[int, int, int], Form] = {}
        self._given: list[tuple[Range, ...]] | None = None

    def __len__(self) -> int:
        """Return the number of units."""
        return self._first[-1]

    def fills(self, layout: str) -> bool:
        """Tell whether it is shards of this layout that it fills."""
        return self.program.layout == layout

    def nbytes(self) -> list[int]:
        """Return the bytes of each unit in the destination."""
        return [size for sizes, times in self.runs() for size in sizes * times]

    def runs(self) -> Iterator[tuple[list[int], int]]:
        """Yield the bytes of the units as they repeat: the units of one tensor, and how many tensors have such."""
        for block in self._blocks:
            sizes: list[int] = []
            for cell in block.cells:
                cut = cell.cut
                # All units of a cell but the last one are alike.
                sizes += [prod(cut.sizes(0)) * cut.itemsize] * (cut.units - 1)
                sizes.append(prod(cut.sizes(cut.units - 1)) * cut.itemsize)
            yield sizes, len(block.group.to)

    def given_by(self, layout: str) -> tuple[Range, ...]:
        """Return the units that a source of this layout has, in order; none where the program knows no such layout."""
        if layout == self.program.layout:
            first = self._behind(Kind.PARTIAL)
            return ((first, len(self) - first),) if len(self) > first else ()
        if self._given is None:
            self._given = self._given_by_all()
        number = self._number.get(layout)
        return () if number is None else self._given[number]

    def _given_by_all(self) -> list[tuple[Range, ...]]:
        """Return the units of each source, found in one pass. Neighbouring ranges are joined."""
        given: list[list[Range]] = [[] for _ in self.program.sources]
        for first, block in zip(self._first, self._blocks, strict=False):
            for number in dict.fromkeys(block.owners) if block.units else ():
                ranges = given[number]
                begin, count = ranges[-1] if ranges else (-1, 0)
                if begin + count == first and ranges:
                    ranges[-1] = (begin, count + block.units)
                else:
                    ranges.append((first, block.units))
        return [tuple(ranges) for ranges in given]

    def _behind(self, kind: Kind) -> int:
        return self._first[sum(block.kind <= kind for block in self._blocks)]

    def by_amax(self, layout: str) -> tuple[Range, ...]:
        """Return the values that a source of this layout can compute only once their fold's amax is known."""
        number = self._number.get(layout)
        return tuple(
            (first, block.units)
            for first, block in zip(self._first, self._blocks, strict=False)
            if block.kind is Kind.VALUES and block.units and _is_cast(block, number)
        )

    def fold_runs(self) -> Iterator[Run]:
        """Yield the units that have to do with folds. In each block they are as many for each tensor."""
        for first, block in zip(self._first, self._blocks, strict=False):
            if block.kind is not Kind.PLAIN and block.units:
                yield Run(block.kind, first, block.number, len(block.group.to), block.cells)

    def entries(self, ranges: Iterable[Range]) -> Iterator[Entries]:
        """Yield where in the table the entries of these units stand, all of which have to do with folds."""
        for group, tensor, cell, _ in self._units(ranges):
            fold, cut = cell.fold, cell.cut
            assert fold is not None
            begin = group.table + tensor * group.table_bytes
            to = (begin if fold.kind is Kind.PARTIAL else group.to[tensor]) + cell.to
            counts = tuple(-(-size // step) for size, step in zip(cut.shape, fold.grain, strict=True))
            form = self._form(cut, cell.owners[0] if cell.owners else _NOBODY, 0)
            yield Entries(begin + fold.at, fold.strides, counts, to, form, fold.scheme)

    def regions(self, layout: str, ranges: Iterable[Range]) -> Regions:
        """Return these units as a source of this layout gives them. Raises `KeyError` for one that it has not.

        Partials go into the table. Of values that have to be computed by their amax, `Regions.amax` is not known here.
        """
        if layout == self.program.layout:
            return self._regions_here(ranges)
        source = self._number[layout]
        to: list[int] = []
        origin: list[int] = []
        form: list[Form] = []
        for group, tensor, cell, unit in self._units(ranges):
            owner = next((each for each in cell.owners if group.sources[each.box] == source), None)
            if owner is None:
                raise KeyError(f"layout {layout[:12]} does not have all of these units")
            cut = cell.cut
            ahead = unit * cut.rows
            begin = group.table + tensor * group.table_bytes if cell.kind is Kind.PARTIAL else group.to[tensor]
            to.append(begin + cell.to + (ahead * cut.to_strides[cut.dim] if ahead else 0))
            there = group.begin(tensor, owner.box) + owner.ahead
            origin.append(there + (ahead * owner.step * owner.strides[cut.dim] if ahead else 0))
            form.append(self._form(cut, owner, unit))
        return Regions(to, origin, form)

    def _regions_here(self, ranges: Iterable[Range]) -> Regions:
        """Return these units as they stand in memory of the destination's layout: where they belong."""
        to: list[int] = []
        form: list[Form] = []
        for group, tensor, cell, unit in self._units(ranges):
            cut = cell.cut
            to.append(group.to[tensor] + cell.to + (unit * cut.rows * cut.to_strides[cut.dim] if unit else 0))
            form.append(self._form_here(cut, unit))
        return Regions(to, to, form)

    def places(self, ranges: Iterable[Range]) -> Iterator[Place]:
        """Yield where these units go, whoever gives them. Partials go nowhere."""
        for group, tensor, cell, unit in self._units(ranges):
            cut = cell.cut
            form = self._form(cut, cell.owners[0] if cell.owners else _NOBODY, unit)
            to = group.to[tensor] + cell.to + (unit * cut.rows * cut.to_strides[cut.dim] if unit else 0)
            yield Place(to, form.nbytes, form.is_packed_here)

    def _units(self, ranges: Iterable[Range]) -> Iterator[tuple[Group, int, Cell, int]]:
        """Yield (group, number of the tensor in it, cell, number of the unit in that) of each unit."""
        for first, count in ranges:
            number = bisect_right(self._first, first) - 1
            for unit in range(first, first + count):
                while unit >= self._first[number + 1]:
                    number += 1
                block = self._blocks[number]
                tensor, place = divmod(unit - self._first[number], block.first_units[-1])
                cell = bisect_right(block.first_units, place) - 1
                yield block.group, tensor, block.cells[cell], place - block.first_units[cell]

    def _form(self, cut: Cut, owner: Owner, unit: int) -> Form:
        # All units of a cell but the last one are alike.
        key = (id(cut), id(owner), unit if unit == cut.units - 1 else 0)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form(
                shape=cut.sizes(unit),
                to_strides=cut.to_strides,
                origin_strides=owner.strides,
                itemsize=owner.itemsize,
                to_itemsize=cut.itemsize,
                cast=owner.cast,
                blocks=None if owner.blocks is None else _blocks_of(cut, owner.blocks, owner.step, unit),
            )
        return form

    def _form_here(self, cut: Cut, unit: int) -> Form:
        key = (id(cut), HERE, unit if unit == cut.units - 1 else 0)
        form = self._forms.get(key)
        if form is None:
            strides, itemsize = cut.to_strides, cut.itemsize
            form = self._forms[key] = Form(cut.sizes(unit), strides, strides, itemsize, itemsize)
        return form


def _blocks_of(cut: Cut, blocks: Blocks, step: int, unit: int) -> Blocks:
    """Return what a unit is made of. Where a cell has several each begins with a block."""
    if cut.units == 1:
        return blocks
    length = min(cut.rows * step, blocks.shape[cut.dim] - unit * cut.rows * step)
    return Blocks((*blocks.shape[: cut.dim], length, *blocks.shape[cut.dim + 1 :]), blocks.skip)


_NOBODY: Final = Owner(0, 0, (), 0, "")
"""Of a cell that is folded here, and that no source has."""


def _is_cast(block: _Block, source: int | None) -> bool:
    """Tell whether the first of its cells' owners which stands in that source casts; in all of them it is the same."""
    cell, sources = block.cells[0], block.group.sources
    return next((bool(each.cast) for each in cell.owners if sources[each.box] == source), False)


def _blocks(program: Program) -> list[_Block]:
    """Divide each group's cells by what they are and who has them, and put what the same source has side by side."""
    found: list[tuple[Kind, tuple[int, ...], int, list[Cell]]] = []
    for number, group in enumerate(program.groups):
        sources, cells = group.sources, program.patterns[group.pattern]
        if len(sources) == 1 and all(cell.fold is None for cell in cells):
            found.append((Kind.PLAIN, sources, number, list(cells)))
            continue
        alike: dict[tuple[Kind, tuple[int, ...]], list[Cell]] = {}
        for cell in cells:
            owners = tuple([sources[owner.box] for owner in cell.owners])
            alike.setdefault((cell.kind, owners), []).append(cell)
        found += [(kind, owners, number, owned) for (kind, owners), owned in alike.items()]
    found.sort(key=lambda each: each[:3])
    return [_Block(kind, number, program.groups[number], owners, cells) for kind, owners, number, cells in found]


def encoded(program: Program) -> bytes:
    """Return a program as it is kept in the blob store, whose name for it is its digest."""
    return msgspec.msgpack.encode(program)


def decoded(data: bytes) -> Program:
    """Read a program. Raises `LayoutMismatch` for what is none, or one that names what it does not have."""
    try:
        program: Program = _decoder.decode(data)
    except msgspec.MsgspecError as why:
        raise LayoutMismatch(f"what stands in the blob store as a transfer program is none: {why}") from None
    if not all(_is_whole(group, program) for group in program.groups):
        raise LayoutMismatch("what stands in the blob store as a transfer program names what it does not have")
    return program


def _is_whole(group: Group, program: Program) -> bool:
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
    return all(_is_cut(cell, boxes, group.table_bytes) for cell in program.patterns[group.pattern])


def _is_cut(cell: Cell, boxes: int, table_bytes: int) -> bool:
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
    return is_good(cell.fold, cut.shape, cut.units, len(cell.owners), table_bytes)


def _is_box(owner: Owner, rank: int, boxes: int) -> bool:
    if not 0 <= owner.box < boxes or len(owner.strides) != rank:
        return False
    if min((owner.itemsize, owner.step)) < 1 or min((*owner.strides, owner.ahead)) < 0:
        return False
    blocks = owner.blocks
    return blocks is None or len(blocks.shape) == len(blocks.skip) == rank
