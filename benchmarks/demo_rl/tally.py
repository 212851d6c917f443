"""What became of one training run, put together from what its trainer reports. Pure.

Invariant: a step that a restarted trainer reports again counts once.
"""

from collections import Counter
from typing import Any

import msgspec


class Step(msgspec.Struct, frozen=True):
    """One step: the mean reward of its responses, the share of right ones, and when it was over, in seconds."""

    step: int
    reward: float
    right: float
    tokens: int
    at_s: float


class Run(msgspec.Struct, kw_only=True):
    """One run. Responses are counted by what the trainer learned from, tokens by what it got."""

    seed: int
    is_disturbed: bool
    seconds: float = 0.0
    """From the first prompt on."""
    kills: dict[str, int] = {}
    steps: list[Step] = []
    submitted: int = 0
    delivered: int = 0
    twice: int = 0
    """Responses that a second step learned from."""
    lost: int = 0
    failed: int = 0
    came_again: int = 0
    """Responses that came to a restarted trainer once more, since it had no time for `done`; it learned nothing new."""
    moved: int = 0
    """Responses that more than one attempt made."""
    tokens: int = 0
    tokens_made: int = 0
    """By all runners, with what was made again."""
    computed_again_by_moves: int = 0
    """Tokens whose keys and values were computed again, since their response moved."""
    computed_again_by_updates: int = 0
    """The same, since weights changed meanwhile."""
    versions_behind: dict[int, int] = {}
    """By how many versions tokens were older than what was learned on: how many."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the trainer got, a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_again(self) -> int:
        """Tokens that runners made and that did not come to the trainer: others were made in their place."""
        return self.tokens_made - self.tokens


class Tally:
    """Takes the reports of one run's trainer, of all its lives."""

    def __init__(self, seed: int, group_size: int, *, is_disturbed: bool) -> None:
        self.seed, self.group_size, self.is_disturbed = seed, group_size, is_disturbed
        self.came_again = 0
        self._steps: dict[int, tuple[Step, dict[str, Any]]] = {}

    def take(self, event: dict[str, Any], at_s: float) -> Step | None:
        """Take a report; return the step that it is of, where it is new."""
        if event["kind"] == "again":
            self.came_again += event["responses"]
        if event["kind"] != "step" or event["step"] in self._steps:
            return None
        step = Step(event["step"], event["reward"], event["right"], event["tokens"], round(at_s, 2))
        self._steps[step.step] = step, event
        return step

    def run(self, groups: int, seconds: float, kills: Counter[str], tokens_made: int) -> Run:
        """Return the run. `groups`: how many were submitted."""
        facts = [event for _, event in self._steps.values()]
        got, behind = Counter[str](), Counter[int]()
        for each in facts:
            got.update(each["groups"])
            behind.update({int(number): count for number, count in each["versions_behind"].items()})
        # A group comes whole, so a group of which more came was learned from twice.
        twice = sum(max(0, count - self.group_size) for count in got.values())
        submitted, delivered = groups * self.group_size, got.total() - twice
        return Run(
            seed=self.seed,
            is_disturbed=self.is_disturbed,
            seconds=round(seconds, 1),
            kills=dict(sorted(kills.items())),
            steps=[step for _, (step, _) in sorted(self._steps.items())],
            submitted=submitted,
            delivered=delivered,
            twice=twice,
            lost=submitted - delivered,
            failed=sum(each["failed"] for each in facts),
            came_again=self.came_again,
            moved=sum(each["moved"] for each in facts),
            tokens=sum(each["tokens"] for each in facts),
            tokens_made=tokens_made,
            computed_again_by_moves=sum(each["computed_again"]["by_moves"] for each in facts),
            computed_again_by_updates=sum(each["computed_again"]["by_updates"] for each in facts),
            versions_behind=dict(sorted(behind.items())),
        )
