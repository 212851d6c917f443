"""The simulator itself: one seed is one history, its bugs are found, and nothing of them stays behind."""

from typing import Any

import pytest

from tensorhub_agent.core.operations.drain import DrainOperation
from tensorhub_common.layout import layout
from tensorhub_simulator.__main__ import FINDING_SEEDS
from tensorhub_simulator.faultsim.drawing import CROWD_READERS, is_crowd
from tensorhub_simulator.faultsim.mutants import agent
from tensorhub_simulator.faultsim.mutants.planting import BUGS, planted
from tensorhub_simulator.faultsim.mutants.replacement import Owner, Replacement
from tensorhub_simulator.faultsim.runner.parallel import processes_here, spread
from tensorhub_simulator.faultsim.runner.run import MUTANTS, Totals, run
from tensorhub_simulator.faultsim.runner.transitions import counted


def test_some_seeds_keep_all_invariants() -> None:
    totals = Totals()
    with counted() as tables:
        assert run(range(1, 7), totals) is None
    assert totals.seeds == 6
    assert totals.counts["reads"] > 0
    assert totals.counts["patched"] > 0
    assert not tables["agent"].missing()


def test_one_seed_gives_one_history() -> None:
    one, other = Totals(), Totals()
    run([3], one)
    run([3], other)
    assert (one.steps, one.counts) == (other.steps, other.counts)


def test_a_patch_for_other_bytes_than_stand_there_is_found_by_the_digest_and_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every source gives the last delta that it has, from whatever version that leads; seeds are tried until it did.

    The first is the one that did when last looked for.
    """
    for each in agent.patch_from_another_version():
        for owner, name in each.places():
            monkeypatch.setattr(owner, name, each.wrong)
    totals = Totals()
    for seed in (37, *range(1, 121)):
        assert run([seed], totals) is None
        if totals.counts["mispatched"]:
            break
    assert totals.counts["mispatched"] > 0


SOON_FOUND = {
    "digests-of-the-next": 4,
    "filled-forgotten": 1,
    "no-drain": 1,
    "outcome-twice": 20,
    "patch-not-judged": 7,
    "place-kept": 25,
    "unpublish-forgotten": 2,
}
"""Some of the bugs, of reads, a drain and a registry, and the seeds that found them when last looked for."""


def of(owner: Owner, name: Any) -> Any:
    return owner[name] if isinstance(owner, dict) else vars(owner)[name]


@pytest.mark.parametrize("name", BUGS)
def test_what_a_bug_replaces_exists(name: str) -> None:
    """Code that is renamed leaves no bug behind that replaces nothing: `planted` raises then."""
    replaced = [(*place, each.right) for each in BUGS[name]() for place in each.places()]
    assert len(replaced) >= len(BUGS[name]())
    with planted(name):
        assert all(of(owner, where) is not right for owner, where, right in replaced)
    assert all(of(owner, where) is right for owner, where, right in replaced)


def test_a_bug_that_names_what_is_not_there_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error would be taken for a broken invariant, so the run ends with it."""
    scope: dict[str, Any] = {}
    exec(compile("def stale(self, *_): self.core.renamed_since()", f"{MUTANTS}/stale.py", "exec"), scope)  # noqa: S102 (a bug like the others, by its file)
    monkeypatch.setitem(BUGS, "stale", lambda: [Replacement(DrainOperation.on_event, scope["stale"])])
    with planted("stale"), pytest.raises(AttributeError, match="renamed_since"):
        run(range(1, 9), Totals())


@pytest.mark.parametrize("name", SOON_FOUND)
def test_a_planted_bug_is_found(name: str) -> None:
    """What a seed shows changes with the code, so others are tried after it; `make bugs` looks for every bug."""
    with planted(name):
        failure = run([SOON_FOUND[name], *range(1, 101)], Totals())
    assert failure is not None, f"100 seeds did not find {name}"
    assert failure.story


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_found(name: str) -> None:
    result = spread(range(1, FINDING_SEEDS + 1), bug=name, calm=False, processes=processes_here(), title=name)
    assert result.failure is not None, f"{FINDING_SEEDS} seeds did not find {name}"
    assert result.failure.story


def test_a_crowd_of_readers_gets_its_version_though_the_holder_is_stopped() -> None:
    totals = Totals()
    assert is_crowd(25)
    assert run([25], totals) is None
    assert totals.counts["reads"] >= min(CROWD_READERS)
    assert totals.counts["faults: stops"] == 1
    assert not totals.group("raised")


def test_nothing_of_a_bug_or_of_the_scale_stays_behind() -> None:
    before = DrainOperation.on_event, layout.PIECE_BYTES_MAX
    with planted("no-drain"):
        run([1], Totals())
    assert (DrainOperation.on_event, layout.PIECE_BYTES_MAX) == before
