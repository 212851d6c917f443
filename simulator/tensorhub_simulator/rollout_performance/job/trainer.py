"""The trainer of a simulated job: it seeds, trains in micro-batches as responses come, and publishes.

One step: submit its groups; generate with its own engines for as long as RLBoost's Algorithm 1 says (NSDI'26), or,
where it has only these, until all is made; train what there is, at least a micro-batch at a time; publish.

A trainer that is one step ahead (StreamRL, arXiv 2504.15930, section 3) submits a step's groups when the step before
begins: they are made on weights that lack one step of training, while that step is trained.

One without steps trains whatever has ended, and publishes after as many responses as a step has.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

from tensorhub_common.protocol.rollout.entries import Done, GroupSubmitted, RequestId, Submit
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES
from tensorhub_common.protocol.rollout.questions import SeedingAnswer, SeedingQuestion, SeedingState
from tensorhub_rollout.log.fold import GROUPS_MAX
from tensorhub_rollout.log.outcomes import Ended, Outcome, Refused, Submitted
from tensorhub_runner.core.runner_events import PreemptionNoticed
from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, Trainer
from tensorhub_simulator.rollout_performance.job.fleet import DELAY_S, Fleet
from tensorhub_simulator.rollout_performance.job.log import JobLog
from tensorhub_simulator.rollout_performance.measures.ages import AgeCounts
from tensorhub_simulator.rollout_performance.measures.timeline import Doing, Span, Timeline
from tensorhub_simulator.rollout_performance.models.draws import length_of, prompt_of
from tensorhub_simulator.rollout_performance.models.machine import Machine
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress, StepRecord, StreamProgress
from tensorhub_simulator.rollout_performance.sizing.fleet_size import FleetSize


@dataclass(eq=False)
class TrainerRun:
    """One trainer in virtual time; `begin_step` once, and `note` what comes of each entry of the log."""

    scenario: Scenario
    limits: Trainer
    """The scenario's, as the system has it."""
    agenda: Agenda
    log: JobLog
    fleet: Fleet
    ask_seeding: Callable[[SeedingQuestion], SeedingAnswer]
    """Asks the manager for how long to seed."""
    published: Callable[[int], None]
    """Is told of each new version."""
    timeline: Timeline | None
    """Where it notes what it does, if somewhere."""
    version: int = 1
    """The newest that it has published."""
    steps: list[StepRecord] = field(default_factory=list)
    submitted: list[StepProgress] = field(default_factory=list)
    """By step."""
    lengths: dict[RequestId, int] = field(default_factory=dict)
    """How long each response is that was not trained yet, in tokens."""
    ages: AgeCounts = field(default_factory=AgeCounts)
    trained: int = 0
    """Responses."""
    size: FleetSize | None = field(init=False)
    """With `spot.delta_from`."""
    _progress_of: dict[int, StepProgress] = field(default_factory=dict)
    """By submission."""
    _seeding: SeedingState | None = None
    _is_seeding: bool = False
    _is_training: bool = False
    _waits_since: float | None = None

    def __post_init__(self) -> None:
        """Begin."""
        units = self.scenario.spot.delta_from
        self.size = None if units is None else FleetSize(self.scenario, units)

    @property
    def is_over(self) -> bool:
        """Whether all steps are."""
        return len(self.steps) == self.limits.steps and bool(self.steps[-1].ended_at)

    @property
    def progress(self) -> StepProgress:
        """Return the step that is trained."""
        return self.submitted[0 if self.limits.streams else len(self.steps) - 1]

    def wished(self, available: int) -> int:
        """Return how many of the machines that there are it keeps up with (N_prem), or has by delta."""
        if self._seeding is not None and self._seeding.version >= 0:
            available = min(available, max(1, self._seeding.remote_max))
        return available if self.size is None else min(available, self.size.units)

    # ------------------------------------------------------------------------------------------ responses

    def note(self, outcome: Outcome) -> None:
        """Take what came of an entry of the log."""
        assert not isinstance(outcome, Refused), outcome
        if isinstance(outcome, Submitted):
            step = self.submitted[-1]
            for of in outcome.opened:
                self._progress_of[of.submission] = step
                step.open.add(of)
                self.lengths[of] = self._length_of(step)
                self._opened(step, of)
                step.submitted += 1
        elif isinstance(outcome, Ended):
            for of in outcome.requests:
                request = self.log.state.request(of)
                assert request is not None
                assert request.end is not None
                assert request.end.tokens == self.lengths[of], f"{of} has {request.end.tokens} tokens"
                self._progress_of[of.submission].ended(of, request.end.tokens, self.agenda.now)
            self.train()

    def _opened(self, step: StepProgress, of: RequestId) -> None:
        """Note a response that is asked for, the next of a step."""

    def _length_of(self, step: StepProgress) -> int:
        """Return how long the next response of a step will be."""
        return length_of(self.scenario, step.number, step.submitted)

    # ------------------------------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Submit what is to be submitted, and seed."""
        limits, step = self.limits, len(self.steps)
        self.steps.append(StepRecord(self.agenda.now))
        seed_s = self._seeds_for_s() if limits.seeds else 0.0
        if limits.streams:
            self._begin_stream()
        while not limits.streams and len(self.submitted) <= min(step + limits.steps_ahead, limits.steps - 1):
            self._submit(len(self.submitted))
        if seed_s > 0:
            self._is_seeding = True
            for number in range(limits.engines):
                self.fleet.start(f"local-{step}-{number}", is_local=True)
            if math.isfinite(seed_s):
                self.agenda.after(seed_s, partial(self._end_seeding, step))
        self.train()

    def _begin_stream(self) -> None:
        limits = self.limits
        if not self.submitted:
            self.submitted.append(StreamProgress(limits))
            self._submit_groups(0, range(limits.groups * (1 + limits.steps_ahead)))
        stream = self.progress
        assert isinstance(stream, StreamProgress)
        stream.left = limits.groups * limits.group_size

    def _submit(self, step: int) -> None:
        """Submit the groups of a step; those of an earlier one go first."""
        self.submitted.append(self._new_step(step))
        self._submit_groups(step, range(self.limits.groups))

    def _new_step(self, step: int) -> StepProgress:
        return StepProgress(self.limits, step, submitted_at=self.agenda.now)

    def _submit_groups(self, step: int, numbers: range) -> None:
        names = [(f"s{step}-{number}", prompt_of(self.scenario, step, number)) for number in numbers]
        self._submit_prompts(names, self.limits.group_size, -step if self.limits.steps_ahead else 0)

    def _submit_prompts(self, names: Iterable[tuple[str, str]], size: int, priority: int) -> None:
        """Submit groups of this size: the name of each, and of its prompt."""
        longest = self.scenario.lengths.longest
        groups = [
            GroupSubmitted(name, sha256(prompt.encode()).hexdigest(), size, 1, longest + 1, priority=priority)
            for name, prompt in names
        ]
        for first in range(0, len(groups), GROUPS_MAX):
            some = tuple(groups[first : first + GROUPS_MAX])
            self.log.append(Submit(self.log.sender(), some, self.log.payload(TOKEN_BYTES)))

    # ------------------------------------------------------------------------------------------ seeding

    def _seeds_for_s(self) -> float:
        """Return how long the trainer's engines generate in the step that begins; infinite: until they are told."""
        before = self.steps[-2] if len(self.steps) > 1 else None
        question = SeedingQuestion(
            attachment=self.log.attachment,
            version=self.version,
            state=self._seeding,
            train_wait_s=0.0 if before is None else before.waited_s,
            seeded_s=0.0 if before is None else before.seeded_s,
            gain=self.limits.seed_gain,
            initial_s=self.limits.seed_first_s,
        )
        answer = self.ask_seeding(question)
        self._seeding, is_timed = answer.state, answer.has_others and not answer.is_watched
        assert self._seeding is not None, answer.message
        return self._seeding.seed_s if is_timed else math.inf

    def has_enough(self) -> None:
        """Take that the manager wants no more of the trainer's engines in this step."""
        self._end_seeding(len(self.steps) - 1)

    def _end_seeding(self, step: int) -> None:
        """Give what the trainer's engines have to others; it trains once they have nothing."""
        if not self._seeds_in(step):
            return
        for machine in self.fleet.local:
            machine.tell(PreemptionNoticed())
        self.agenda.after(DELAY_S, partial(self._end_when_drained, step))

    def _seeds_in(self, step: int) -> bool:
        """Tell whether the step is under way, and its seeding not over: all may have ended before its time."""
        return self._is_seeding and step == len(self.steps) - 1

    def _end_when_drained(self, step: int) -> None:
        if not self._seeds_in(step):
            return
        local = self.fleet.local
        if not all(each.core.is_drained for each in local):
            self.agenda.after(self.scenario.messages.look_s, partial(self._end_when_drained, step))
            return
        self._stop_seeding(local)

    def _stop_seeding(self, local: list[Machine]) -> None:
        for machine in local:
            self.fleet.end(machine)
        self._is_seeding = False
        self.steps[-1].seeded_s = self.agenda.now - self.steps[-1].began_at
        self._did("seeds", self.steps[-1].seeded_s)
        self.train()

    @property
    def _has_seeded_all(self) -> bool:
        """Whether nothing is left for the trainer's engines to generate, before their time is over."""
        return not self.progress.open and bool(self.progress.ready)

    # ------------------------------------------------------------------------------------------ training

    def train(self) -> None:
        """Train what there is, where the GPUs are free for it."""
        if not self.steps or self._is_training or self.steps[-1].ended_at:
            return
        if self._is_seeding:
            if self._has_seeded_all:
                self._stop_seeding(self.fleet.local)
            return
        batch = self.progress.take()
        if not batch:
            if self._waits_since is None and self.progress.open:
                self._waits_since = self.agenda.now
            return
        record = self.steps[-1]
        if self._waits_since is not None:
            record.waited_s += self.agenda.now - self._waits_since
            self._waits_since = None
        self._is_training = True
        tokens = sum(count for _, count in batch)
        seconds = tokens * self.limits.token_s
        self.agenda.after(seconds, partial(self._trained, tuple(of for of, _ in batch), tokens, seconds))

    def _trained(self, requests: tuple[RequestId, ...], tokens: int, seconds: float) -> None:
        self._did("trains", seconds)
        limits, record = self.limits, self.steps[-1]
        self._is_training = False
        record.tokens += tokens
        record.trained_s += seconds
        self.trained += len(requests)
        self.log.append(Done(self.log.sender(), requests))
        for of in requests:
            del self.lengths[of]
            self.ages.trained(of, self.version)
        if limits.streams:
            submitted, used = self.progress.submitted // limits.group_size, self.trained // limits.group_size
            self._submit_groups(0, range(submitted, used + limits.groups * (1 + limits.steps_ahead)))
        if self.progress.is_over:
            self.agenda.after(limits.publish_s, self._publish)
        else:
            self.train()

    def _publish(self) -> None:
        self._did("publishes", self.limits.publish_s)
        record = self.steps[-1]
        record.ended_at = self.agenda.now
        self.version += 1
        self.published(self.version)
        if self.size is not None:
            before = self.size.units
            made = self.submitted[len(self.steps) - 1]
            self.size.step_ended(made, record.trained_s + self.limits.publish_s)
            if self.size.units < before:
                self.fleet.let_one_go()
        if not self.is_over:
            self.begin_step()

    def _did(self, doing: Doing, seconds: float) -> None:
        """Note what it has done until now."""
        if self.timeline is not None:
            self.timeline.spans.append(Span(self.agenda.now - seconds, self.agenda.now, doing))
