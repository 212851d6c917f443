"""Replicas in fp8 fill each other out of shards that cut through blocks, whatever fails, with what numpy makes."""

from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.simulated import assert_comes_to, assert_found, lived, world_of

from tensorhub_simulator.faultsim.models.layouts import quantised_cuttings
from tensorhub_simulator.faultsim.world import World

SOON_FOUND: Final = {"values-before-amax": 1, "fold-lacks-a-part": 1, "table-of-another-read": 1}
"""Bugs of folds, and the seeds that found them when last looked for."""


def quantised(seed: int, *, calm: bool = False) -> World:
    rng = Random(seed * 31337)
    return world_of(seed, quantised_cuttings(rng, 1, rng.choice((1, 2, 3))), calm=calm)


@pytest.mark.timeout(900)
@given(st.integers(1, 2**32), st.booleans())
@example(seed=4699, calm=True)  # Whoever was inside waited for parts of blocks of those who were held.
@settings(max_examples=examples(0.16), suppress_health_check=[HealthCheck.data_too_large])
def test_every_byte_is_that_of_the_whole_tensor(seed: int, calm: bool) -> None:  # noqa: FBT001
    """And a fresh version reaches all of them once nothing fails any more."""
    lived(lambda: quantised(seed, calm=calm))


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    assert_comes_to(quantised, range(1, 9), "partials", "scales", "relayed", "closed: it made no progress")


@pytest.mark.parametrize("bug", SOON_FOUND)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert_found(bug, quantised, (SOON_FOUND[bug], *range(1, 41)))
