"""When a version's weights have come to each instance: by the cluster simulator's transfers.

The cluster's model runs by itself, with the production planner, for as many readers as a fleet has: a publication on
the trainer's copies, and all readers ask at once. What comes of it, one time for each reader, is what the job's model
takes. Which instance has which of these times is drawn by lot. So a transfer does not know what else moves: machines
that come within it read as if they were alone, and one that goes takes nobody's source.
"""

from functools import cache
from random import Random
from typing import Final

from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.config.weights import FarSite, Weights, cluster_of

READERS_STEP: Final = 2
"""The model runs for 1, 2, 4, ... readers; between them the next larger fleet's times are taken at equal ranks."""


def arrivals_s(
    weights: Weights, readers: int, far: FarSite | None = None, far_readers: int = 0
) -> tuple[list[float], list[float]]:
    """Return how long after the publication each reader has a version, in seconds, the first first.

    Of the trainer's site, and of the far one. Raises `ScenarioError`.
    """
    sizes = _size(readers), _size(far_readers)
    if not any(sizes):
        return [], []
    here, there = _modelled(weights, far, *sizes)
    return _at_equal_ranks(here, readers), _at_equal_ranks(there, far_readers)


def _size(readers: int) -> int:
    size = 1
    while size < readers:
        size *= READERS_STEP
    return size if readers else 0


def _at_equal_ranks(found: tuple[float, ...], readers: int) -> list[float]:
    return [found[int((number + 0.5) * len(found) / readers)] for number in range(readers)]


@cache
def _modelled(
    weights: Weights, far: FarSite | None, readers: int, far_readers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    result = run(ClusterRun(cluster_of(weights, readers, far, far_readers)))

    def times(kind: str, count: int) -> tuple[float, ...]:
        found = sorted((each.ready_s or 0.0) - result.published_s[0] for each in result.ended((kind,)))
        if len(found) != count:
            raise ScenarioError(
                f"{count - len(found)} of {count} readers never had the version: where a line or a card is this slow, "
                "name smaller pieces (weights.piece_mib)"
            )
        return tuple(found)

    return times("rollout", readers), times("far", far_readers)


class Arrivals:
    """How long versions take to the machines of one job; which has which time is drawn by lot."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin with the lots of a scenario's seed."""
        self._weights, self._load_s, self._far = scenario.weights, scenario.spot.load_s, scenario.far
        self._random = Random(f"arrivals {scenario.seed}")

    def one_s(self, *, is_far: bool = False) -> float:
        """Return how long a version takes to one machine that asks alone, in seconds, at one site or the other."""
        return self.each_s(0, 1)[1][0] if is_far else self.each_s(1, 0)[0][0]

    def each_s(self, here: int, there: int) -> tuple[list[float], list[float]]:
        """Return the same of machines that ask at once: how many at the trainer's site, and at the far one."""
        if self._weights is None:
            assert self._load_s is not None
            return [self._load_s] * here, [self._load_s] * there
        found = arrivals_s(self._weights, here, self._far if there else None, there)
        for each in found:
            self._random.shuffle(each)
        return found
