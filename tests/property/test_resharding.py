"""Replicas of any shardings fill each other, whatever fails: planner, rounds, leases and transfers as they are.

Hypothesis draws the tensors and how each replica is cut; the simulator lets trainers publish and rollouts read in
virtual time, kills, stops and cuts off whoever it likes, and compares every byte that a shard commits or shows to a
worker with what numpy makes of the bytes that were published.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.shardings import Model, cuttings, fused, models

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.config import Cutting, Cuttings
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.models.layouts import unlike_cuttings
from tensorhub_simulator.faultsim.mutants.planting import planted
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World

RIGHT: Final = frozenset(
    {"AgentUnavailable", "DrainTimeout", "NotPublished", "RegistryUnavailable", "ReplicaConflict", "RetentionFull"}
    | {"RoundTimeout", "VersionConflict", "VersionUnavailable"}
)
"""What a call may raise here. All layouts together have everything, so none differs (`LayoutMismatch`), and nobody
damages a byte under a lease that holds (`IntegrityError`)."""

WANTED: Final = ("units", "relayed", "closed: it made no progress")

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
    """Cut a replica, at times with its tensors fused."""
    layouts = draw(cuttings(model, shards_max=3, overlap=overlap))
    if draw(st.booleans()):
        chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        layouts = tuple(fused(layout, chance) for layout in layouts)
    return layouts


@st.composite
def replicas(draw: st.DrawFn) -> Cuttings:
    """Draw who publishes, and who reads."""
    model = draw(models(tensors_max=3, size_max=4))
    trainers = draw(st.lists(cut(model, overlap=False), min_size=1, max_size=2))
    rollouts = draw(st.lists(cut(model, overlap=True), min_size=1, max_size=3))
    return Cuttings(tuple(trainers), tuple(rollouts))


def world_of(seed: int, cuttings: Cuttings, *, calm: bool) -> World:
    """Return a seed's world, with these replicas in place of its own."""
    trainers, rollouts = len(cuttings.trainers), len(cuttings.rollouts)
    setting = replace(draw_config(seed, calm=calm), cuttings=cuttings, models=("policy",), beside=None)
    return World(seed, replace(setting, trainers=trainers, rollouts=rollouts))


def raised(world: World) -> set[str]:
    """Name the errors that calls raised."""
    counts = world.first.job.counts
    return {name.removeprefix("raised: ") for name in counts if name.startswith("raised: ")}


def run_all(seeds: Iterable[int]) -> None:
    """Run seeds in which everybody is cut otherwise."""
    for seed in seeds:
        world_of(seed, unlike_cuttings(Random(seed), 1, 3), calm=False).run()


@pytest.mark.timeout(600)
@given(replicas(), st.integers(1, 2**32), st.booleans())
@settings(max_examples=examples(0.2), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_byte_is_numpys_or_the_error_is_right(drawn: Cuttings, seed: int, calm: bool) -> None:  # noqa: FBT001
    """And a fresh version reaches all of them once nothing fails any more."""
    with scaled_down():
        world = world_of(seed, drawn, calm=calm)
        world.run()
    assert raised(world) <= RIGHT


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    """So that the test above means something: units come, also from half-filled sources, and sources are lost.

    Seeds are tried until all of it was seen.
    """
    seen = Counter[str]()
    with scaled_down():
        for seed in range(1, 13):
            world = world_of(seed, unlike_cuttings(Random(seed), 1, 3), calm=False)
            world.run()
            seen.update(world.first.job.counts)
            if all(seen[name] for name in WANTED):
                break
    assert all(seen[name] for name in WANTED)


@pytest.mark.parametrize("bug", SOON_FOUND)
def test_a_planted_bug_is_found(bug: str) -> None:
    """With the seed that found it when last looked for, or another one after it."""
    with planted(bug), scaled_down(), pytest.raises((Violation, LookupError, AssertionError)):
        run_all((SOON_FOUND[bug], *range(1, 121)))


def far_mates(seed: int) -> World:
    """Return a seed's world in which three replicas of one layout stand in another site than the trainer."""
    cut = unlike_cuttings(Random(seed), 1, 1)
    setting = replace(draw_config(seed, calm=False), models=("policy",), beside=None, sites=True, agents=5)
    cuttings = Cuttings(cut.trainers, cut.rollouts * 3)
    return World(seed, replace(setting, cuttings=cuttings, trainers=1, rollouts=3))


def run_far_mates(seeds: Iterable[int]) -> int:
    """Run seeds; return how many leases counted on units that were promised."""
    exchanges = 0
    for seed in seeds:
        world = far_mates(seed)
        world.run()
        exchanges += world.first.job.counts["exchanges"]
    return exchanges


@pytest.mark.parametrize("seeds", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_replicas_of_a_far_site_exchange_units_whatever_fails(seeds: int) -> None:
    """Every byte is compared, and nobody promises what it waits for; and it does happen."""
    with scaled_down():
        assert run_far_mates(range(1, seeds + 1)) > 0


@pytest.mark.long
def test_a_reader_that_takes_the_units_of_another_program_for_its_own_is_found() -> None:
    with planted("other-units"), scaled_down(), pytest.raises((Violation, LookupError, AssertionError)):
        run_far_mates(range(1, 41))
