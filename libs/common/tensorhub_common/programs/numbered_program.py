"""A transfer program, made ready to be carried out: its units by number. Pure.

Always true: units have the same numbers wherever they are counted, block by block: partials first, then scales that can
be folded of them, values that can be asked for by them, and all others; within a kind in the order of the sources.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import prod
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs.amax_cells import AMAX_ENTRY_BYTES, TABLE_BYTES_MAX, AmaxEntries, UnitKind
from tensorhub_common.programs.program import Cell, Range, SourceBox, TensorGroup, TransferProgram, UnitSplit
from tensorhub_common.programs.regions import Blocks, StridedCopies, StridedForm

UNITS_MAX: Final = 4_000_000
"""Limit of a program's units, as of a layout's pieces."""

HERE: Final = 0
"""Means no owner, where the forms of units are kept: an identity is never 0."""

PATTERNS_MAX: Final = 100_000
"""Limit of patterns whose results are kept; beyond it all are dropped, and computed again when needed."""


class UnitTarget(NamedTuple):
    """Where a unit goes in the destination."""

    to: int
    nbytes: int
    is_packed: bool
    """Its elements follow one another there."""


class UnitRun(NamedTuple):
    """Units of one kind that repeat: `count` of them for each of `tensors` tensors, the first one's from `first` on."""

    kind: UnitKind
    first: int
    group: int
    tensors: int
    cells: Sequence[Cell]


class _Alike(NamedTuple):
    """Cells of a pattern that the same boxes have, and what follows of them for each of its tensors."""

    kind: UnitKind
    boxes: tuple[int, ...]
    cells: Sequence[Cell]
    units: Sequence[int]
    """The units before each cell, and behind the last one."""
    ends: Sequence[int]
    """The bytes before each unit, and of all."""


class PatternCache:
    """What follows of patterns alone. The programs of one index share patterns, and so one of these."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[tuple[int, bool], tuple[Sequence[Cell], Sequence[_Alike]]] = {}
        """With the pattern itself, so that no other one comes to have its identity."""

    def alike(self, cells: Sequence[Cell], boxes: int) -> Sequence[_Alike]:
        """Divide a pattern's cells, which lie in `boxes` boxes, by what they are and which sources have them."""
        key = (id(cells), boxes == 1)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= PATTERNS_MAX:
                self._known.clear()
            known = self._known[key] = (cells, _divided(cells, range(boxes)))
        return known[1]


def _divided(cells: Sequence[Cell], names: Sequence[int]) -> list[_Alike]:
    """Put together the cells of the same kind that lie in boxes of the same names."""
    if len(names) == 1 and all(cell.fold is None for cell in cells):
        return [_alike(UnitKind.PLAIN, (names[0],), cells)]
    found: dict[tuple[UnitKind, tuple[int, ...]], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.kind, tuple([names[owner.box] for owner in cell.owners])), []).append(cell)
    return [_alike(kind, boxes, some) for (kind, boxes), some in found.items()]


def _alike(kind: UnitKind, boxes: tuple[int, ...], cells: Sequence[Cell]) -> _Alike:
    # All units of a cell but the last one are alike.
    sizes = [
        [prod(cut.sizes(0)) * cut.itemsize] * (cut.units - 1) + [prod(cut.sizes(cut.units - 1)) * cut.itemsize]
        for cut in (cell.cut for cell in cells)
    ]
    units = list(accumulate(map(len, sizes), initial=0))
    return _Alike(kind, boxes, cells, units, list(accumulate(chain.from_iterable(sizes), initial=0)))


class _Block(msgspec.Struct, frozen=True, order=True, gc=False):
    """The cells of a group that the same sources have. Blocks are in the order of these fields."""

    kind: UnitKind
    owners: tuple[int, ...]
    """The sources, by number."""
    number: int
    """The number of the group."""
    alike: _Alike
    units: int
    """Of all tensors of the group."""


class NumberedProgram:
    """A program, made ready to be carried out: units by number."""

    def __init__(self, program: TransferProgram, digest: str = "", patterns: PatternCache | None = None) -> None:
        """Number the units. Raises `LayoutMismatch` when they are too many. `digest` is the program's name.

        `patterns` is what programs know already which have patterns in common with this one.
        """
        self.program, self.digest = program, digest
        self.table_bytes = max([each.table + each.table_bytes * len(each.to) for each in program.groups], default=0)
        """All entries that its partials are folded into."""
        self._blocks = _blocks(program, PatternCache() if patterns is None else patterns)
        self._first = list(accumulate([block.units for block in self._blocks], initial=0))
        if self.table_bytes > TABLE_BYTES_MAX:
            blocks, possible = self.table_bytes // AMAX_ENTRY_BYTES, TABLE_BYTES_MAX // AMAX_ENTRY_BYTES
            raise LayoutMismatch(
                f"the holders' shards cut {blocks} blocks of what is to be quantised, and {possible} are possible: "
                "use more shards, or larger blocks"
            )
        if len(self) > UNITS_MAX:
            raise LayoutMismatch(
                f"a shard would be filled by {len(self)} units, and {UNITS_MAX} are possible: use more shards"
            )
        self._number = {layout: number for number, layout in enumerate(program.sources)}
        self.partials, self.scales, self.values = (self._behind(kind) for kind in list(UnitKind)[:-1])
        """Behind the last unit of each kind that has to do with folds."""
        self._forms: dict[tuple[int, int, int], StridedForm] = {}
        self._given: list[tuple[Range, ...]] | None = None

    def __len__(self) -> int:
        """Return the number of units."""
        return self._first[-1]

    def fills(self, layout: str) -> bool:
        """Tell whether it is shards of this layout that it fills."""
        return self.program.layout == layout

    def nbytes(self) -> list[int]:
        """Return the bytes of each unit in the destination."""
        return [size for ends, times in self.runs() for size in [b - a for a, b in pairwise(ends)] * times]

    def runs(self) -> list[tuple[Sequence[int], int]]:
        """Return the units as they repeat: the bytes before each unit of a tensor, and in how many tensors."""
        tensors = [len(group.to) for group in self.program.groups]
        return [(block.alike.ends, tensors[block.number]) for block in self._blocks]

    def given_by(self, layout: str) -> tuple[Range, ...]:
        """Return the units that a source of this layout has, in order; none where the program knows no such layout."""
        if layout == self.program.layout:
            first = self._behind(UnitKind.PARTIAL)
            return ((first, len(self) - first),) if len(self) > first else ()
        if self._given is None:
            self._given = self._given_by_all()
        number = self._number.get(layout)
        return () if number is None else self._given[number]

    def given(self) -> Iterator[tuple[str, tuple[Range, ...]]]:
        """Yield each layout that has units, and which: the sources in their order, then memory of its own layout."""
        if self._given is None:
            self._given = self._given_by_all()
        own = self.program.layout
        for layout, units in zip(self.program.sources, self._given, strict=True):
            yield layout, self.given_by(own) if layout == own else units
        if own not in self._number:
            yield own, self.given_by(own)

    def _given_by_all(self) -> list[tuple[Range, ...]]:
        """Return the units of each source, found in one pass. Neighbouring ranges are joined."""
        given: list[tuple[Range, ...]] = [()] * len(self.program.sources)
        # Blocks of the same sources are side by side, and most blocks have the same sources as others.
        firsts = [number for number, (a, b) in enumerate(pairwise(self._blocks), 1) if a.owners != b.owners]
        for begin, end in pairwise((0, *firsts, len(self._blocks))):
            first, units = self._first[begin], self._first[end] - self._first[begin]
            for number in {*self._blocks[begin].owners} if units else ():
                before = given[number]
                if before and sum(before[-1]) == first:
                    given[number] = (*before[:-1], (before[-1][0], before[-1][1] + units))
                else:
                    given[number] = (*before, (first, units))
        return given

    def _behind(self, kind: UnitKind) -> int:
        if not self._blocks or self._blocks[0].kind > kind:
            return 0
        return self._first[bisect_right(self._blocks, kind, key=attrgetter("kind"))]

    def by_amax(self, layout: str) -> tuple[Range, ...]:
        """Return the values that a source of this layout can compute only once their fold's amax is known."""
        source = self._number.get(layout)
        return tuple(
            (first, block.units)
            for first, block in zip(self._first, self._blocks, strict=False)
            if block.kind is UnitKind.VALUES and block.units and self._is_cast(block, source)
        )

    def _is_cast(self, block: _Block, source: int | None) -> bool:
        """Tell whether the first of its cells' owners in that source casts, as in all of them."""
        owner = _owner(block.alike.cells[0], self.program.groups[block.number], source)
        return owner is not None and bool(owner.cast)

    def fold_runs(self) -> Iterator[UnitRun]:
        """Yield the units that have to do with folds. In each block they are as many for each tensor."""
        for first, block in zip(self._first, self._blocks, strict=False):
            if block.kind is not UnitKind.PLAIN and block.units:
                tensors = len(self.program.groups[block.number].to)
                yield UnitRun(block.kind, first, block.number, tensors, block.alike.cells)

    def entries(self, ranges: Iterable[Range]) -> Iterator[AmaxEntries]:
        """Yield where in the table the entries of these units are, all of which have to do with folds."""
        for group, tensor, cell, unit in self._units(ranges):
            fold, cut = cell.fold, cell.cut
            assert fold is not None
            begin = group.table + tensor * group.table_bytes
            to = (begin if fold.kind is UnitKind.PARTIAL else group.to[tensor]) + cell.to
            counts = tuple(-(-size // step) for size, step in zip(cut.shape, fold.grain, strict=True))
            yield AmaxEntries(begin + fold.at, fold.strides, counts, to, self._form_here(cut, unit), fold.scheme)

    def regions(self, layout: str, ranges: Iterable[Range]) -> StridedCopies:
        """Return these units as a source of this layout gives them. Raises `KeyError` for one that it has not.

        Partials go into the table. Of values that have to be computed by their amax, `StridedCopies.amax` is not known
        here.
        """
        if layout == self.program.layout:
            return self._regions_here(ranges)
        source = self._number[layout]
        to: list[int] = []
        origin: list[int] = []
        form: list[StridedForm] = []
        for group, tensor, cell, unit in self._units(ranges):
            owner = _owner(cell, group, source)
            if owner is None:
                raise KeyError(f"layout {layout[:12]} does not have all of these units")
            cut = cell.cut
            ahead = unit * cut.rows
            begin = group.table + tensor * group.table_bytes if cell.kind is UnitKind.PARTIAL else group.to[tensor]
            to.append(begin + cell.to + (ahead * cut.to_strides[cut.dim] if ahead else 0))
            there = group.begin(tensor, owner.box) + owner.ahead
            origin.append(there + (ahead * owner.step * owner.strides[cut.dim] if ahead else 0))
            form.append(self._form(cut, owner, unit))
        return StridedCopies(to, origin, form)

    def _regions_here(self, ranges: Iterable[Range]) -> StridedCopies:
        """Return these units as they are in memory of the destination's layout: where they belong."""
        to: list[int] = []
        form: list[StridedForm] = []
        for group, tensor, cell, unit in self._units(ranges):
            cut = cell.cut
            to.append(group.to[tensor] + cell.to + (unit * cut.rows * cut.to_strides[cut.dim] if unit else 0))
            form.append(self._form_here(cut, unit))
        return StridedCopies(to, to, form)

    def places(self, ranges: Iterable[Range]) -> Iterator[UnitTarget]:
        """Yield where these units go, from any source. Partials go nowhere."""
        for group, tensor, cell, unit in self._units(ranges):
            cut = cell.cut
            form = self._form_here(cut, unit)
            to = group.to[tensor] + cell.to + (unit * cut.rows * cut.to_strides[cut.dim] if unit else 0)
            yield UnitTarget(to, form.nbytes, form.is_packed_here)

    def _units(self, ranges: Iterable[Range]) -> Iterator[tuple[TensorGroup, int, Cell, int]]:
        """Yield (group, number of the tensor in it, cell, number of the unit in that) of each unit."""
        for first, count in ranges:
            number = bisect_right(self._first, first) - 1
            for unit in range(first, first + count):
                while unit >= self._first[number + 1]:
                    number += 1
                block = self._blocks[number]
                group, cells, units = self.program.groups[block.number], block.alike.cells, block.alike.units
                tensor, place = divmod(unit - self._first[number], units[-1])
                cell = bisect_right(units, place) - 1
                yield group, tensor, cells[cell], place - units[cell]

    def _form(self, cut: UnitSplit, owner: SourceBox, unit: int) -> StridedForm:
        # All units of a cell but the last one are alike.
        key = (id(cut), id(owner), unit if unit == cut.units - 1 else 0)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = StridedForm(
                shape=cut.sizes(unit),
                to_strides=cut.to_strides,
                origin_strides=owner.strides,
                itemsize=owner.itemsize,
                to_itemsize=cut.itemsize,
                cast=owner.cast,
                blocks=None if owner.blocks is None else _blocks_of(cut, owner.blocks, owner.step, unit),
            )
        return form

    def _form_here(self, cut: UnitSplit, unit: int) -> StridedForm:
        key = (id(cut), HERE, unit if unit == cut.units - 1 else 0)
        form = self._forms.get(key)
        if form is None:
            strides, itemsize = cut.to_strides, cut.itemsize
            form = self._forms[key] = StridedForm(cut.sizes(unit), strides, strides, itemsize, itemsize)
        return form


def _owner(cell: Cell, group: TensorGroup, source: int | None) -> SourceBox | None:
    """Return the first of a cell's owners that is a box of that source."""
    return next((each for each in cell.owners if group.sources[each.box] == source), None)


def _blocks_of(cut: UnitSplit, blocks: Blocks, step: int, unit: int) -> Blocks:
    """Return what a unit is made of. Where a cell has several each begins with a block."""
    if cut.units == 1:
        return blocks
    length = min(cut.rows * step, blocks.shape[cut.dim] - unit * cut.rows * step)
    return Blocks((*blocks.shape[: cut.dim], length, *blocks.shape[cut.dim + 1 :]), blocks.skip)


def _blocks(program: TransferProgram, patterns: PatternCache) -> list[_Block]:
    """Divide each group's cells by what they are and who has them, and put what the same source has side by side."""
    found: list[_Block] = []
    for number, group in enumerate(program.groups):
        sources, cells, tensors = group.sources, program.patterns[group.pattern], len(group.to)
        if len(set(sources)) == len(sources):
            found += [
                _Block(each.kind, tuple([sources[box] for box in each.boxes]), number, each, each.units[-1] * tensors)
                for each in patterns.alike(cells, len(sources))
            ]
        else:
            # Several boxes are in one source: a source with one of them has the others too.
            found += [
                _Block(each.kind, each.boxes, number, each, each.units[-1] * tensors)
                for each in _divided(cells, sources)
            ]
    # No two blocks of a group have the same kind and owners, so nothing behind the number is compared.
    found.sort()
    return found
