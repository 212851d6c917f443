"""Replicas of any shardings fill each other, whatever fails: planner, rounds, leases and transfers as they are."""

from random import Random
from typing import Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.shardings import Model, cuttings, fused, models
from tests.property.simulated import assert_comes_to, assert_found, lived, world_of

from tensorhub_simulator.faultsim.config import Cutting, Cuttings
from tensorhub_simulator.faultsim.models.layouts import unlike_cuttings
from tensorhub_simulator.faultsim.world import World

SOON_FOUND: Final = {
    "lease-not-asked": 40,
    "units-shown-early": 3,
    "tensor-stands-early": 9,
    "foreign-view": 3,
    "foreign-units-taken": 3,
    "root-of-another": 3,
}
"""Bugs of reads by programs, and the seeds that found them when last looked for."""


@st.composite
def cut(draw: st.DrawFn, model: Model, *, overlap: bool) -> Cutting:
    layouts = draw(cuttings(model, shards_max=3, overlap=overlap))
    if draw(st.booleans()):
        chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        layouts = tuple(fused(layout, chance) for layout in layouts)
    return layouts


@st.composite
def replicas(draw: st.DrawFn) -> Cuttings:
    model = draw(models(tensors_max=3, size_max=4))
    trainers = draw(st.lists(cut(model, overlap=False), min_size=1, max_size=2))
    rollouts = draw(st.lists(cut(model, overlap=True), min_size=1, max_size=3))
    return Cuttings(tuple(trainers), tuple(rollouts))


def unlike(seed: int) -> World:
    return world_of(seed, unlike_cuttings(Random(seed), 1, 3))


def far_mates(seed: int) -> World:
    """Return a seed's world in which three replicas of one layout stand in another site than the trainer."""
    cut = unlike_cuttings(Random(seed), 1, 1)
    return world_of(seed, Cuttings(cut.trainers, cut.rollouts * 3), sites=True, agents=5)


@pytest.mark.timeout(600)
@given(replicas(), st.integers(1, 2**32), st.booleans())
@settings(max_examples=examples(0.2), suppress_health_check=[HealthCheck.data_too_large])
def test_every_byte_is_numpys_or_the_error_is_right(drawn: Cuttings, seed: int, calm: bool) -> None:  # noqa: FBT001
    lived(lambda: world_of(seed, drawn, calm=calm))


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    assert_comes_to(unlike, range(1, 13), "units", "relayed", "closed: it made no progress")


@pytest.mark.parametrize("bug", SOON_FOUND)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert_found(bug, unlike, (SOON_FOUND[bug], *range(1, 121)))


@pytest.mark.parametrize("seeds", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_replicas_of_a_far_site_exchange_units_whatever_fails(seeds: int) -> None:
    """Every byte is compared, and nobody promises what it waits for; and it does happen."""
    worlds = [lived(lambda seed=seed: far_mates(seed)) for seed in range(1, seeds + 1)]  # type: ignore[misc]
    assert sum(world.first.job.counts["exchanges"] for world in worlds) > 0


@pytest.mark.long
def test_a_reader_that_takes_the_units_of_another_program_for_its_own_is_found() -> None:
    assert_found("other-units", far_mates, range(1, 41))
