"""Retention under whatever may be said: the last copy of what is retained goes by a crash, or not at all."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.catalog_lives import ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL, live

from tensorhub_common.catalog import retention
from tensorhub_common.protocol.log.events import kind_of
from tensorhub_simulator.drivers.catalog_commands import DrawnRulings

STEPS = 60
SEEDED_RUNS = 120
SEEDED_STEPS = 300


@given(st.data())
@settings(
    # An example is a whole life, and takes as long as ten of others do.
    max_examples=examples(0.12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_no_orderly_act_takes_the_last_copy(data: st.DataObject) -> None:
    world = live(DrawnRulings, lambda choices: data.draw(st.sampled_from(choices)), STEPS)
    assert world.replay() == world.catalog


@pytest.mark.parametrize("to_the_end", ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL)
def test_seeded_lives_come_to_everything_that_retention_does(to_the_end: bool) -> None:  # noqa: FBT001
    """What no life comes to is not tested."""
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
    seen: set[str] = set()
    for seed in range(SEEDED_RUNS):
        world = live(DrawnRulings, random.Random(seed).choice, SEEDED_STEPS)
        assert world.replay() == world.catalog
        seen.update(kind_of(event) for event in world.events)
        if wanted <= seen and not to_the_end:
            break
    assert wanted - seen == set()


def live_all(seeds: Iterable[int]) -> None:
    """Live each seed's life."""
    for seed in seeds:
        live(DrawnRulings, random.Random(seed).choice, SEEDED_STEPS)


FOUND_BY = {"spot": 4, "draining": 125}
"""The seeds that found the mistake when they were last looked for are tried first."""


@pytest.mark.parametrize("wrong", FOUND_BY)
def test_the_watcher_finds_what_counts_and_should_not(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A copy on spot, or one that drains, is taken for one that counts: some life shows it."""
    monkeypatch.setattr(retention, "counts_as_copy", WRONG[wrong])
    with pytest.raises(AssertionError, match=r"took the last copy|is held back"):
        live_all((FOUND_BY[wrong], *range(2 * SEEDED_RUNS)))


def _counts_spot(_catalog: object, replica: object, version: int) -> bool:
    return bool(getattr(replica, "version", None) == version)


def _counts_draining(_catalog: object, replica: object, version: int) -> bool:
    members = list(getattr(replica, "members", {}).values())
    whole = len(members) == getattr(replica, "shards", 0)
    return whole and not getattr(replica, "spot", False) and all(shard.version == version for shard in members)


WRONG = {"spot": _counts_spot, "draining": _counts_draining}
