"""An index of several source layouts by tensor, and the grouping of a reader's atoms by it. Pure.

`TensorIndex` joins the atoms of all sources by tensor. Thousands of ranks have most of their tensors in the same order
and differ only in the experts between them. The index therefore compares atoms by column: the first atom of all ranks,
then the second, and so on. In most columns all ranks have the same tensor. In the other columns each rank has an
expert that occurs in no other place. The remaining atoms are joined box by box.

`GroupingCache` finds the atoms of a reader's layout that form one group of its program. Atoms form a group if they
have the same cutout and the sources have their tensors alike (`kind`). Thousands of ranks differ in their experts, and
hardly in the grouping of their atoms. The grouping and the atoms' offsets in the segment are therefore one object,
computed once and shared by many readers.

Invariants:
- A tensor's boxes are in the order of the layouts.
- The boxes of one layout are in that layout's own order.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from tensorhub_common.layout.layout import Layout
from tensorhub_common.programs.numbered_program import PatternCache
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable, LayoutBoxes
from tensorhub_planner.compiler.memo import BoundedMemo
from tensorhub_planner.compiler.overlaps import converts
from tensorhub_planner.compiler.tiling import MissingRegion, TileGrid, TilePattern, pattern_of, spread_ways, tile_grid

_Item = TypeVar("_Item")

_Ints = tuple[int, ...]

_Boxes = tuple[_Ints, _Ints, _Ints]
"""The numbers of sources, where a box of a tensor begins in each, and the numbers of these boxes' cutouts."""


class TensorSources(msgspec.Struct, frozen=True, gc=False):
    """What all sources have of one global tensor: box i, of cutout `alike[i]`, begins at `at[i]` in `sources[i]`.

    Where all begin at the same byte `at` has that alone (`TensorGroup.at`).
    """

    kind: int
    """Equal for tensors that are cut alike and stand in the same sources."""
    alike: int
    """The number of the list of cutouts: equal for tensors that are cut alike."""
    sources: tuple[int, ...]
    at: tuple[int, ...]


_Column = tuple[tuple[str, ...], _Ints, _Ints, _Ints]
"""Boxes of tensors of these names, one of each; or all of one that is named once."""


class TensorIndex:
    """The tensors of some layouts."""

    def __init__(self, layouts: Sequence[LayoutBoxes]) -> None:
        """Take the layouts' atoms, in their order."""
        self.tensors: dict[str, TensorSources] = {}
        """What there is of each global tensor."""
        self._alike: dict[tuple[int, ...], int] = {}
        self._kinds: dict[tuple[int, tuple[int, ...]], int] = {}
        # Tensors have few different lists of sources and of places: each is kept once.
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._alone: dict[tuple[_Ints, _Ints], tuple[list[int], list[int], list[_Ints]]] = {}
        """Of columns of experts, by sources and cutouts: what each has of a `TensorSources` beside its place."""
        self._orders: dict[tuple[_Ints, ...], tuple[_Ints, Callable[[_Ints], _Ints]]] = {}
        """Of some lists of sources together: all in order, and what takes their boxes in that order."""
        columns = [*_columns(layouts)]
        several = _several([name for names, *_ in columns for name in names])
        scattered: defaultdict[str, list[_Boxes]] = defaultdict(list)
        for names, *boxes in columns:
            is_one = len(names) == 1
            if several and not several.isdisjoint(names):
                each = [boxes] if is_one else zip(*(zip(column, strict=True) for column in boxes), strict=True)
                for name, (sources, at, cutouts) in zip(names, each, strict=True):
                    scattered[name].append((sources, at, cutouts))
            elif is_one:
                self.tensors[names[0]] = self._tensor(*boxes)
            else:
                self._add_each(names, *boxes)
        for name, parts in scattered.items():
            self.tensors[name] = self._tensor(*self._merged(*zip(*parts, strict=True)))

    @property
    def lists(self) -> list[tuple[int, ...]]:
        """The lists of cutouts whose numbers tensors have (`TensorSources.alike`)."""
        return list(self._alike)

    def _tensor(self, sources: _Ints, at: _Ints, cutouts: _Ints) -> TensorSources:
        kind, alike = self._kind(sources, cutouts)
        return TensorSources(kind, alike, sources, self._once(at[:1] if at.count(at[0]) == len(at) else at))

    def _merged(self, sources: tuple[_Ints, ...], at: tuple[_Ints, ...], cutouts: tuple[_Ints, ...]) -> _Boxes:
        """Return a tensor's boxes of several columns in the order of the sources."""
        if len(sources) == 1:
            return self._once(sources[0]), at[0], cutouts[0]
        known = self._orders.get(sources)
        if known is None:
            joined = tuple(chain.from_iterable(sources))
            pick: Callable[[_Ints], _Ints] = itemgetter(*sorted(range(len(joined)), key=joined.__getitem__))
            known = self._orders[sources] = self._once(pick(joined)), pick
        in_order, pick = known
        return in_order, pick(tuple(chain.from_iterable(at))), pick(tuple(chain.from_iterable(cutouts)))

    def _add_each(self, names: Sequence[str], sources: _Ints, at: _Ints, cutouts: _Ints) -> None:
        """Add tensors that have one box each."""
        known = self._alone.get((sources, cutouts))
        if known is None:
            alone = [self._once((source,)) for source in sources]
            kinds = [self._kind(mine, (cutout,)) for mine, cutout in zip(alone, cutouts, strict=True)]
            known = self._alone[sources, cutouts] = [kind for kind, _ in kinds], [alike for _, alike in kinds], alone
        places = map(self._once, zip(at, strict=True))
        self.tensors.update(zip(names, map(TensorSources, *known, places), strict=True))

    def _kind(self, sources: tuple[int, ...], cutouts: tuple[int, ...]) -> tuple[int, int]:
        alike = _numbered(self._alike, cutouts)
        return _numbered(self._kinds, (alike, sources)), alike

    def _once(self, column: tuple[int, ...]) -> tuple[int, ...]:
        return self._shared.setdefault(column, column)


def _columns(layouts: Sequence[LayoutBoxes]) -> Iterator[_Column]:
    """Look at layouts together that may have most names alike: as many, and the same one first and last."""
    alike: defaultdict[tuple[int, str, str], list[int]] = defaultdict(list)
    for number, atoms in enumerate(layouts):
        if atoms.names:
            alike[len(atoms.names), atoms.names[0], atoms.names[-1]].append(number)
    for numbers in alike.values():
        sources, some = tuple(numbers), [layouts[number] for number in numbers]
        by_column = (zip(*column, strict=True) for column in zip(*some, strict=True))
        for names, at, cutouts in zip(*by_column, strict=True):
            is_one = names.count(names[0]) == len(names)
            yield (names[:1] if is_one else names), sources, at, cutouts


def _several(names: Sequence[str]) -> set[str]:
    """Return those that are there more than once."""
    if len(set(names)) == len(names):
        return set()
    return {name for name, count in Counter(names).items() if count > 1}


def _numbered(table: dict[_Item, int], item: _Item) -> int:
    return table.setdefault(item, len(table))


class AlikeBoxes(NamedTuple):
    """Atoms of one group."""

    first: int
    """The number of the first one in its layout."""
    cutout: int
    to: tuple[int, ...]
    """Where they begin."""
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Takes theirs out of a column that has something for each atom of the layout."""


class GroupingCache:
    """How atoms go together, by where they are, what they are cut out of, and which of them are of one kind."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known = BoundedMemo[tuple[tuple[int, ...], ...], list[AlikeBoxes]]()

    def of(self, at: tuple[int, ...], cutouts: tuple[int, ...], kinds: Sequence[int]) -> list[AlikeBoxes]:
        """Return a layout's groups in the order of their first atoms; each column has an item for each atom."""
        # Whatever numbers the kinds have: what counts is which atom is the first one of the same kind.
        first = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
        key = (at, cutouts, tuple(map(first.__getitem__, kinds)))
        return self._known.get(key) or self._known.keep(key, len(kinds), _groups(at, cutouts, kinds))


def _groups(at: Sequence[int], cutouts: Sequence[int], kinds: Sequence[int]) -> list[AlikeBoxes]:
    members: dict[tuple[int, int], list[int]] = {}
    for number, both in enumerate(zip(cutouts, kinds, strict=True)):
        members.setdefault(both, []).append(number)
    picks = [(numbers[0], cutout, picking(numbers)) for (cutout, _), numbers in members.items()]
    return [AlikeBoxes(first, cutout, pick(at), pick) for first, cutout, pick in picks]


def picking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes these items out of a tuple, as a tuple: one by itself would come as it is."""
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))


TENSORS_TOLD_MAX: Final = 4
"""A refusal names at most this many tensors; the others are counted."""


PATTERNS_MAX: Final = 100_000
"""At most this many patterns are kept; then all are forgotten, and worked out again when they are wanted."""


GRIDS_MAX: Final = 256
"""And at most this many grids, of which readers with unlike lots make their patterns."""


ANY_LOT: Final = -1
"""A pattern of which every cell has all of its owners is the same for every reader."""


class LayoutIndex:
    """The atoms of several source layouts, by tensor. Made once for a set of layouts, and used for all readers."""

    def __init__(self, layouts: Mapping[str, Layout], originals: Collection[str] = ()) -> None:
        """Take the layouts by digest; their order decides in which order a program's units stand.

        `originals` are those in which the version was published: what stands in them may be cast.
        """
        self.layouts = tuple(layouts)
        self.cutouts = GeometryTable()
        self.groupings = GroupingCache()
        self.executed = PatternCache()
        """What its programs' executions know of patterns."""
        self._patterns: dict[tuple[int, int, int], _Chosen | MissingRegion] = {}
        self._grids: dict[tuple[int, int], TileGrid | MissingRegion] = {}
        published = frozenset(originals)
        joined = TensorIndex(
            [self.cutouts.atoms(each, is_original=name in published) for name, each in layouts.items()]
        )
        self.tensors, self._lists = joined.tensors, joined.lists
        self._lots = [spread_ways(len(boxes)) for boxes in self._lists]

    def chosen(self, cutout: int, alike: int, lot: int) -> "_Chosen | MissingRegion":
        """Return how an atom of this cutout is made up of boxes that are cut like those."""
        known = self._patterns.get((cutout, alike, ANY_LOT))
        if known is not None:
            return known
        # Readers that take the same ones of many sources share a pattern; where there are few, all readers do.
        key = (cutout, alike, lot % self._lots[alike])
        known = self._patterns.get(key)
        if known is None:
            if len(self._patterns) >= PATTERNS_MAX:
                self._patterns.clear()
            grid = self._grid(cutout, alike)
            known = grid if isinstance(grid, MissingRegion) else _chosen(pattern_of(self.cutouts[cutout], grid, key[2]))
            is_for_all = isinstance(known, MissingRegion) or known.pattern.is_for_all
            self._patterns[(cutout, alike, ANY_LOT) if is_for_all else key] = known
        return known

    def _grid(self, cutout: int, alike: int) -> TileGrid | MissingRegion:
        """Return a grid that other lots may have asked for before."""
        known = self._grids.get((cutout, alike))
        if known is None:
            if len(self._grids) >= GRIDS_MAX:
                self._grids.clear()
            known = self._grids[cutout, alike] = tile_grid(self.cutouts[cutout], self._lists[alike], self.cutouts)
        return known

    def fits(self, cutout: BoxGeometry, tensor: TensorSources) -> bool:
        """Tell whether any box is of the same global tensor, and of a dtype that can be converted."""
        boxes = (self.cutouts[each] for each in self._lists[tensor.alike])
        return any(box.global_shape == cutout.global_shape and converts(box, cutout) is not None for box in boxes)

    def told(self, name: str) -> str:
        """Say what there is under a name."""
        tensor = self.tensors.get(name)
        boxes = () if tensor is None else (self.cutouts[each] for each in self._lists[tensor.alike])
        some = dict.fromkeys(_kind_of(box) for box in boxes)
        return " and ".join(list(some)[:TENSORS_TOLD_MAX]) or "nothing of that name"


class _Chosen(NamedTuple):
    """A pattern, and what its boxes are of those that there are of a tensor."""

    pattern: TilePattern
    take: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Takes what it has out of a column of all boxes."""
    are_first: bool
    """They are the first ones that there are, in their order."""

    def places(self, tensor: TensorSources, at: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return where its boxes begin, of tensors that are all of one kind, and begin there."""
        takes_all = self.are_first and len(self.pattern.boxes) == len(tensor.sources)
        if takes_all or max(map(len, at)) == 1:
            return at
        return tuple([each if len(each) == 1 else self.take(each) for each in at])


def _chosen(pattern: TilePattern) -> _Chosen:
    boxes = pattern.boxes
    return _Chosen(pattern, picking(boxes), boxes == tuple(range(len(boxes))))


def _kind_of(cutout: BoxGeometry) -> str:
    cast = f" ({cutout.cast})" if cutout.cast else ""
    return f"{cutout.dtype}{cast} of global shape {list(cutout.global_shape)}"
