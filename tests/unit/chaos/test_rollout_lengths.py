"""The test of lengths takes what is drawn as it should be, and finds the biases that failures could bring."""

import numpy as np
import numpy.typing as npt
import pytest
from tests.chaos.rollout_lengths import against_geometric

MEAN, TOKENS_MAX, COUNT = 60.0, 400, 8000


def drawn(seed: int) -> npt.NDArray[np.int64]:
    return np.minimum(np.random.default_rng(seed).geometric(1 / MEAN, COUNT), TOKENS_MAX)


def test_lengths_that_are_drawn_as_the_engine_draws_them_hold() -> None:
    verdicts = [against_geometric(drawn(seed), MEAN, TOKENS_MAX) for seed in range(200)]
    assert all(each.holds for each in verdicts)
    deviates = [each.deviate for each in verdicts]
    assert abs(np.mean(deviates)) < 0.3
    assert 0.8 < np.std(deviates) < 1.2


@pytest.mark.parametrize("seed", range(5))
def test_a_bias_is_found(seed: int) -> None:
    lengths = drawn(seed)
    again = drawn(seed + 100)
    shorter = np.where(np.random.default_rng(seed).random(COUNT) < 0.2, np.minimum(lengths, again), lengths)
    assert not against_geometric(shorter, MEAN, TOKENS_MAX).holds, "one time in five the shorter of two wins"
    assert not against_geometric(lengths[lengths < 200], MEAN, TOKENS_MAX).holds, "the longest are lost"
    assert not against_geometric(np.maximum(lengths - 3, 1), MEAN, TOKENS_MAX).holds, "three tokens are lost"
