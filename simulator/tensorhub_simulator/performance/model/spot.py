"""When spot instances come and go: a recorded trace, or one drawn by lot. Pure, but for the chance that it is given."""

import random
from typing import Literal

import msgspec

from tensorhub_simulator.performance.config import SPOT_AFTER_S, Cluster


class Move(msgspec.Struct, frozen=True, order=True):
    """One instance comes or goes."""

    at_s: float
    replica: int
    what: Literal["comes", "goes"]


def horizon_s(cluster: Cluster) -> float:
    """Return until when instances come and go: all that a recorded trace has happens."""
    return max(cluster.versions * cluster.every_s + SPOT_AFTER_S, last_event_s(cluster))


def last_event_s(cluster: Cluster) -> float:
    """Return when the last thing of a recorded trace happens: no run ends before that."""
    return max((at_s for at_s, _, _ in cluster.spot.events), default=0.0) if cluster.spot is not None else 0.0


def moves(cluster: Cluster, until_s: float) -> tuple[list[int], list[Move]]:
    """Return who is away at the beginning, and what happens up to a time."""
    spot = cluster.spot
    if spot is None:
        return [], []
    count = cluster.replicas[spot.kind].count
    away = list(range(count - round(count * spot.away_share), count))
    found = [Move(at_s, replica, what) for at_s, what, replica in spot.events if at_s <= until_s]
    if spot.stays_s is not None and spot.away_s is not None:
        for replica in range(count):
            found += _drawn(cluster, replica, is_here=replica not in away, until_s=until_s)
    return away, sorted(found)


def _drawn(cluster: Cluster, replica: int, *, is_here: bool, until_s: float) -> list[Move]:
    spot = cluster.spot
    assert spot is not None
    assert spot.stays_s is not None
    assert spot.away_s is not None
    rng = random.Random(f"{cluster.seed}/spot/{replica}")
    found: list[Move] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(1 / (spot.stays_s if is_here else spot.away_s))
        if at_s > until_s:
            return found
        found.append(Move(at_s, replica, "goes" if is_here else "comes"))
        is_here = not is_here
