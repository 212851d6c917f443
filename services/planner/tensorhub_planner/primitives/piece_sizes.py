"""Sets of pieces as ranges, so that a plan costs what its sources cost and not what its pieces do.

Always true of `Ranges`: sorted, each of at least one piece, no two of them overlapping or touching. So two equal sets
are equal tuples. `Sizes` turns ranges into bytes by two look-ups each.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, overload

from tensorhub_common.protocol.plans import Range

Ranges = tuple[Range, ...]

NOTHING: Final[Ranges] = ()

ENDS_KEPT_MAX: Final = 64
"""Where pieces repeat the ends of so many are kept: a plan asks for the same few again and again."""


class _RepeatedEnds(Sequence[int]):
    """Where pieces end whose sizes repeat: each run has its pieces so many times."""

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


class Sizes:
    """How many bytes the pieces of one layout have, summed up from the first one."""

    __slots__ = ("_ends",)

    def __init__(self, nbytes: Iterable[int]) -> None:
        """Take the bytes of each piece, in the order of their numbers."""
        self._ends: Sequence[int] = list(accumulate(nbytes, initial=0))

    @classmethod
    def repeated(cls, runs: Iterable[tuple[Sequence[int], int]]) -> "Sizes":
        """Take pieces as they repeat: (the bytes before each of some and of all, how often these follow one another).

        It costs what the runs cost, and not what the pieces do: a program has hundreds of thousands of units.
        """
        sizes = cls(())
        sizes._ends = _RepeatedEnds([run for run in runs if len(run[0]) > 1 and run[1]])
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


def normal(ranges: Iterable[Range]) -> Ranges:
    """Return the set of all pieces that stand in `ranges`, which may come in any order and overlap."""
    if isinstance(ranges, tuple) and len(ranges) == 1 and ranges[0][1] > 0:
        return ranges
    merged: list[Range] = []
    for first, count in sorted(ranges):
        if count < 1:
            continue
        if merged and first <= merged[-1][0] + merged[-1][1]:
            begin, before = merged[-1]
            merged[-1] = (begin, max(before, first + count - begin))
        else:
            merged.append((first, count))
    return tuple(merged)


def count_of(ranges: Ranges) -> int:
    """Return how many pieces these are."""
    return sum(count for _, count in ranges)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the pieces that stand in both."""
    if one == other or not one or not other:
        return one if other else NOTHING
    if len(one) == 1 and one[0][0] <= other[0][0] and sum(other[-1]) <= sum(one[0]):
        # A part of all, as most that is asked: holders have parts, and readers want everything.
        return other
    found: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(other):
        one_start, one_count = one[i]
        other_start, other_count = other[j]
        one_stop, other_stop = one_start + one_count, other_start + other_count
        start = max(one_start, other_start)
        if one_stop <= other_stop:
            stop = one_stop
            i += 1
        else:
            stop = other_stop
            j += 1
        if start < stop:
            found.append((start, stop - start))
    return tuple(found)


def without(one: Ranges, other: Ranges) -> Ranges:
    """Return the pieces of `one` that don't stand in `other`."""
    if not other:
        return one
    left: list[Range] = []
    j = 0
    for first, count in one:
        start, stop = first, first + count
        while j < len(other) and other[j][0] + other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < stop:
            if start < other[k][0]:
                left.append((start, other[k][0] - start))
            start = max(start, other[k][0] + other[k][1])
            k += 1
        if start < stop:
            left.append((start, stop - start))
    return tuple(left)


def cut(ranges: Ranges, sizes: Sizes, targets: Iterable[float]) -> list[Ranges]:
    """Cut into consecutive runs, one for each target, of about so many bytes each; the last one takes what is left.

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


def told(ranges: Ranges, ranges_max: int = 4) -> str:
    """Say which pieces these are: "3-7, 9", naming at most `ranges_max` ranges."""
    words = [str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in ranges[:ranges_max]]
    more = f" and {len(ranges) - ranges_max} more ranges" if len(ranges) > ranges_max else ""
    return ", ".join(words) + more
