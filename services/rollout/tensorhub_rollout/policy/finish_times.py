"""When an instance has made all that it has, from how long its steps take and what is left of each response. Pure.

An instance makes one token of each of its requests in a step (`plateau.StepModel`). So all of its requests run beside
each other, and one that ends makes the steps of the others shorter. TailSieve's sum over requests, the longest first,
is then

    fixed * longest + sum over requests of  each * left + attention * (left * context + left^2 / 2)      seconds

with `left` the tokens that are to be made of a response, and `context` the tokens before these. In whatever order
responses end, the instance is done at the same time: that depends only on which requests it has. Lengths are not known:
the sum takes what is expected of `left` and of its square, and `longest` what the longest response is as likely as not
below.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel

LEFT_MIN: Final = 0.1
"""At least this share of what an instance had is left, as long as its requests were not looked at again."""


class Work(msgspec.Struct, frozen=True):
    """What is to be made of one response, in tokens, behind `context` tokens of its prompt and of itself."""

    left: float
    """What is expected to come."""
    square: float
    """What is expected of the square of it."""
    most: float
    """What is to come if it is the longest of its instance."""
    context: float

    @classmethod
    def of(cls, length: LengthEstimate, context: int, beside: int, longer_than: float = 0.0) -> "Work":
        """Return the work of a response, of `beside` that are alike.

        `longer_than`: with no more tokens than this to come it is not the longest, and `most` is not looked up.
        """
        left, square = length.left()
        left = max(1.0, left)
        most = left
        if left > longer_than:
            # The longest of n that are alike is as likely as not below this quantile of each.
            most = max(1.0, length.quantile(0.5 ** (1 / max(1, beside))) - length.made)
        return cls(left, max(1.0, square), most, context)

    def busy_s(self, steps: StepModel) -> float:
        """Return how much longer the steps of its instance take for it, all together."""
        return steps.each_s * self.left + steps.attention_s * (self.left * self.context + self.square / 2)

    def added_s(self, steps: StepModel) -> float:
        """Return the same where its context is to be computed first."""
        each_s, left, context = steps.each_s, self.left, self.context
        return each_s * left + steps.attention_s * (left * context + self.square / 2) + each_s * context

    def step_s(self, steps: StepModel) -> float:
        """Return how much longer one step of its instance takes for it now."""
        return steps.each_s + steps.attention_s * self.context

    def prefill_s(self, steps: StepModel) -> float:
        """Return how long its context takes to be computed anew, at the price of a further request in a step."""
        return steps.each_s * self.context


class Load(msgspec.Struct):
    """What an instance has to do, as of a moment in seconds: `as_of`."""

    longest: float = 0.0
    """Tokens of its longest response that are to come."""
    busy_s: float = 0.0
    """What all of its responses add to its steps."""
    context: float = 0.0
    """Tokens of all contexts, which would be computed anew elsewhere, or for other weights."""
    as_of: float = 0.0
    due_longest: float = 0.0
    """Tokens of its longest response that is due, which are to come."""
    due_busy_s: float = 0.0
    """What those that are due add to its steps."""
    rest_step_s: float = 0.0
    """What all others add to each step now."""

    def add(self, work: Work, steps: StepModel, *, is_new: bool = False, is_due: bool = False) -> None:
        """Take one more request; `is_new`: its context is to be computed first."""
        busy_s = work.added_s(steps) if is_new else work.busy_s(steps)
        self.longest = max(self.longest, work.most)
        self.busy_s += busy_s
        self.context += work.context
        if is_due:
            self.due_longest = max(self.due_longest, work.most)
            self.due_busy_s += busy_s
        else:
            self.rest_step_s += work.step_s(steps)

    def advance(self, steps: StepModel, now: float) -> None:
        """Take off what was done until now, as long as it lasts as predicted."""
        left, due_left = self._left(steps, now - self.as_of)
        self.as_of = now
        self.longest *= left
        self.busy_s *= left
        self.due_longest *= due_left
        self.due_busy_s *= due_left

    def at(self, steps: StepModel, now: float) -> "Load":
        """Return a copy that is advanced."""
        left, due_left = self._left(steps, now - self.as_of)
        return Load(
            self.longest * left,
            self.busy_s * left,
            self.context,
            now,
            self.due_longest * due_left,
            self.due_busy_s * due_left,
            self.rest_step_s,
        )

    def _left(self, steps: StepModel, elapsed_s: float) -> tuple[float, float]:
        """Return which share of all is left, and of what is due."""
        if elapsed_s <= 0:
            return 1.0, 1.0
        # `finish_s` and `due_s` without calls, for thousands of instances.
        takes_s = steps.fixed_s * self.longest + self.busy_s
        left = max(LEFT_MIN, 1 - elapsed_s / takes_s) if takes_s > 0 else 1.0
        due_s = self.due_longest * (steps.fixed_s + self.rest_step_s) + self.due_busy_s
        return left, max(LEFT_MIN, 1 - elapsed_s / due_s) if due_s > 0 else 1.0

    def finish_s(self, steps: StepModel) -> float:
        """Return how long all of it takes, in seconds."""
        return steps.fixed_s * self.longest + self.busy_s

    def due_s(self, steps: StepModel) -> float:
        """Return how long those take that are due, beside all others."""
        return self.due_longest * (steps.fixed_s + self.rest_step_s) + self.due_busy_s

    def due_with_s(self, work: Work, steps: StepModel) -> float:
        """Return the same with one more request that is due, whose context is to be computed first."""
        longest = max(self.due_longest, work.most)
        return longest * (steps.fixed_s + self.rest_step_s) + self.due_busy_s + work.added_s(steps)

    def finish_with_s(self, work: Work, steps: StepModel) -> float:
        """Return how long all of it takes with one more request, whose context is to be computed first."""
        return steps.fixed_s * max(self.longest, work.most) + self.busy_s + work.added_s(steps)


def with_it_s(work: Work, those: Iterable[tuple[Load, StepModel]], *, is_due: bool) -> list[float]:
    """Return `due_with_s`, or else `finish_with_s`, of many instances. One by one they take three times as long."""
    left, context, most = work.left, work.context, work.most
    attended = left * context + work.square / 2
    if is_due:
        return [
            (steps.fixed_s + load.rest_step_s) * (max(most, load.due_longest))
            + load.due_busy_s
            + (steps.each_s * left + steps.attention_s * attended + steps.each_s * context)
            for load, steps in those
        ]
    return [
        steps.fixed_s * (max(most, load.longest))
        + load.busy_s
        + (steps.each_s * left + steps.attention_s * attended + steps.each_s * context)
        for load, steps in those
    ]
