"""In which order the distances are read from: near before far, unless measurement speaks clearly against it. Pure.

Near before far is not only about one reader's speed: what is read near by leaves the network to those who have nothing
near. So a nearer source goes behind a farther one only when both are measured and it brings less than one part in
`nearer_times` of what the farther one does. It is not left out: what nobody before it has is still read from it.

Another site always stays last, however fast: what crosses the link to it all readers of a site pay for.
"""

from collections.abc import Sequence

import msgspec

from tensorhub_planner.limits import Limits
from tensorhub_planner.topology import Distance


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """How far away a source is, and what was measured of the link to it, if anything."""

    distance: Distance
    bps: int | None


class Rank(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a source stands: a lower rank is read from first. Sources of equal rank are equally far."""

    behind: Distance
    """It is read from with those at this distance, its own as a rule;"""
    is_behind: bool
    """after them, if it is nearer and too slow."""
    distance: Distance


def ranks(sources: Sequence[Measure], limits: Limits) -> list[Rank]:
    """Return the rank of each source."""
    best: dict[Distance, int] = {}
    for source in sources:
        if source.bps is not None and source.distance is not Distance.WAN:
            best[source.distance] = max(best.get(source.distance, 0), source.bps)
    return [_rank(source, best, limits) for source in sources]


def _rank(source: Measure, best: dict[Distance, int], limits: Limits) -> Rank:
    own = Rank(source.distance, is_behind=False, distance=source.distance)
    if source.bps is None:
        return own
    faster = [
        distance
        for distance, bps in best.items()
        if distance > source.distance and source.bps * limits.nearer_times < bps
    ]
    # Behind the nearest of those: one that is farther still may be no faster than that.
    return Rank(min(faster), is_behind=True, distance=source.distance) if faster else own
