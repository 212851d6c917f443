"""The closed form that no way of moving bytes can be below, ours or another's: bytes over what carries them. Pure.

A shard's bytes come into its GPU over its part of the network cards, and from replicas of its own host beside that. And
no byte of a version crosses to another site before it is published, so no replica there has all of it before a copy's
bytes have come over the lines into that site; who asks later than at the publication may find it there already.
"""

from tensorhub_simulator.performance.config import Cluster
from tensorhub_simulator.performance.model.topology import LOCAL_BYTES_S, ClusterTopology, build
from tensorhub_simulator.performance.results import Update

Who = tuple[str, int]


class Bound:
    """The bounds of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Lay the cluster out."""
        self._fabric: ClusterTopology = build(cluster)
        self._home = cluster.replicas[cluster.trainer].site
        self._shard = cluster.model.gbytes * 1e9 / cluster.model.shards
        self._near: dict[tuple[str, int], int] = {}
        """By host and number of a shard: how many replicas have that shard there."""
        for seats in self._fabric.seats.values():
            for seat in seats:
                at = (seat.host, seat.shard)
                self._near[at] = self._near.get(at, 0) + 1
        self._cards = {who: self._card_s(who) for who in self._fabric.seats}
        self._lines: dict[str, float] = {}
        for _, site in self._fabric.lines:
            into = sum(link.bytes_s for (_, end), (_, link) in self._fabric.lines.items() if end == site)
            self._lines[site] = self._shard * self._fabric.rails / into

    def least_s(self, who: Who, asked_after_s: float = 0.0) -> float:
        """Return how long a replica is filled at least that asks so long after the publication."""
        site = self._fabric.seats[who][0].site
        line_s = self._lines[site] if site != self._home else 0.0
        return max(self._cards[who], line_s - asked_after_s)

    def of(self, update: Update, published_s: float) -> float:
        """Return how long an update took at least."""
        return self.least_s((update.kind, update.replica), update.asked_s - published_s)

    def _card_s(self, who: Who) -> float:
        takes = []
        for seat in self._fabric.seats[who]:
            beside = LOCAL_BYTES_S if self._near[seat.host, seat.shard] > 1 else 0
            takes.append(self._shard / (seat.into.bytes_s + beside))
        return max(takes)
