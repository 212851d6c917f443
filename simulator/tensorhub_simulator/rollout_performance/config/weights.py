"""What moves a version to the instances of a job, in words of the cluster simulator. Pure."""

import msgspec

from tensorhub_simulator.performance.config import (
    PIECES_MIN,
    PIECES_READ,
    Cluster,
    Control,
    Link,
    Model,
    Replicas,
    Site,
    wrongs,
)
from tensorhub_simulator.performance.model.topology import GBYTE
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts


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


class FarSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instances at another site than the trainer's. They are there from the beginning, and stay."""

    instances: int
    price: float
    """Money for an hour of one."""
    gbit_s: float
    """What the line between the sites carries in each direction, for all together."""
    rtt_ms: float
    """From one site to the other and back; messages take half of it on each way too."""
    streams: int = 8
    """One transfer over the line has so many TCP streams."""
    window_mib: float = 16.0
    """The window of each."""
    loss: float = 0.0
    nic_gbit_s: float = 200.0
    """Each GPU of the site has a network card of its own."""
    engine: EngineCosts | None = None
    """What an instance there can do, where it is of another kind."""


def wrong_with(weights: Weights, readers: int, far: FarSite | None = None) -> str | None:
    """Return what is wrong, in a sentence; None: nothing."""
    return next(wrongs(cluster_of(weights, max(1, readers), far, 0 if far is None else far.instances)), None)


def cluster_of(weights: Weights, readers: int, far: FarSite | None = None, far_readers: int = 0) -> Cluster:
    """Return the cluster on which a version is published, and all readers of both sites ask at once."""
    shard_mib = weights.gbytes * GBYTE / max(1, weights.shards) / (1 << 20)
    sites = {"here": _site(weights, weights.nic_gbit_s)}
    replicas = {"trainer": Replicas(site="here", count=weights.trainer_copies)}
    links: tuple[Link, ...] = ()
    if readers:
        replicas["rollout"] = Replicas(site="here", count=readers)
    if far is not None and far_readers:
        sites["far"] = _site(weights, far.nic_gbit_s)
        replicas["far"] = Replicas(site="far", count=far_readers)
        link = Link(
            between=("here", "far"),
            gbit_s=far.gbit_s,
            rtt_ms=far.rtt_ms,
            loss=far.loss,
            window_mib=far.window_mib,
            streams=far.streams,
        )
        links = (link,)
    return Cluster(
        name="weights",
        model=Model(
            gbytes=weights.gbytes,
            shards=weights.shards,
            piece_mib=max(weights.piece_mib, shard_mib / max(PIECES_READ // (readers + far_readers), PIECES_MIN)),
        ),
        sites=sites,
        links=links,
        replicas=replicas,
        baseline="star",
        control=weights.control,
        # The GPUs of a copy have equal bytes and cards of their own: one stands for all.
        rails=1,
    )


def _site(weights: Weights, nic_gbit_s: float) -> Site:
    return Site(gpus_per_host=weights.shards, nics_per_host=weights.shards, nic_gbit_s=nic_gbit_s)
