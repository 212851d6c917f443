"""In which order the distances are read from: near before far, unless measurement speaks clearly against it. Pure.

Near before far is not only about one reader's speed: what is read near by leaves the network to those who have nothing
near. So a nearer source goes behind a farther one only when both are measured and it brings less than one part in
`nearer_times` of what the farther one does. It is not left out: what nobody before it has is still read from it.

Another site always stays last, however fast: what crosses the link to it all readers of a site pay for.
"""

from collections.abc import Sequence

import msgspec

from tensorhub_planner.primitives.limits import Limits
from tensorhub_planner.primitives.topology import Distance


class Measure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far away a source is, and what was measured of the link to it, if anything."""

    distance: Distance
    bps: int | None


class Rank(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Where a source stands: a lower place is read from first. Sources of one place are equally far."""

    place: int
    is_behind: bool
    """It comes after farther ones, which are far faster."""


class _Group(msgspec.Struct):
    """Sources at one distance that stand together, by their numbers."""

    is_behind: bool
    bps: int
    """The best that was measured of them; 0: nothing was, or it does not count."""
    sources: list[int]


def ranks(sources: Sequence[Measure], limits: Limits) -> list[Rank]:
    """Return the rank of each source: farthest first each is put before all, or else after the last far faster one."""
    order: list[_Group] = []
    by_distance: dict[Distance, list[int]] = {}
    for number, source in enumerate(sources):
        by_distance.setdefault(source.distance, []).append(number)
    for distance in sorted(by_distance, reverse=True):
        at: dict[int, list[int]] = {}
        for number in by_distance[distance]:
            at.setdefault(_place(sources[number], order, limits), []).append(number)
        for place in sorted(at, reverse=True):
            best = 0 if distance is Distance.WAN else max(sources[number].bps or 0 for number in at[place])
            order.insert(place, _Group(is_behind=place > 0, bps=best, sources=at[place]))
    found = {number: Rank(place, group.is_behind) for place, group in enumerate(order) for number in group.sources}
    return [found[number] for number in range(len(sources))]


def _place(source: Measure, farther: Sequence[_Group], limits: Limits) -> int:
    if source.bps is None:
        return 0
    faster = (place for place, group in enumerate(farther, start=1) if source.bps * limits.nearer_times < group.bps)
    return max(faster, default=0)
