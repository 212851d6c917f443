"""The bytes of ranges of pieces, by two lookups for each range. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, overload

from tensorhub_common.protocol.ranges import NOTHING, Range, Ranges

ENDS_KEPT_MAX: Final = 64
"""Where pieces repeat the ends of this many are kept: a plan asks for the same few again and again."""


class _RepeatedEnds(Sequence[int]):
    """Where pieces end whose sizes repeat: each run has its pieces a number of times."""

    __slots__ = ("_base", "_first", "_inner", "_known")

    def __init__(self, runs: Sequence[tuple[Sequence[int], int]]) -> None:
        self._inner = [ends for ends, _ in runs]
        self._first = list(accumulate([times * (len(ends) - 1) for ends, times in runs], initial=0))
        self._base = list(accumulate([times * ends[-1] for ends, times in runs], initial=0))
        self._known = dict(zip(self._first[:ENDS_KEPT_MAX], self._base, strict=False))

    def __len__(self) -> int:
        return self._first[-1] + 1

    @overload
    def __getitem__(self, piece: int) -> int: ...
    @overload
    def __getitem__(self, piece: slice) -> Sequence[int]: ...
    def __getitem__(self, piece: int | slice) -> int | Sequence[int]:
        """Return the bytes of all pieces before this one."""
        if isinstance(piece, slice):
            return [self[each] for each in range(*piece.indices(len(self)))]
        known = self._known.get(piece)
        if known is None:
            if len(self._known) >= ENDS_KEPT_MAX:
                self._known.clear()
            known = self._known[piece] = self._found(piece)
        return known

    def _found(self, piece: int) -> int:
        run = bisect_right(self._first, piece) - 1
        if run == len(self._inner):
            return self._base[run]
        inner = self._inner[run]
        times, place = divmod(piece - self._first[run], len(inner) - 1)
        return self._base[run] + times * inner[-1] + inner[place]


class PieceSizes:
    """How many bytes the pieces of one layout have, summed up from the first one."""

    __slots__ = ("_ends",)

    def __init__(self, nbytes: Iterable[int]) -> None:
        """Take the bytes of each piece, in the order of their numbers."""
        self._ends: Sequence[int] = list(accumulate(nbytes, initial=0))

    @classmethod
    def repeated(cls, runs: Iterable[tuple[Sequence[int], int]]) -> "PieceSizes":
        """Take pieces as they repeat: (the bytes before each of some and of all, how often these follow one another).

        It costs what the runs cost, and not what the pieces do: a program has hundreds of thousands of units.
        """
        sizes = cls(())
        sizes._ends = _RepeatedEnds(list(runs))
        return sizes

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._ends) - 1

    def all(self) -> Ranges:
        """Return every piece."""
        return ((0, len(self)),) if len(self) else NOTHING

    def of(self, ranges: Ranges) -> int:
        """Return the bytes of these pieces."""
        ends = self._ends
        return sum([ends[first + count] - ends[first] for first, count in ranges])

    def fitting(self, first: int, count: int, nbytes: float) -> int:
        """Return how many of `count` pieces from `first` on come nearest to `nbytes` together."""
        ends, target = self._ends, self._ends[first] + nbytes
        above = bisect_left(ends, target, first, first + count + 1)
        if above > first + count:
            return count
        if above > first and target - ends[above - 1] < ends[above] - target:
            above -= 1
        return above - first


def cut(ranges: Ranges, sizes: PieceSizes, targets: Iterable[float]) -> list[Ranges]:
    """Cut into consecutive runs, one for each target, of about the given bytes each; the last one takes what is left.

    Each cut stands at the edge of a piece nearest to where the targets so far end, so errors don't add up. A run may be
    empty.
    """
    wanted = list(targets)
    runs: list[Ranges] = []
    rest, begun, goal = list(reversed(ranges)), 0.0, 0.0
    for target in wanted[:-1]:
        goal += target
        run: list[Range] = []
        while rest:
            first, count = rest.pop()
            whole = sizes.of(((first, count),))
            if begun + whole <= goal:
                run.append((first, count))
                begun += whole
                continue
            taken = sizes.fitting(first, count, goal - begun)
            if taken:
                run.append((first, taken))
                begun += sizes.of(((first, taken),))
            if taken < count:
                rest.append((first + taken, count - taken))
            break
        runs.append(tuple(run))
    runs.append(tuple(reversed(rest)))
    return runs
