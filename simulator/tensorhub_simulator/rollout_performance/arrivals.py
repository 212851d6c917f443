"""When a version's weights have come to each instance: by the cluster simulator's transfers.

The cluster's model runs by itself, with the production planner, for as many readers as a fleet has: a publication on
the trainer's copies, and all readers ask at once. What comes of it, one time for each reader, is what the job's model
takes. Which instance has which of these times is drawn by lot. So a transfer does not know what else moves: machines
that come within it read as if they were alone, and one that goes takes nobody's source.
"""

from functools import cache
from typing import Final

from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.rollout_performance.weights import Weights, cluster_of

READERS_STEP: Final = 2
"""The model runs for 1, 2, 4, ... readers; between them the next larger fleet's times are taken at equal ranks."""


def arrivals_s(weights: Weights, readers: int) -> list[float]:
    """Return how long after the publication each reader has a version, the first first."""
    if not readers:
        return []
    size = 1
    while size < readers:
        size *= READERS_STEP
    found = _modelled(weights, size)
    return [found[int((number + 0.5) * size / readers)] for number in range(readers)]


@cache
def _modelled(weights: Weights, readers: int) -> tuple[float, ...]:
    result = run(ClusterRun(cluster_of(weights, readers)))
    found = sorted((each.ready_s or 0.0) - result.published_s[0] for each in result.ended(("rollout",)))
    assert len(found) == readers, f"{readers - len(found)} of {readers} readers never had the version"
    return tuple(found)
