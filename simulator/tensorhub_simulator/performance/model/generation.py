"""When a rollout can stop: the end of what it generates now. Pure, but for the chance that it is given."""

import math
import random
from statistics import NormalDist

from tensorhub_simulator.performance.config import Cluster, Generation

_P99 = NormalDist().inv_cdf(0.99)


def stops_after_s(cluster: Cluster, kind: str, replica: int, version: int) -> float:
    """Return how long after a publication a replica stops for it: the same for us and for every baseline."""
    if cluster.update != "at-boundary" or cluster.replicas[kind].memory_host:
        return 0.0
    return boundary_s(cluster.generation, random.Random(f"{cluster.seed}/{kind}/{replica}/{version}"))


def boundary_s(generation: Generation, rng: random.Random) -> float:
    """Return how long from a moment of chance to a replica's next step boundary.

    It generates batch after batch; each takes as long as its longest response. The moment falls into a batch with odds
    that are as great as the batch is long, and anywhere in it: so it is the rest of one that is seen, at least.
    """
    if generation.interrupted:
        return rng.random() * generation.token_s
    batches = [batch_s(generation, rng) for _ in range(8)]
    at = rng.random() * sum(batches)
    for batch in batches:
        if at < batch:
            return batch - at
        at -= batch
    return 0.0


def batch_s(generation: Generation, rng: random.Random) -> float:
    """Return how long a batch of responses takes."""
    sigma = math.log(generation.skew) / _P99
    longest = max(generation.tokens_median * math.exp(sigma * rng.gauss(0.0, 1.0)) for _ in range(generation.responses))
    return min(longest, generation.tokens_max) * generation.token_s
