"""Joins the atoms of several layouts by tensor: what all sources have of each. Pure.

Thousands of ranks have most of their tensors in the same order, and differ in which experts stand in between. So their
atoms are looked at by column: the first of all ranks, the second, and so on. In most columns all have one tensor; in
the others each has an expert that stands nowhere else. What is neither is joined box by box.

Always true: a tensor's boxes are in the order of the layouts, and those of one layout in its own.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import msgspec

from tensorhub_planner.compiler.boxes import Atoms

_Item = TypeVar("_Item")

_Ints = tuple[int, ...]

_Boxes = tuple[_Ints, _Ints, _Ints]
"""The numbers of sources, where a box of a tensor begins in each, and the numbers of these boxes' cutouts."""


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """What all sources have of one global tensor: box i, of cutout `alike[i]`, begins at `at[i]` in `sources[i]`.

    Where all begin at the same byte `at` has that alone (`Group.at`).
    """

    kind: int
    """Equal for tensors that are cut alike and stand in the same sources."""
    alike: int
    """The number of the list of cutouts: equal for tensors that are cut alike."""
    sources: tuple[int, ...]
    at: tuple[int, ...]


_Column = tuple[tuple[str, ...], _Ints, _Ints, _Ints]
"""Boxes of tensors of these names, one of each; or all of one that is named once."""


class Joined:
    """The tensors of some layouts."""

    def __init__(self, layouts: Sequence[Atoms]) -> None:
        """Take the layouts' atoms, in their order."""
        self.tensors: dict[str, Tensor] = {}
        """What there is of each global tensor."""
        self._alike: dict[tuple[int, ...], int] = {}
        self._kinds: dict[tuple[int, tuple[int, ...]], int] = {}
        # Tensors have few different lists of sources and of places: each is kept once.
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._alone: dict[tuple[_Ints, _Ints], tuple[list[int], list[int], list[_Ints]]] = {}
        """Of columns of experts, by sources and cutouts: what each has of a `Tensor` beside its place."""
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
        """The lists of cutouts whose numbers tensors have (`Tensor.alike`)."""
        return list(self._alike)

    def _tensor(self, sources: _Ints, at: _Ints, cutouts: _Ints) -> Tensor:
        kind, alike = self._kind(sources, cutouts)
        return Tensor(kind, alike, sources, self._once(at[:1] if at.count(at[0]) == len(at) else at))

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
        self.tensors.update(zip(names, map(Tensor, *known, places), strict=True))

    def _kind(self, sources: tuple[int, ...], cutouts: tuple[int, ...]) -> tuple[int, int]:
        alike = _numbered(self._alike, cutouts)
        return _numbered(self._kinds, (alike, sources)), alike

    def _once(self, column: tuple[int, ...]) -> tuple[int, ...]:
        return self._shared.setdefault(column, column)


def _columns(layouts: Sequence[Atoms]) -> Iterator[_Column]:
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
