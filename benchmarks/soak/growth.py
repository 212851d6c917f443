"""Whether something grows: a robust line through the settled part of the samples, held against a stated slack. Pure.

A run is settled in its second half, and not before the longest window of time has passed for which some process keeps
what it has seen: until then buffers, arenas, caches and such windows fill up. The slope is Theil and Sen's, the median
over all pairs of samples, so that a single peak makes no trend and a leak does, however small its steps.
"""

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * 1024
SAMPLES_MIN: Final = 8
"""The settled part must have so many."""

SLACK: Final[Mapping[str, float]] = {
    "memory": 2 * MIB,
    "fds": 1,
    "sockets": 1,
    "threads": 1,
    "shm bytes": MIB / 2,
    "shm files": 1,
}
"""What each may grow by in the settled part of a soak: less than one of a kind, or what an allocator may keep."""

BOOKS: Final[Mapping[str, int]] = {"nats": 8 * KIB, "registry": 8 * KIB}
"""Who keeps books of the log may take so much more for each update: NATS the index of a log without an age limit, the
registry the outcomes of the last 65,536 commands."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a metric of a process did: its value once settled and at the end, and by how much it grew on the line."""

    process: str
    metric: str
    settled: float
    last: float
    grown: float
    slack: float

    @property
    def is_bounded(self) -> bool:
        """Tell whether it stayed within the slack."""
        return self.grown < self.slack


def first_settled(at_s: Sequence[float], window_s: float) -> int:
    """Return the number of the first sample to judge, for samples that were taken at these times.

    Raises ValueError when too few are left after `window_s` to tell anything.
    """
    after = bisect.bisect_left(at_s, window_s)
    left = len(at_s) - after
    if left < SAMPLES_MIN:
        raise ValueError(
            f"{left} samples after {window_s:g} s are too few to judge: go on until there are {SAMPLES_MIN}, "
            "or look more often"
        )
    return min(max(after, len(at_s) // 2), len(at_s) - SAMPLES_MIN)


def growth(process: str, metric: str, updates: Sequence[int], values: Sequence[float]) -> Growth:
    """Judge the settled part of one series."""
    grown = slope(updates, values) * (updates[-1] - updates[0])
    books = BOOKS.get(process, 0) * (updates[-1] - updates[0]) if metric == "memory" else 0
    return Growth(process, metric, values[0], values[-1], grown, SLACK[metric] + books)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope between any two samples."""
    pairs = combinations(zip(x, y, strict=True), 2)
    return statistics.median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs)
