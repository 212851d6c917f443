"""The boxes of global tensors that stand in a shard's memory, whatever they are called there. Pure.

A registered tensor is one atom, or several where its layout names parts of it. What an atom is cut out of its global
tensor, and how it lies in memory, is its *cutout*; layouts have many tensors and few cutouts, so those are numbered.
"""

from typing import Final, NamedTuple

from tensorhub_common.layout import Layout, Part, Shape, TensorEntry, room

EMPTY: Final = -1
"""The number of every cutout without an element."""


class Cutout(NamedTuple):
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


class Atoms(NamedTuple):
    """A layout's atoms by column: box i of global tensor `names[i]` begins at byte `at[i]` of the segment."""

    names: list[str]
    at: list[int]
    cutouts: list[int]


class Cutouts:
    """Cutouts by number. Equal ones have equal numbers."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: dict[Cutout, int] = {}
        self._known: list[Cutout] = []
        self._of_entry: dict[tuple[str, int, Shape, Shape, Shape, bool], tuple[int, int]] = {}
        """The number of an entry's cutout, and how many bytes of a segment it takes."""

    def __getitem__(self, number: int) -> Cutout:
        """Return a cutout by its number."""
        return self._known[number]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known)

    def atoms(self, layout: Layout, *, is_original: bool = False) -> Atoms:
        """Return a layout's atoms in the order of its tensors; those without an element, and padding, are left out."""
        names: list[str] = []
        places: list[int] = []
        cutouts: list[int] = []
        of_entry, end = self._of_entry, 0
        for entry in layout.tensors:
            place = end
            if entry.parts:
                end += room(entry)
                strides = _row_major(entry.shape, entry.itemsize)
                for part in entry.parts:
                    if part.name and 0 not in part.shape:
                        names.append(part.name)
                        places.append(place + sum(a * stride for a, stride in zip(part.start, strides, strict=True)))
                        cutouts.append(self._number(_of_part(entry, part, strides, is_original)))
                continue
            key = (entry.dtype, entry.itemsize, entry.shape, entry.global_shape, entry.offset, is_original)
            known = of_entry.get(key)
            if known is None:
                number = EMPTY if 0 in entry.shape else self._number(_of_whole(entry, is_original))
                known = of_entry[key] = (number, room(entry))
            end += known[1]
            if known[0] != EMPTY:
                names.append(entry.name)
                places.append(place)
                cutouts.append(known[0])
        return Atoms(names, places, cutouts)

    def _number(self, cutout: Cutout) -> int:
        number = self._numbers.setdefault(cutout, len(self._known))
        if number == len(self._known):
            self._known.append(cutout)
        return number


def _of_whole(entry: TensorEntry, is_original: bool) -> Cutout:  # noqa: FBT001 (a column)
    stop = tuple(o + s for o, s in zip(entry.offset, entry.shape, strict=True))
    strides = _row_major(entry.shape, entry.itemsize)
    return Cutout(entry.dtype, entry.itemsize, entry.global_shape, entry.offset, stop, strides, is_original)


def _of_part(entry: TensorEntry, part: Part, strides: Shape, is_original: bool) -> Cutout:  # noqa: FBT001 (a column)
    """Dimensions are matched from the last one on; those in front that only one of the two has are of one element."""
    rank = len(part.global_shape)
    own = strides[-rank:] if rank else ()
    stop = tuple(o + s for o, s in zip(part.offset, part.extent, strict=True))
    far = (0,) * (rank - len(own)) + own
    return Cutout(entry.dtype, entry.itemsize, part.global_shape, part.offset, stop, far, is_original, part.cast)


def _row_major(shape: Shape, itemsize: int) -> Shape:
    strides, stride = [], itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
