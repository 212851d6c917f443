"""Ranges of pieces: sorted, disjoint and not adjacent, each from its first piece to the one behind its last. Pure."""

from collections.abc import Iterable
from typing import Final

Range = tuple[int, int]
"""(first, count) of consecutive piece numbers."""


Ranges = tuple[Range, ...]


NOTHING: Final[Ranges] = ()


def merge_ranges(ranges: Iterable[Range]) -> Ranges:
    """Return the set of all pieces in `ranges`, which may come in any order and overlap."""
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


def total_count(ranges: Ranges) -> int:
    """Return how many pieces these are."""
    return sum(count for _, count in ranges)


def intersect_ranges(one: Ranges, other: Ranges) -> Ranges:
    """Return the pieces in both."""
    if one == other or not one or not other:
        return one if other else NOTHING
    if one[0][0] <= other[0][0] and sum(other[-1]) <= sum(one[0]):
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


def subtract_ranges(one: Ranges, other: Ranges) -> Ranges:
    """Return the pieces of `one` that are not in `other`."""
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


def describe_ranges(ranges: Ranges, ranges_max: int = 4) -> str:
    """Say which pieces these are: "3-7, 9", naming at most `ranges_max` ranges."""
    words = [str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in ranges[:ranges_max]]
    more = f" and {len(ranges) - ranges_max} more ranges" if len(ranges) > ranges_max else ""
    return ", ".join(words) + more
