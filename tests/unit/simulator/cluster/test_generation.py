"""Step boundaries: within what can be, and the more unequal the lengths the farther."""

import random

import pytest

from tensorhub_simulator.performance.config import Generation
from tensorhub_simulator.performance.model.generation import batch_s, boundary_s


def mean(generation: Generation) -> float:
    rng = random.Random(1)
    return sum(boundary_s(generation, rng) for _ in range(500)) / 500


def test_nothing_takes_longer_than_the_longest_response() -> None:
    generation = Generation(tokens_max=1000, token_s=0.01, skew=20)
    rng = random.Random(1)
    assert max(batch_s(generation, rng) for _ in range(500)) == pytest.approx(10.0)
    assert all(0 <= boundary_s(generation, rng) <= 10.0 for _ in range(500))


def test_what_can_be_interrupted_stops_at_the_next_token() -> None:
    assert mean(Generation(interrupted=True, token_s=0.02)) == pytest.approx(0.01, rel=0.2)


def test_more_responses_and_more_skew_make_the_boundary_farther() -> None:
    near = mean(Generation(responses=1, skew=2, tokens_max=1e9))
    assert near < mean(Generation(responses=32, skew=2, tokens_max=1e9))
    assert near < mean(Generation(responses=1, skew=10, tokens_max=1e9))


def test_lengths_have_the_percentile_that_is_named() -> None:
    generation = Generation(responses=1, skew=10, tokens_median=100, tokens_max=1e9, token_s=1)
    rng = random.Random(1)
    lengths = sorted(batch_s(generation, rng) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(100, rel=0.05)
    assert lengths[19_800] == pytest.approx(1000, rel=0.1)
