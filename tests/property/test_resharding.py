"""Replicas of any shardings fill each other, whatever fails: planner, rounds, leases and transfers as they are."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.shardings import Model, cuttings, fused, models

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.config import Cutting, Cuttings
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.models.layouts import quantised_cuttings, unlike_cuttings
from tensorhub_simulator.faultsim.mutants.planting import planted
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World

RIGHT: Final = frozenset(
    {"AgentUnavailable", "DrainTimeout", "NotPublished", "RegistryUnavailable", "ReplicaConflict", "RetentionFull"}
    | {"RoundTimeout", "VersionConflict", "VersionUnavailable"}
)
"""What a call may raise here. All layouts together have everything, so none differs (`LayoutMismatch`), and nobody
damages a byte under a lease that holds (`IntegrityError`)."""


def world_of(seed: int, cuttings: Cuttings, *, calm: bool = False, **more: Any) -> World:
    trainers, rollouts = len(cuttings.trainers), len(cuttings.rollouts)
    setting = replace(draw_config(seed, calm=calm), models=("policy",), beside=None, **more)
    return World(seed, replace(setting, cuttings=cuttings, trainers=trainers, rollouts=rollouts))


def lived(make: Callable[[], World]) -> World:
    """Live a world to its end: every byte is right, or the error is."""
    with scaled_down():
        world = make()
        world.run()
    raised = {name.removeprefix("raised: ") for name in world.first.job.counts if name.startswith("raised: ")}
    assert raised <= RIGHT
    return world


def assert_found(bug: str, make: Callable[[int], World], seeds: Iterable[int]) -> None:
    """Plant a bug: one of these seeds finds it."""

    def live_all() -> None:
        for seed in seeds:
            make(seed).run()

    with planted(bug), scaled_down(), pytest.raises((Violation, LookupError, AssertionError)):
        live_all()


SOON_FOUND: Final = {
    "lease-not-asked": 37,
    "units-shown-early": 3,
    "tensor-stands-early": 9,
    "foreign-view": 3,
    "foreign-units-taken": 3,
    "root-of-another": 3,
}
"""Bugs of reads by programs, and the seeds that found them when last looked for."""


SOON_FOUND_IN_FP8: Final = {"values-before-amax": 1, "fold-lacks-a-part": 1, "table-of-another-read": 1}
"""The same of folds."""


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


def quantised(seed: int, *, calm: bool = False) -> World:
    rng = Random(seed * 31337)
    return world_of(seed, quantised_cuttings(rng, 1, rng.choice((1, 2, 3))), calm=calm)


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
@pytest.mark.timeout(900)
@given(st.integers(1, 2**32), st.booleans())
@example(seed=4699, calm=True)  # Whoever was inside waited for parts of blocks of those who were held.
@settings(max_examples=examples(0.16), suppress_health_check=[HealthCheck.data_too_large])
def test_every_byte_of_fp8_is_that_of_the_whole_tensor(seed: int, calm: bool) -> None:  # noqa: FBT001
    """And a fresh version reaches all of them once nothing fails any more."""
    lived(lambda: quantised(seed, calm=calm))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "seeds", "wanted"), [(unlike, range(1, 13), ("units",)), (quantised, range(1, 9), ("partials", "scales"))]
)
def test_chance_goes_everywhere(make: Callable[[int], World], seeds: range, wanted: tuple[str, ...]) -> None:
    seen = Counter[str]()
    with scaled_down():
        for seed in seeds:
            world = make(seed)
            world.run()
            seen.update(world.first.job.counts)
    assert all(seen[name] for name in (*wanted, "relayed", "closed: it made no progress")), seen


@pytest.mark.long
@pytest.mark.parametrize("bug", [*SOON_FOUND, *SOON_FOUND_IN_FP8])
def test_a_planted_bug_is_found(bug: str) -> None:
    if bug in SOON_FOUND:
        assert_found(bug, unlike, (SOON_FOUND[bug], *range(1, 121)))
    else:
        assert_found(bug, quantised, (SOON_FOUND_IN_FP8[bug], *range(1, 41)))


@pytest.mark.parametrize("seeds", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_replicas_of_a_far_site_exchange_units_whatever_fails(seeds: int) -> None:
    """Every byte is compared, and nobody promises what it waits for; and it does happen."""
    worlds = [lived(lambda seed=seed: far_mates(seed)) for seed in range(1, seeds + 1)]  # type: ignore[misc]
    assert sum(world.first.job.counts["exchanges"] for world in worlds) > 0


@pytest.mark.long
def test_a_reader_that_takes_the_units_of_another_program_for_its_own_is_found() -> None:
    assert_found("other-units", far_mates, range(1, 41))
