"""The policy that PolyRL has, the code that was released for RLBoost (NSDI'26), where it is not the paper's.

*Placing.* A request is a whole group, all responses to a prompt, and goes to one instance. Once a second the manager
asks each instance what waits on it. Until it asks again it places four groups in all, in turns among the instances
where nothing waited and that have the newest version. Nothing moves from an instance to another (Algorithm 2, a and b).
A group that its instance gives back, or that is lost with it, waits with the others, and **goes on from its shortest
response**: what its siblings have beyond that is made again.

*Seeding.* The trainer's engines generate for the whole T_seed, also where nothing is left to generate; after that
T_seed changes as in Algorithm 1, in whole seconds, and not below five. What is remembered of each number of instances
is not the latest T_seed but that with which throughput last grew, as a moving average; and it is looked up only when
the number changes. Nothing limits how many instances there are (no N_prem). A table stands in the code for the authors'
8B job, and is what it begins with.

*Training.* A group is trained once all of it is whole.

In its favour nothing here has its faults: a response that is whole is not made again where its group goes on, a group
is tried as often as it takes, and a message takes no thread of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, PlaceAction
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.job.drive import Known, Placing
from tensorhub_simulator.rollout_performance.job.job import JobRun
from tensorhub_simulator.rollout_performance.job.trainer import TrainerRun
from tensorhub_simulator.rollout_performance.models.machine import Machine
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress

CHECK_S: Final = 1.0
"""How often instances are asked what waits on them."""
PLACED_MAX: Final = 4
"""Limit of the groups that are placed until they are asked again."""
HAND_OVER_S: Final = 1.0
"""It waits so long after the trainer's engines were stopped."""
SEED_S_MIN: Final = 5
REMEMBERED: Final[Mapping[int, int]] = {1: 190, 2: 160, 3: 105, 4: 70}
"""T_seed by the number of instances, in seconds, as the code has it for 8B."""
WEIGHT_STEADY: Final = 0.8
"""Of what is remembered anew, where throughput no longer grows."""
WEIGHT_CHANGED: Final = 0.2
"""And where the number of instances has changed."""
_ROUNDING: Final = 1e-6

Group = tuple[int, int]
"""Submission, and number within it."""


@dataclass(slots=True)
class GroupTurns:
    """Where groups are placed."""

    group_size: int
    _checked: int = -1
    """At which second instances were last asked."""
    _placed: int = 0
    """How many groups since then."""
    _turn: int = 0
    _busy: set[str] = field(default_factory=set)
    """Where something waited then."""

    def group_of(self, of: RequestId) -> Group:
        """Return the group of a response."""
        return of.submission, of.index // self.group_size

    def actions(self, view: FleetView, now: float) -> list[Action]:
        """Return what to place now; `now` in seconds."""
        if (second := math.floor(now / CHECK_S + _ROUNDING)) != self._checked:
            self._checked, self._placed = second, 0
            self._busy = {each.runner for each in view.instances if each.pending}
        active = [each for each in view.instances if each.takes_more and each.version == view.newest]
        places: dict[Group, str] = {
            self.group_of(of): each.runner for each in active for of in (*each.executing, *each.pending)
        }
        free = [each.runner for each in active if each.runner not in self._busy]
        actions: list[Action] = [*released(view)]
        for of in view.waiting:
            group = self.group_of(of)
            if group not in places:
                if self._placed >= PLACED_MAX or not free:
                    continue
                places[group] = free[self._turn % len(free)]
                self._turn += 1
                self._placed += 1
            actions.append(PlaceAction(of, places[group], "it is its turn"))
        return actions


def groups_in_turns(known: Known) -> Placing:
    """Begin what places groups."""
    turns = GroupTurns(known.scenario.trainer.group_size)
    return lambda view: turns.actions(view, known.now())


@dataclass(slots=True)
class SeedingTime:
    """T_seed, in whole seconds."""

    seed_s: int
    gain: int
    remembered: dict[int, int] = field(default_factory=lambda: dict(REMEMBERED))
    _instances: int = 0
    _tokens_per_s: float = 0.0
    """Of the step before, with as many instances."""
    _best_s: int = 0
    """T_seed when it last grew."""

    def step_ended(
        self, step_s: float, waited_s: float, generated_s: float, instances: int, tokens_per_s: float
    ) -> None:
        """Take what was measured of a step, in seconds: all of it, the trainer's waits, and to its last response."""
        if instances != self._instances:
            self._tokens_per_s = 0.0
            self._remember(WEIGHT_CHANGED)
            self._instances = instances
            if instances in self.remembered:
                self.seed_s = self._best_s = self.remembered[instances]
                return
        else:
            if tokens_per_s <= self._tokens_per_s:
                self._remember(WEIGHT_STEADY)
            else:
                self._best_s = self.seed_s
            self._tokens_per_s = tokens_per_s
        trainer_s, remote_s = int(waited_s), max(0, int(step_s) - int(generated_s))
        if trainer_s < remote_s:
            self.seed_s = max(SEED_S_MIN, self.seed_s - (remote_s - trainer_s) // self.gain)
        else:
            self.seed_s += (trainer_s - remote_s) // self.gain

    def _remember(self, weight: float) -> None:
        before = self.remembered.get(self._instances, self._best_s)
        self.remembered[self._instances] = round((1 - weight) * before + weight * self._best_s)


@dataclass(slots=True)
class WholeGroups(StepProgress):
    """The responses of a step whose groups are trained once they are whole."""

    parts: dict[Group, list[tuple[RequestId, int, float]]] = field(default_factory=dict)

    def ended(self, of: RequestId, tokens: int, now: float) -> None:
        """Note that a response is whole."""
        self.open.remove(of)
        group = of.submission, of.index // self.limits.group_size
        part = self.parts.setdefault(group, [])
        part.append((of, tokens, now))
        if len(part) == self.limits.group_size:
            self.add(self.parts.pop(group))


def misfit_of(scenario: Scenario) -> str | None:
    """Say why it is not made for a scenario's trainer, and what to do; None: it is."""
    if scenario.trainer.seeds:
        return None
    return "polyrl is of a trainer whose GPUs generate first and then train: set trainer.seeds to true"


@dataclass(eq=False)
class PolyrlTrainer(TrainerRun):
    """A trainer with T_seed as the code has it, and with whole groups."""

    _time: SeedingTime | None = None

    def _new_step(self, step: int) -> StepProgress:
        return WholeGroups(self.limits, step, submitted_at=self.agenda.now)

    def _seeds_for_s(self) -> float:
        limits = self.limits
        if self._time is None:
            self._time = SeedingTime(round(limits.seed_first_s), max(1, round(limits.seed_gain)))
            return self._time.seed_s
        step, made = self.steps[-2], self.submitted[-1]
        tokens = step.tokens + limits.groups * limits.group_size * self.scenario.lengths.prompt
        remote = len(self.fleet.machines) - len(self.fleet.local)
        generated_s, each_s = made.ends[-1] - step.began_at, step.seconds * limits.engines
        self._time.step_ended(step.seconds, step.waited_s, generated_s, remote, tokens // each_s)
        return self._time.seed_s

    @property
    def _has_seeded_all(self) -> bool:
        return False

    def _stop_seeding(self, local: list[Machine]) -> None:
        for machine in local:
            self.fleet.end(machine)
        self.agenda.after(HAND_OVER_S, partial(super()._stop_seeding, []))


class PolyrlRun(JobRun):
    """One job; `run` it once."""

    def _used_of(self, of: RequestId, made: int, /) -> int:
        """Return how long the shortest response of its group is, in tokens."""
        size = self._scenario.trainer.group_size
        first = of.index - of.index % size
        counts = [made]
        for index in range(first, first + size):
            sibling = RequestId(of.submission, index)
            response = self._leader.responses.get(sibling)
            if sibling in self._leader.requests:
                counts.append(0 if response is None else response.count)
            else:
                counts.append(self._trainer.lengths[sibling])
        return min(counts)
