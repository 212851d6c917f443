"""The simulator itself: one seed is one history, its bugs are found, and nothing of them stays behind."""

import pytest

from tensorhub_agent import pace
from tensorhub_agent.op_unpublish import Draining
from tensorhub_simulator.bugs import BUGS, planted
from tensorhub_simulator.coverage import counted
from tensorhub_simulator.running import Totals, run


def test_some_seeds_keep_all_invariants() -> None:
    totals = Totals()
    with counted() as tables:
        assert run(range(1, 13), totals) is None
    assert totals.seeds == 12
    assert totals.reads > 0
    assert not tables["agent"].missing()


def test_one_seed_gives_one_history() -> None:
    one, other = Totals(), Totals()
    run([3], one)
    run([3], other)
    assert (one.steps, one.commands, one.reads) == (other.steps, other.commands, other.reads)


LAST_FOUND = {
    "close-waits": 25,
    "digest-not-checked": 26,
    "latest-per-shard": 9,
    "outcome-twice": 14,
    "second-writer": 72,
    "swap-per-shard": 11,
    "window-hogged": 8,
}
"""The seeds that found a bug when they were last looked for are tried first; what they show changes with the code."""


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        failure = run([LAST_FOUND.get(name, 1), *range(1, 101)], Totals())
    assert failure is not None, f"100 seeds did not find {name}"
    assert failure.story


def test_nothing_of_a_bug_or_of_the_scale_stays_behind() -> None:
    before = Draining.on_event, pace.LOCAL_BATCH_BYTES
    with planted("no-drain"):
        run([1], Totals())
    assert (Draining.on_event, pace.LOCAL_BATCH_BYTES) == before
