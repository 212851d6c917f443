"""A trainer that takes RollPacker's rounds (2025), without staleness: short responses together, and long ones.

A short round asks for more prompts than are trained, and for more responses to each. A group counts once as many of
its responses are whole as are trained, and the round is over once as many groups are. What is open then is cancelled,
and its prompts wait; as soon as they fill a step, a long round makes them anew, all of their responses. So each
response is made on the version on which it is trained, and each prompt is trained once, short ones sooner.

`graded`: once all prompts have been trained, and come again, a round has prompts whose responses were about as long
before: the shortest first. Then no prompt is asked for in vain.

The trainer does this with what any trainer has: `submit`, and `cancel` of groups. Its own parts beside the rounds
(a parallelism that changes, scheduling of rewards, training on GPUs that have nothing left to generate) are not here.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from tensorhub_common.protocol.rollout.entries import Cancel, Done, RequestId
from tensorhub_rollout.log.outcomes import Cancelled, Outcome
from tensorhub_simulator.rollout_performance.job.trainer import TrainerRun
from tensorhub_simulator.rollout_performance.models.draws import prompt_of, response_length
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress


@dataclass(slots=True)
class Round(StepProgress):
    """The responses of one round. Groups count from 0, in the order of the submission."""

    prompts: list[str] = field(default_factory=list)
    group_size: int = 1
    """How many responses are asked for to each prompt."""
    is_long: bool = False
    made: dict[int, list[tuple[RequestId, int, float]]] = field(default_factory=dict)
    """By group: what is whole."""
    whole: list[int] = field(default_factory=list)
    """Groups that are trained."""
    number_of: dict[RequestId, int] = field(default_factory=dict)
    over: list[int] = field(default_factory=list)
    """Groups of which nothing more is wanted, and of which that was not told yet."""
    left_over: list[RequestId] = field(default_factory=list)
    """Whole responses that are not trained."""

    def ended(self, of: RequestId, tokens: int, now: float) -> None:
        """Note that a response is whole."""
        self.open.remove(of)
        group, wanted = self.number_of[of] // self.group_size, self.limits.group_size
        made = self.made.setdefault(group, [])
        made.append((of, tokens, now))
        if len(made) < wanted:
            return
        self.add(made)
        self.whole.append(group)
        self.over.append(group)
        self._close(group)
        if len(self.whole) == self.limits.groups:
            for other in range(len(self.prompts)):
                if other not in self.whole:
                    self.over.append(other)
                    self._close(other)
                    self.left_over += [of for of, _, _ in self.made.get(other, ())]

    @property
    def deferred(self) -> list[str]:
        """Return the prompts that are not trained, once the round is over."""
        return [prompt for group, prompt in enumerate(self.prompts) if group not in self.whole]

    def _close(self, group: int) -> None:
        self.open -= {of for of in self.open if self.number_of[of] // self.group_size == group}


@dataclass(eq=False)
class RoundsTrainer(TrainerRun):
    """A trainer that takes rounds."""

    long_rounds: int = 0
    _deferred: deque[str] = field(default_factory=deque)
    _drawn: int = 0
    """How many prompts it began with."""

    def _submit(self, step: int) -> None:
        limits, rounds = self.limits, self.limits.rounds
        if self.submitted:
            last = self.submitted[-1]
            assert isinstance(last, Round)
            self._deferred.extend(last.deferred)
            self._learn(last)
        prompts = self._graded_prompts()
        is_long = not prompts and len(self._deferred) >= limits.groups
        if is_long:
            prompts = [self._deferred.popleft() for _ in range(limits.groups)]
            self.long_rounds += 1
        elif not prompts:
            first, count = self._drawn, math.ceil(rounds.prompts * limits.groups)
            prompts = [prompt_of(self.scenario, *divmod(n, limits.groups)) for n in range(first, first + count)]
            self._drawn += count
        size = limits.group_size if is_long else math.ceil(rounds.responses * limits.group_size)
        now = self.agenda.now
        self.submitted.append(Round(limits, step, submitted_at=now, prompts=prompts, group_size=size, is_long=is_long))
        self._submit_prompts(((f"s{step}-{number}", prompt) for number, prompt in enumerate(prompts)), size, 0)

    def _learn(self, last: Round) -> None:
        """Take what a round that is over tells of its prompts."""

    def _graded_prompts(self) -> list[str]:
        """Return the prompts of a round that are chosen by their lengths; none: it is short or long."""
        return []

    def _length_of(self, step: StepProgress) -> int:
        assert isinstance(step, Round)
        prompt = step.prompts[step.submitted // step.group_size]
        return response_length(self.scenario, prompt, f"{step.number + 1} {step.submitted}", step.number)

    def _opened(self, step: StepProgress, of: RequestId) -> None:
        assert isinstance(step, Round)
        step.number_of[of] = step.submitted

    def note(self, outcome: Outcome) -> None:
        """Take what came of an entry of the log."""
        super().note(outcome)
        if isinstance(outcome, Cancelled):
            # They were whole, or ended by this.
            self.agenda.after(0.0, partial(self._acknowledge, outcome.requests))
        step = self.submitted[-1] if self.submitted else None
        if isinstance(step, Round) and step.over:
            names, step.over = tuple(f"s{step.number}-{group}" for group in step.over), []
            left_over, step.left_over = tuple(step.left_over), []
            self.log.append(Cancel(self.log.sender(), names))
            self._acknowledge(left_over)

    def _acknowledge(self, requests: tuple[RequestId, ...]) -> None:
        if requests:
            self.log.append(Done(self.log.sender(), requests))


@dataclass(eq=False)
class GradedTrainer(RoundsTrainer):
    """One whose rounds have prompts of about equal lengths once all have come."""

    _known: dict[str, list[float]] = field(default_factory=dict)
    """The log lengths of each prompt's responses that were trained."""
    _graded: deque[str] = field(default_factory=deque)
    """The prompts of this epoch that are still to come, in their order."""

    def _learn(self, last: Round) -> None:
        for group in last.whole:
            known = self._known.setdefault(last.prompts[group], [])
            known += [math.log(tokens) for _, tokens, _ in last.made[group]]

    def _graded_prompts(self) -> list[str]:
        """Return the next prompts by their lengths, and begin with all of them anew where none is left."""
        count, groups = self.scenario.lengths.prompts, self.limits.groups
        if count is None or self._drawn < count:
            return []
        if len(self._graded) < groups:
            # What was never trained is the longest.
            self._deferred.clear()
            prompts = dict.fromkeys(prompt_of(self.scenario, *divmod(number, groups)) for number in range(count))
            means = {each: fmean(self._known[each]) if each in self._known else math.inf for each in prompts}
            self._graded.extend(sorted(prompts, key=lambda each: means[each]))
        return [self._graded.popleft() for _ in range(groups)]
