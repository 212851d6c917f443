"""The results of a run: when each replica had each version, and what links carried. Pure.

`spread` returns numbers about many numbers: their mean, median, 99th percentile and maximum.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tensorhub_simulator.performance.model.topology import ClusterTopology


class Update(msgspec.Struct, kw_only=True, eq=False):
    """One replica gets one version."""

    kind: str
    replica: int
    version: int
    asked_s: float
    """When it stopped generating, to be filled."""
    started_s: float | None = None
    """When it had its leases, or all had come to the barrier."""
    ready_s: float | None = None
    """When it went on; None: it vanished before."""

    @property
    def took_s(self) -> float:
        """Return how long it took; only of one that has ended."""
        assert self.ready_s is not None
        return self.ready_s - self.asked_s


class Result(msgspec.Struct, kw_only=True):
    """What came of a run."""

    updates: list[Update] = []
    published_s: list[float] = []
    """When each version stood at the trainer."""
    trainer_stall_s: float = 0.0
    """How long the trainer waited: for readers before it could overwrite, or in a stage of all."""
    seconds: float = 0.0
    link_bytes: dict[str, float] = {}
    """By tier of links, of all shards."""
    failed: int = 0
    """Rounds that had to be begun again."""
    stuck: int = 0
    """Updates that would not end: nothing came any more, though somebody waited."""
    questions: int = 0
    """What planners were asked."""
    steps: int = 0

    def count_links(self, fabric: "ClusterTopology") -> None:
        """Sum up what the links carried; modelled shards stand for the others."""
        for link in fabric.links:
            if link.carried:
                self.link_bytes[link.tier] = self.link_bytes.get(link.tier, 0.0) + link.carried / fabric.part

    def ended(self, kinds: "tuple[str, ...] | None" = None) -> list[Update]:
        """Return the updates that came to their end."""
        return [each for each in self.updates if each.ready_s is not None and (kinds is None or each.kind in kinds)]


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
