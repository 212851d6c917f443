"""Which atoms of a reader's layout make up a group of its program, worked out once for all that are alike. Pure.

Atoms are of one group where they have one cutout and the sources have their tensors alike (`kind`). Thousands of ranks
differ in which experts they have, and hardly in which of their atoms go together: so that, and where these begin in the
segment, is one object for many readers.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tensorhub_planner.compiler.memo import Remembered


class Together(NamedTuple):
    """Atoms of one group."""

    first: int
    """The number of the first one in its layout."""
    cutout: int
    to: tuple[int, ...]
    """Where they begin."""
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Takes theirs out of a column that has something for each atom of the layout."""


class Groupings:
    """How atoms go together, by where they are, what they are cut out of, and which of them are of one kind."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known = Remembered[tuple[tuple[int, ...], ...], list[Together]]()

    def of(self, at: tuple[int, ...], cutouts: tuple[int, ...], kinds: Sequence[int]) -> list[Together]:
        """Return a layout's groups in the order of their first atoms; each column has an item for each atom."""
        # Whatever numbers the kinds have: what counts is which atom is the first one of the same kind.
        first = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
        key = (at, cutouts, tuple(map(first.__getitem__, kinds)))
        return self._known.get(key) or self._known.keep(key, len(kinds), _groups(at, cutouts, kinds))


def _groups(at: Sequence[int], cutouts: Sequence[int], kinds: Sequence[int]) -> list[Together]:
    members: dict[tuple[int, int], list[int]] = {}
    for number, both in enumerate(zip(cutouts, kinds, strict=True)):
        members.setdefault(both, []).append(number)
    picks = [(numbers[0], cutout, picking(numbers)) for (cutout, _), numbers in members.items()]
    return [Together(first, cutout, pick(at), pick) for first, cutout, pick in picks]


def picking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes these items out of a tuple, as a tuple: one by itself would come as it is."""
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))
