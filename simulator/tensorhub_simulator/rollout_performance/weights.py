"""When a version's weights have come to each instance: by the cluster simulator's transfers.

The cluster's model runs by itself, with the production planner, for as many readers as a fleet has: a publication on
the trainer's copies, and all readers ask at once. What comes of it, one time for each reader, is what the job's model
takes. Which instance has which of these times is drawn by lot. So a transfer does not know what else moves: machines
that come within it read as if they were alone, and one that goes takes nobody's source.
"""

from functools import cache
from typing import Final

import msgspec

from tensorhub_simulator.performance.comparison import PIECES_MIN, PIECES_READ
from tensorhub_simulator.performance.config import Cluster, Control, Model, Replicas, Site, wrongs
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.model.topology import GBYTE

READERS_STEP: Final = 2
"""The model runs for 1, 2, 4, ... readers; between them the next larger fleet's times are taken at equal ranks."""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a version is, and what it is moved over."""

    gbytes: float
    shards: int
    """GPUs of one instance."""
    nic_gbit_s: float
    """Each GPU has a network card of its own; instances share no host."""
    trainer_copies: int = 1
    piece_mib: float = 64.0
    control: Control = Control()


def arrivals_s(weights: Weights, readers: int) -> list[float]:
    """Return how long after the publication each reader has a version, the first first."""
    if not readers:
        return []
    size = 1
    while size < readers:
        size *= READERS_STEP
    found = _modelled(weights, size)
    return [found[int((number + 0.5) * size / readers)] for number in range(readers)]


def wrong_with(weights: Weights, readers: int) -> str | None:
    """Return what is wrong, in a sentence; None: nothing."""
    return next(wrongs(_cluster(weights, max(1, readers))), None)


@cache
def _modelled(weights: Weights, readers: int) -> tuple[float, ...]:
    result = run(ClusterRun(_cluster(weights, readers)))
    found = sorted((each.ready_s or 0.0) - result.published_s[0] for each in result.ended(("rollout",)))
    assert len(found) == readers, f"{readers - len(found)} of {readers} readers never had the version"
    return tuple(found)


def _cluster(weights: Weights, readers: int) -> Cluster:
    shard_mib = weights.gbytes * GBYTE / max(1, weights.shards) / (1 << 20)
    return Cluster(
        name="weights",
        model=Model(
            gbytes=weights.gbytes,
            shards=weights.shards,
            piece_mib=max(weights.piece_mib, shard_mib / max(PIECES_READ // readers, PIECES_MIN)),
        ),
        sites={"here": Site(gpus_per_host=weights.shards, nics_per_host=weights.shards, nic_gbit_s=weights.nic_gbit_s)},
        replicas={
            "trainer": Replicas(site="here", count=weights.trainer_copies),
            "rollout": Replicas(site="here", count=readers),
        },
        baseline="star",
        control=weights.control,
        # The GPUs of a copy have equal bytes and cards of their own: one stands for all.
        rails=1,
    )
