"""What moves a version to the instances of a job, in words of the cluster simulator. Pure."""

import msgspec

from tensorhub_simulator.performance.config import (
    PIECES_MIN,
    PIECES_READ,
    Cluster,
    Control,
    Model,
    Replicas,
    Site,
    wrongs,
)
from tensorhub_simulator.performance.model.topology import GBYTE


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


def wrong_with(weights: Weights, readers: int) -> str | None:
    """Return what is wrong, in a sentence; None: nothing."""
    return next(wrongs(cluster_of(weights, max(1, readers))), None)


def cluster_of(weights: Weights, readers: int) -> Cluster:
    """Return the cluster on which a version is published, and all readers ask at once."""
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
