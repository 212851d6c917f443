"""The boxes of global tensors in a shard's memory, under whatever names it has them. Pure.

A registered tensor is one atom, or several where its layout names parts of it. An atom's *geometry* is its box in the
global tensor and its strides in memory. Layouts have many tensors and few geometries, so those are numbered.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from tensorhub_common.layout.layout import Layout, TensorEntry, room
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_planner.compiler.memo import BoundedMemo, LookupBudget

EMPTY: Final = -1
"""The number of every cutout without an element."""
COMPOSED: Final = -2
"""Stands for an entry's cutout where it has parts, and so several."""
ROWS_MAX: Final = 131_072
"""At most this many entries are remembered, some 20 MB; then all are forgotten, and looked at again when they come."""


class BoxGeometry(NamedTuple):
    """Elements `start[d] <= index[d] < stop[d]` of a global tensor, and how far apart they lie in the segment."""

    dtype: str
    itemsize: int
    global_shape: Shape
    start: Shape
    stop: Shape
    strides: Shape
    """In bytes, for each dimension of the global tensor."""
    is_original: bool = False
    """It stands as it was published: its elements may be cast."""
    cast: str = ""
    """What is computed of the global tensor here (`Part.cast`): `global_shape` is what it is computed of."""


class LayoutBoxes(NamedTuple):
    """A layout's atoms by column: box i of global tensor `names[i]` begins at byte `at[i]` of the segment."""

    names: tuple[str, ...]
    at: tuple[int, ...]
    cutouts: tuple[int, ...]


class _Columns(NamedTuple):
    """The same while they are made."""

    names: list[str]
    at: list[int]
    cutouts: list[int]

    def add(self, name: str, at: int, cutout: int) -> None:
        """Add an atom."""
        self.names.append(name)
        self.at.append(at)
        self.cutouts.append(cutout)


class GeometryTable:
    """Cutouts by number. Equal ones have equal numbers."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: dict[BoxGeometry, int] = {}
        self._known: list[BoxGeometry] = []
        self._kinds: dict[tuple[int, int], int] = {}
        """Numbers, by how many bytes of a segment an entry takes, and its cutout; that is `EMPTY` without an element,
        `COMPOSED` where it has parts."""
        self._both: list[tuple[int, int]] = []
        """Both, by the number."""
        self._rows: dict[bool, dict[TensorEntry, int]] = {False: {}, True: {}}
        """Numbers of kinds by entry, and by whether it stands as it was published. What many ranks have alike is one
        object (`entries`)."""
        self._trials = LookupBudget()
        self._boxes: dict[tuple[str, int, Shape, Shape, Shape, bool], int] = {}
        """The same of entries that differ in their names alone."""
        self._placed = BoundedMemo[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]()
        """Where entries of these kinds begin, and their cutouts: ranks have few lists of kinds, and many names."""
        self._at = BoundedMemo[tuple[int, ...], tuple[int, ...]]()
        """Where entries of `nbytes` begin: ranks that shard evenly have one such list."""

    def __getitem__(self, number: int) -> BoxGeometry:
        """Return a cutout by its number."""
        return self._known[number]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known)

    def atoms(self, layout: Layout, *, is_original: bool = False) -> LayoutBoxes:
        """Return a layout's atoms in the order of its tensors; those without an element, and padding, are left out."""
        at, cutouts = self._placed_at(self._kinds_of(layout.tensors, is_original))
        if min(cutouts, default=0) < 0:
            return self._without_gaps(layout, at, cutouts, is_original)
        return LayoutBoxes(tuple([entry.name for entry in layout.tensors]), at, cutouts)

    def _kinds_of(self, entries: Sequence[TensorEntry], is_original: bool) -> tuple[int, ...]:  # noqa: FBT001 (a column)
        known = self._rows[is_original]
        if not self._trials.pays(entries, known.__contains__):
            return tuple([self._kind(entry, is_original) for entry in entries])
        found = tuple(map(known.get, entries))
        missing = [entry for entry, kind in zip(entries, found, strict=True) if kind is None] if None in found else ()
        self._trials.count(len(entries) - len(missing), len(missing))
        made = [self._kind(entry, is_original) for entry in missing]
        known.update(zip(missing, made, strict=True))
        if len(known) > ROWS_MAX:
            known.clear()
        rest = iter(made)
        return tuple([next(rest) if kind is None else kind for kind in found])

    def _placed_at(self, kinds: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where entries of these kinds begin, and their cutouts."""
        placed = self._placed.get(kinds)
        if placed is None:
            rooms, cutouts = zip(*map(self._both.__getitem__, kinds), strict=True) if kinds else ((), ())
            at = self._at.get(rooms)
            if at is None:
                at = self._at.keep(rooms, len(rooms), tuple(accumulate(rooms, initial=0))[:-1])
            placed = self._placed.keep(kinds, len(kinds), (at, cutouts))
        return placed

    def _without_gaps(
        self,
        layout: Layout,
        at: Sequence[int],
        cutouts: Sequence[int],
        is_original: bool,  # noqa: FBT001 (a column)
    ) -> LayoutBoxes:
        """Leave out what has no element, and take what consists of parts by its parts."""
        atoms = _Columns([], [], [])
        for entry, place, cutout in zip(layout.tensors, at, cutouts, strict=True):
            if cutout == COMPOSED:
                strides = _row_major(entry.shape, entry.itemsize)
                for part in entry.parts:
                    if part.name and 0 not in part.shape:
                        begin = place + sum(a * stride for a, stride in zip(part.start, strides, strict=True))
                        atoms.add(part.name, begin, self._number(_of_part(entry, part, strides, is_original)))
            elif cutout != EMPTY:
                atoms.add(entry.name, place, cutout)
        return LayoutBoxes(tuple(atoms.names), tuple(atoms.at), tuple(atoms.cutouts))

    def _kind(self, entry: TensorEntry, is_original: bool) -> int:  # noqa: FBT001 (a column)
        if entry.parts:
            return self._kind_number(room(entry), COMPOSED)
        key = (entry.dtype, entry.itemsize, entry.shape, entry.global_shape, entry.offset, is_original)
        kind = self._boxes.get(key)
        if kind is None:
            cutout = EMPTY if 0 in entry.shape else self._number(_of_whole(entry, is_original))
            kind = self._boxes[key] = self._kind_number(room(entry), cutout)
        return kind

    def _kind_number(self, room_bytes: int, cutout: int) -> int:
        number = self._kinds.setdefault((room_bytes, cutout), len(self._both))
        if number == len(self._both):
            self._both.append((room_bytes, cutout))
        return number

    def _number(self, cutout: BoxGeometry) -> int:
        number = self._numbers.setdefault(cutout, len(self._known))
        if number == len(self._known):
            self._known.append(cutout)
        return number


def _of_whole(entry: TensorEntry, is_original: bool) -> BoxGeometry:  # noqa: FBT001 (a column)
    stop = tuple(o + s for o, s in zip(entry.offset, entry.shape, strict=True))
    strides = _row_major(entry.shape, entry.itemsize)
    return BoxGeometry(entry.dtype, entry.itemsize, entry.global_shape, entry.offset, stop, strides, is_original)


def _of_part(entry: TensorEntry, part: Part, strides: Shape, is_original: bool) -> BoxGeometry:  # noqa: FBT001 (a column)
    """Dimensions are matched from the last one on; those in front that only one of the two has are of one element."""
    rank = len(part.global_shape)
    own = strides[-rank:] if rank else ()
    stop = tuple(o + s for o, s in zip(part.offset, part.extent, strict=True))
    far = (0,) * (rank - len(own)) + own
    return BoxGeometry(entry.dtype, entry.itemsize, part.global_shape, part.offset, stop, far, is_original, part.cast)


def _row_major(shape: Shape, itemsize: int) -> Shape:
    strides, stride = [], itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
