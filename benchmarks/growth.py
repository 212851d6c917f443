"""Whether something grows: a robust line through the second half of the samples, held against a stated slack. Pure.

The first half is left out: there buffers, arenas and caches fill up. The slope is Theil and Sen's, the median over all
pairs of samples, so that a single peak makes no trend and a leak does, however small its steps.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * 1024
SAMPLES_MIN: Final = 8

SLACK: Final[Mapping[str, float]] = {
    "uss": 2 * MIB,
    "fds": 1,
    "sockets": 1,
    "threads": 1,
    "shm bytes": MIB / 2,
    "shm files": 1,
}
"""What each may grow by in the second half of a soak: less than one of a kind, or what an allocator may keep."""


BOOKS: Final[Mapping[str, int]] = {"nats": 8 * KIB, "registry": 8 * KIB}
"""Who keeps books of the log may take so much more for each update: NATS the index of a log without an age limit and
two minutes of message ids, the registry the outcomes of the last 65,536 commands."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a metric of a process did: its value at the middle and the end, and by how much it grew on the line."""

    process: str
    metric: str
    middle: float
    last: float
    grown: float
    slack: float

    @property
    def is_bounded(self) -> bool:
        """Tell whether it stayed within the slack."""
        return self.grown < self.slack


def growth(process: str, metric: str, updates: Sequence[int], values: Sequence[float]) -> Growth:
    """Judge one series. Raises ValueError with too few samples to tell."""
    if len(values) < 2 * SAMPLES_MIN:
        raise ValueError(f"{len(values)} samples are too few to judge {metric}: take at least {2 * SAMPLES_MIN}")
    half = len(values) // 2
    x, y = updates[half:], values[half:]
    grown = slope(x, y) * (x[-1] - x[0])
    books = BOOKS.get(process, 0) * (x[-1] - x[0]) if metric == "uss" else 0
    return Growth(process, metric, y[0], y[-1], grown, SLACK[metric] + books)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope between any two samples."""
    pairs = combinations(zip(x, y, strict=True), 2)
    return statistics.median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs)
