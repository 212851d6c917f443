"""Simulated worlds whose replicas are cut as a test says, and what their lives come to.

The simulator lets trainers publish and rollouts read in virtual time, kills, stops and cuts off whoever it likes, and
compares every byte that a shard commits or shows with what numpy makes of what was published.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import pytest

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.config import Cuttings
from tensorhub_simulator.faultsim.drawing import draw_config
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


def assert_comes_to(make: Callable[[int], World], seeds: Iterable[int], *wanted: str) -> None:
    """Live seeds until all of this was seen: so that what is shown of every life means something."""
    seen = Counter[str]()
    with scaled_down():
        for seed in seeds:
            world = make(seed)
            world.run()
            seen.update(world.first.job.counts)
            if all(seen[name] for name in wanted):
                return
    assert all(seen[name] for name in wanted), seen


def assert_found(bug: str, make: Callable[[int], World], seeds: Iterable[int]) -> None:
    """Plant a bug: one of these seeds finds it."""

    def live_all() -> None:
        for seed in seeds:
            make(seed).run()

    with planted(bug), scaled_down(), pytest.raises((Violation, LookupError, AssertionError)):
        live_all()
