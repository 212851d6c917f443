"""A trial of another source is worth its code: a chain through slow cards, with trials and without."""

from dataclasses import replace
from pathlib import Path

import pytest

import tensorhub_simulator.performance
from tensorhub_simulator.performance import comparison, strict_yaml
from tensorhub_simulator.performance.config import converted
from tensorhub_simulator.performance.model import shard
from tensorhub_simulator.performance.model.cluster import ClusterRun, run

SLOW_BY = 10
EVERY = 8
"""One replica of this many sends slowly."""


def longest_s(trials_max: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how long the slowest of 12 updates takes, of a standalone cluster with 64 GPUs."""
    monkeypatch.setattr(shard, "LIMITS", replace(shard.LIMITS, trials_max=trials_max))
    path = Path(tensorhub_simulator.performance.__file__).parent / "scenarios" / "standalone.yaml"
    cluster = comparison.grown(converted(strict_yaml.load(path.read_bytes()), path.name), 64)
    world = ClusterRun(comparison.changed(cluster, {"generation.interrupted": True}))
    readers = [places for (kind, _), places in world.fabric.seats.items() if kind != cluster.trainer]
    for places in readers[::EVERY]:
        for place in places:
            place.out.bytes_s //= SLOW_BY
    return max(update.took_s for update in run(world).updates)


def test_a_trial_takes_readers_off_a_slow_middle_of_their_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    alone_s = longest_s(0, monkeypatch)
    assert longest_s(8, monkeypatch) < alone_s / 2
