"""Whether disturbed runs learned what undisturbed ones did, and whether a response was lost on the way. Pure."""

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.demo_rl.tally import Run

LAST_STEPS: Final = 10
"""A run's final reward is the mean over these last steps."""
FIRST_STEPS: Final = 3
SPREAD_MIN: Final = 0.01
"""Three seeds may be closer to each other by chance than a fourth one would be."""
SPREADS_MAX: Final = 2.0
"""Final rewards agree that differ by at most so many spreads."""
LEARNED_REWARD_MIN: Final = 0.8
UNTAUGHT_REWARD_MAX: Final = 0.2


class Agreement(msgspec.Struct, frozen=True):
    """The mean final rewards of both kinds of run, and the spread of seeds: the pooled standard deviation."""

    undisturbed: float
    disturbed: float
    spread: float

    @property
    def difference(self) -> float:
        """By how much disturbed runs ended higher."""
        return self.disturbed - self.undisturbed

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.difference) <= SPREADS_MAX * self.spread

    @property
    def sentence(self) -> str:
        """What is to be said of it."""
        verb = "agree" if self.holds else "DIFFER"
        return (
            f"the final rewards {verb}: {self.undisturbed:.3f} undisturbed, {self.disturbed:.3f} with kills; they may "
            f"differ by {SPREADS_MAX:g} times the spread of seeds, {self.spread:.3f}"
        )


def final_reward(run: Run) -> float:
    """Return the mean reward of the last steps of a run that has steps."""
    return statistics.fmean(each.reward for each in run.steps[-LAST_STEPS:])


def final_rewards(runs: Sequence[Run], *, is_disturbed: bool) -> list[float]:
    """Return the final rewards of one kind of run, by seed."""
    return [final_reward(each) for each in runs if each.is_disturbed == is_disturbed and each.steps]


def agreement(runs: Sequence[Run]) -> Agreement | None:
    """Return whether both kinds of run agree; None with fewer than two seeds, which have no spread."""
    kinds = [final_rewards(runs, is_disturbed=each) for each in (False, True)]
    if min(map(len, kinds)) < 2:  # noqa: PLR2004 (a spread needs two)
        return None
    spread = statistics.fmean(statistics.variance(each) for each in kinds) ** 0.5
    undisturbed, disturbed = (statistics.fmean(each) for each in kinds)
    return Agreement(undisturbed, disturbed, max(spread, SPREAD_MIN))


def faults_of(run: Run, steps: int, kills_min: int) -> list[str]:
    """Return what was wrong with one run of so many steps. A disturbed one needs so many kills of runners."""
    name = f"seed {run.seed}, {'with kills' if run.is_disturbed else 'undisturbed'}"
    faults = [f"{getattr(run, what)} responses {what}" for what in ("lost", "twice", "failed") if getattr(run, what)]
    if len(run.steps) != steps:
        faults.append(f"{len(run.steps)} of {steps} steps")
    if run.is_disturbed:
        wanted = {"runner": kills_min, "manager": 1, "trainer": 1}
        faults += [
            f"{run.kills.get(who, 0)} kills of a {who} where {count} were due"
            for who, count in wanted.items()
            if run.kills.get(who, 0) < count
        ]
    return [f"{name}: {each}" for each in faults]


def learning_faults_of(run: Run) -> list[str]:
    """Return what was wrong with what a whole run learned."""
    if not run.steps:
        return []
    first, last = statistics.fmean(each.reward for each in run.steps[:FIRST_STEPS]), final_reward(run)
    if first <= UNTAUGHT_REWARD_MAX and last >= LEARNED_REWARD_MIN:
        return []
    expected = f"{UNTAUGHT_REWARD_MAX:g} or less to {LEARNED_REWARD_MIN:g} or more was expected"
    return [f"seed {run.seed}: the reward went from {first:.2f} to {last:.2f}, where {expected}"]
