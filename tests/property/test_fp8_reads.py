"""Replicas in fp8 fill each other out of shards that cut through blocks, whatever fails: nothing but what numpy makes.

The simulator lets trainers publish and rollouts read in virtual time, kills, stops and cuts off whoever it likes, and
compares every byte that a shard commits or shows with what the whole published tensor is quantised to.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.models.layouts import quantised_cuttings
from tensorhub_simulator.faultsim.mutants.planting import planted
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World

RIGHT: Final = frozenset(
    {"AgentUnavailable", "DrainTimeout", "NotPublished", "RegistryUnavailable", "ReplicaConflict", "RetentionFull"}
    | {"RoundTimeout", "VersionConflict", "VersionUnavailable"}
)
WANTED: Final = ("partials", "scales", "relayed", "closed: it made no progress")
SOON_FOUND: Final = {"values-before-amax": 1, "fold-lacks-a-part": 1, "table-of-another-read": 1}
"""Bugs of folds, and the seeds that found them when last looked for."""


def world_of(seed: int, *, calm: bool) -> World:
    """Return a seed's world, with replicas in fp8."""
    rng = Random(seed * 31337)
    cuttings = quantised_cuttings(rng, 1, rng.choice((1, 2, 3)))
    setting = replace(draw_config(seed, calm=calm), cuttings=cuttings, models=("policy",), beside=None)
    return World(seed, replace(setting, trainers=1, rollouts=len(cuttings.rollouts)))


def run_all(seeds: Iterable[int]) -> None:
    """Run these seeds."""
    for seed in seeds:
        world_of(seed, calm=False).run()


@pytest.mark.timeout(900)
@given(st.integers(1, 2**32), st.booleans())
@example(seed=4699, calm=True)  # Whoever was inside waited for parts of blocks of those who were held.
@settings(max_examples=examples(0.16), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_byte_is_that_of_the_whole_tensor(seed: int, calm: bool) -> None:  # noqa: FBT001
    """And a fresh version reaches all of them once nothing fails any more."""
    with scaled_down():
        world = world_of(seed, calm=calm)
        world.run()
    counts = world.first.job.counts
    assert {name.removeprefix("raised: ") for name in counts if name.startswith("raised: ")} <= RIGHT


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    """So that the test above means something: folds are made, also beside half-filled sources, and sources are lost."""
    seen = Counter[str]()
    with scaled_down():
        for seed in range(1, 9):
            world = world_of(seed, calm=False)
            world.run()
            seen.update(world.first.job.counts)
            if all(seen[name] for name in WANTED):
                break
    assert all(seen[name] for name in WANTED)


@pytest.mark.parametrize("bug", SOON_FOUND)
def test_a_planted_bug_is_found(bug: str) -> None:
    """With the seed that found it when last looked for, or another one after it."""
    with planted(bug), scaled_down(), pytest.raises((Violation, LookupError, AssertionError)):
        run_all((SOON_FOUND[bug], *range(1, 41)))
