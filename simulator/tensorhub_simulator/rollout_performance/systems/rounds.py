"""A job whose trainer takes RollPacker's rounds (2025), without staleness: short responses together, and long ones.

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
from hashlib import sha256
from statistics import fmean

from tensorhub_common.protocol.rollout.entries import Cancel, Done, GroupSubmitted, RequestId, Submit
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES
from tensorhub_rollout.log.fold import GROUPS_MAX
from tensorhub_rollout.log.outcomes import Cancelled, Outcome
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.job.drive import Drive
from tensorhub_simulator.rollout_performance.job.job import JobRun
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
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


class RoundsRun(JobRun):
    """One job in rounds; `run` it once."""

    def __init__(self, scenario: Scenario, drive: Drive, timeline: Timeline | None = None) -> None:
        """Begin."""
        self._deferred = deque[str]()
        self._drawn = 0
        """How many prompts it began with."""
        self.long_rounds = 0
        self._known: dict[str, list[float]] = {}
        """The log lengths of each prompt's responses that were trained."""
        self._graded = deque[str]()
        """The prompts of this epoch that are still to come, in their order."""
        super().__init__(scenario, drive, timeline)

    def _submit(self, step: int) -> None:
        trainer, rounds = self._trainer, self._trainer.rounds
        if self._submitted:
            last = self._submitted[-1]
            assert isinstance(last, Round)
            self._deferred.extend(last.deferred)
            for group in last.whole:
                known = self._known.setdefault(last.prompts[group], [])
                known += [math.log(tokens) for _, tokens, _ in last.made[group]]
        is_graded = self._begins_graded()
        is_long = not is_graded and len(self._deferred) >= trainer.groups
        if is_graded:
            prompts = [self._graded.popleft() for _ in range(trainer.groups)]
        elif is_long:
            prompts = [self._deferred.popleft() for _ in range(trainer.groups)]
            self.long_rounds += 1
        else:
            first, count = self._drawn, math.ceil(rounds.prompts * trainer.groups)
            prompts = [prompt_of(self._scenario, *divmod(n, trainer.groups)) for n in range(first, first + count)]
            self._drawn += count
        size = trainer.group_size if is_long else math.ceil(rounds.responses * trainer.group_size)
        now = self._agenda.now
        self._submitted.append(
            Round(trainer, step, submitted_at=now, prompts=prompts, group_size=size, is_long=is_long)
        )
        longest = self._scenario.lengths.longest
        for first in range(0, len(prompts), GROUPS_MAX):
            groups = tuple(
                GroupSubmitted(
                    f"s{step}-{first + number}", sha256(prompt.encode()).hexdigest(), size, 1, longest + 1, priority=0
                )
                for number, prompt in enumerate(prompts[first : first + GROUPS_MAX])
            )
            self._append(Submit(self._by(), groups, self._payload(TOKEN_BYTES)))

    def _begins_graded(self) -> bool:
        """Tell whether a round has prompts by their lengths; begin with all of them anew where none is left."""
        count, groups = self._scenario.lengths.prompts, self._trainer.groups
        if self._drive.system != "graded" or count is None or self._drawn < count:
            return False
        if len(self._graded) < groups:
            # What was never trained is the longest.
            self._deferred.clear()
            prompts = dict.fromkeys(prompt_of(self._scenario, *divmod(number, groups)) for number in range(count))
            means = {each: fmean(self._known[each]) if each in self._known else math.inf for each in prompts}
            self._graded.extend(sorted(prompts, key=lambda each: means[each]))
        return True

    def _length_of(self, step: StepProgress) -> int:
        assert isinstance(step, Round)
        prompt = step.prompts[step.submitted // step.group_size]
        return response_length(self._scenario, prompt, f"{step.number + 1} {step.submitted}", step.number)

    def _opened(self, step: StepProgress, of: RequestId) -> None:
        assert isinstance(step, Round)
        step.number_of[of] = step.submitted

    def _note(self, outcome: Outcome) -> None:
        super()._note(outcome)
        if isinstance(outcome, Cancelled):
            # They were whole, or ended by this.
            self._agenda.after(0.0, partial(self._acknowledge, outcome.requests))
        step = self._submitted[-1] if self._submitted else None
        if isinstance(step, Round) and step.over:
            names, step.over = tuple(f"s{step.number}-{group}" for group in step.over), []
            left_over, step.left_over = tuple(step.left_over), []
            self._append(Cancel(self._by(), names))
            self._acknowledge(left_over)

    def _acknowledge(self, requests: tuple[RequestId, ...]) -> None:
        if requests:
            self._append(Done(self._by(), requests))
