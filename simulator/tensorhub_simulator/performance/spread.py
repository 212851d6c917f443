"""Numbers about many numbers. Pure."""

from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How some times lie."""

    mean: float
    median: float
    p99: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Return how values lie; of none, zeros."""
    if not values:
        return Spread(mean=0.0, median=0.0, p99=0.0, most=0.0)
    ordered = sorted(values)
    return Spread(
        mean=sum(ordered) / len(ordered),
        median=ordered[len(ordered) // 2],
        p99=ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)],
        most=ordered[-1],
    )
