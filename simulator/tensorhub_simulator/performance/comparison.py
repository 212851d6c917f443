"""A cluster against its baseline: the factor, how it grows, and its range over what may be otherwise.

Each pair of runs has the same cluster, the same chance and the same file; only what moves the weights differs.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import msgspec

from tensorhub_simulator.performance import baselines
from tensorhub_simulator.performance.config import PIECES_MIN, PIECES_READ, Cluster, ClusterError, check, converted
from tensorhub_simulator.performance.lower_bound import Bound
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.model.topology import GBYTE
from tensorhub_simulator.performance.results import Result, Spread, Update, spread
from tensorhub_simulator.performance.variation import put

WANTED: Final = {"global-stage": 6.7, "star": 4.8, "far-star": 19.0}
"""What the paper measured against each baseline."""

GPUS_MIN: Final = 2
"""A trainer and one who reads."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two took."""

    stall_s: Spread
    """Over updates of replicas that generate: from when it stopped until it went on."""
    waits_s: float
    """Of that on average before its first byte could come: for the control plane, or at the barrier for the slowest."""
    ready_s: Spread
    """From a version's publication until it stood there."""
    last_s: float
    """Until all had the first version who were there when it was published."""
    trainer_stall_s: float
    link_gbytes: dict[str, float]
    updates: int
    vanished: int
    """Updates that ended with their instance."""


class BaselineComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Both, beside what is possible at all."""

    name: str
    what: str
    gpus: int
    ours: Side
    baseline: Side
    bound_s: float
    """One shard's bytes over one network card; across sites one copy's bytes over the line, if that is longer."""
    questions: int
    """What planners were asked."""
    failed: int
    """Rounds that were begun again."""
    stuck: int
    """Updates of ours that would not end."""
    updates: tuple[tuple[Update, ...], tuple[Update, ...]] = ((), ())
    """Ours and the baseline's one by one, where they were asked for."""

    @property
    def factor(self) -> float | None:
        """Return how much longer the baseline stalls a GPU; 0 where ours has no end, None where nothing is filled."""
        if self.stuck:
            return 0.0
        if not self.ours.updates or not self.baseline.updates:
            return None
        return self.baseline.stall_s.mean / self.ours.stall_s.mean


def pair(
    cluster: Cluster, what: str = "", *, each: bool = False, tell: Callable[[int, int], None] | None = None
) -> BaselineComparison:
    """Run a cluster and its baseline; `each`: every replica's update is wanted."""
    ours = ClusterRun(cluster)
    result = run(ours, tell)
    other = baselines.run(cluster)
    return BaselineComparison(
        name=cluster.name,
        what=what,
        gpus=gpus_of(cluster),
        ours=_side(cluster, result),
        baseline=_side(cluster, other),
        bound_s=bound_s(cluster, result),
        questions=result.questions,
        failed=result.failed,
        stuck=result.stuck,
        updates=(tuple(result.updates), tuple(other.updates)) if each else ((), ()),
    )


def gpus_of(cluster: Cluster) -> int:
    """Return how many GPUs hold weights."""
    return cluster.model.shards * sum(each.count for each in cluster.replicas.values() if not each.memory_host)


def bound_s(cluster: Cluster, result: Result | None = None) -> float:
    """Return the least time that a reader's bytes can take, in closed form: on average over the updates of a run.

    Without one, or where it has none, over readers that ask at the publication.
    """
    bound, kinds = Bound(cluster), _generating(cluster)
    ended = result.ended(kinds) if result is not None else []
    if result is not None and ended:
        least = [bound.of(each, result.published_s[each.version - 1]) for each in ended]
    else:
        least = [bound.least_s((kind, 0)) for kind in kinds]
    return sum(least) / len(least)


def _generating(cluster: Cluster) -> tuple[str, ...]:
    """Return the kinds of replicas that lose time while they are filled."""
    return tuple(k for k, each in cluster.replicas.items() if k != cluster.trainer and not each.memory_host)


def _side(cluster: Cluster, result: Result) -> Side:
    ended = result.ended(_generating(cluster))
    published = result.published_s
    late = cluster.spot is not None
    first = [each.ready_s or 0.0 for each in ended if each.version == 1 and not (late and each.asked_s > published[0])]
    return Side(
        stall_s=spread([each.took_s for each in ended]),
        waits_s=spread([(each.started_s or each.asked_s) - each.asked_s for each in ended]).mean,
        ready_s=spread([(each.ready_s or 0.0) - published[each.version - 1] for each in ended]),
        last_s=max(first, default=published[0]) - published[0],
        trainer_stall_s=result.trainer_stall_s,
        link_gbytes={tier: round(nbytes / GBYTE, 3) for tier, nbytes in sorted(result.link_bytes.items())},
        updates=len(ended),
        vanished=sum(1 for each in result.updates if each.ready_s is None),
    )


def grown(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with this many GPUs in all; the trainer keeps its size, but for at most half of them."""
    assert cluster.grow is not None
    others = (cluster.trainer, cluster.grow.kind)
    beside = sum(each.count for kind, each in cluster.replicas.items() if kind not in others and not each.memory_host)
    copies = gpus // cluster.model.shards - beside
    if copies < GPUS_MIN:
        needed = (beside + GPUS_MIN) * cluster.model.shards
        raise ClusterError(
            f"{cluster.name} can't have {gpus} GPUs: a trainer, a reader and all others of {cluster.model.shards} GPUs "
            f"each take {needed} at least (grow.gpus)"
        )
    trainers = min(cluster.replicas[cluster.trainer].count, copies // 2)
    shard_mib = cluster.model.gbytes * GBYTE / cluster.model.shards / (1 << 20)
    coarse_mib = shard_mib / max(PIECES_READ // copies, PIECES_MIN)
    return changed(
        cluster,
        {
            f"replicas.{cluster.trainer}.count": trainers,
            f"replicas.{cluster.grow.kind}.count": copies - trainers,
            "model.piece_mib": max(cluster.model.piece_mib, coarse_mib),
        },
    )


def changed(cluster: Cluster, values: dict[str, Any]) -> Cluster:
    """Return the cluster with other values at some paths, such as `links.0.rtt_ms`. Raises `ClusterError`."""
    tree = msgspec.to_builtins(cluster)
    try:
        put(tree, values)
    except LookupError as path:
        raise ClusterError(f"{cluster.name}: nothing stands at {str(path)!r}: name a field as in the file") from None
    name = f"{cluster.name} with {values}"
    made = converted(tree, name)
    check(made, name)
    return made


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A pair to be run."""

    cluster: Cluster
    what: str = ""
    """What is otherwise than in the file; empty for the file itself."""
    kind: Literal["itself", "size", "variation"] = "itself"


def cases(cluster: Cluster, *, alone: bool = False) -> Iterator[Case]:
    """Yield the cluster itself; unless `alone`, the sizes that it grows to, and what may be otherwise."""
    yield Case(cluster=cluster)
    if alone:
        return
    for gpus in cluster.grow.gpus if cluster.grow is not None else ():
        yield Case(cluster=grown(cluster, gpus), what=f"{gpus} GPUs", kind="size")
    for variation in cluster.vary:
        yield Case(cluster=changed(cluster, variation.set), what=variation.what, kind="variation")


def pair_of(case: Case) -> BaselineComparison:
    """Run a case."""
    return pair(case.cluster, case.what, each=case.kind == "itself")
