"""Retention under whatever may be said: the last copy of what is retained goes by a crash, or not at all."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.catalog_rulings import live
from tests.unit.common.catalog_world import World

from tensorhub_common.catalog import retention
from tensorhub_common.wire.events import kind_of

STEPS = 60
SEEDED_RUNS = 120
SEEDED_STEPS = 300


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_orderly_act_takes_the_last_copy(data: st.DataObject) -> None:
    world = World()
    live(world, lambda choices: data.draw(st.sampled_from(choices)), STEPS)
    assert world.replay() == world.catalog


def test_seeded_lives_come_to_everything_that_retention_does() -> None:
    """What no life comes to is not tested."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDED_RUNS):
        world = World()
        live(world, random.Random(seed).choice, SEEDED_STEPS)
        assert world.replay() == world.catalog
        seen.update(kind_of(event) for event in world.events)
    wanted = {
        "unpublish.held",
        "shard.stays",
        "version.pinned",
        "version.unpinned",
        "version.kept",
        "version.exposed",
        "model.retention",
        "model.rewound",
        "copy.placed",
        "job.quota",
        "agent.draining",
        "agent.drained",
        "round.overtaken",
    }
    assert wanted - set(seen) == set()


def live_all() -> None:
    """Live every seed's life."""
    for seed in range(SEEDED_RUNS):
        live(World(), random.Random(seed).choice, SEEDED_STEPS)


@pytest.mark.parametrize("wrong", ["spot", "draining"])
def test_the_watcher_finds_what_counts_and_should_not(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A copy on spot, or one that drains, is taken for one that counts: some life shows it."""
    monkeypatch.setattr(retention, "counts", WRONG[wrong])
    with pytest.raises(AssertionError, match=r"took the last copy|is held back"):
        live_all()


def _counts_spot(_catalog: object, replica: object, version: int) -> bool:
    return bool(getattr(replica, "version", None) == version)


def _counts_draining(_catalog: object, replica: object, version: int) -> bool:
    members = list(getattr(replica, "members", {}).values())
    whole = len(members) == getattr(replica, "shards", 0)
    return whole and not getattr(replica, "spot", False) and all(shard.version == version for shard in members)


WRONG = {"spot": _counts_spot, "draining": _counts_draining}
