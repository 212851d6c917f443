"""Seeds on several cores come to what they come to on one."""

import pytest

from tensorhub_simulator.faultsim.mutants.planting import planted
from tensorhub_simulator.faultsim.runner.parallel import CHUNK_SEEDS, spread
from tensorhub_simulator.faultsim.runner.run import Totals, run


def test_the_lowest_seed_that_fails_is_told() -> None:
    # Several of these seeds fail, so which one is told is not by chance of who ends first.
    seeds = range(1, 2 * CHUNK_SEEDS + 1)
    with planted("no-drain"):
        alone = run(seeds, Totals())
    result = spread(seeds, bug="no-drain", calm=False, processes=2, title="seeds")
    assert alone is not None
    assert result.failure is not None
    assert (result.failure.seed, result.failure.what) == (alone.seed, alone.what)


@pytest.mark.slow
def test_totals_and_transitions_are_those_of_all_seeds() -> None:
    seeds = range(1, CHUNK_SEEDS + 3)
    totals = Totals()
    assert run(seeds, totals) is None
    result = spread(seeds, bug=None, calm=False, processes=2, title="seeds")
    assert result.failure is None
    assert (result.totals.steps, result.totals.counts) == (totals.steps, totals.counts)
    assert result.tallies["agent"].made.total() > 0
