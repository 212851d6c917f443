"""How many instances a scenario takes as its responses become longer or shorter: StreamRL's rule of delta. Pure.

After each step it is asked by how much generation was slower than training (`policy.allocation`). What one instance
more or less would change is the measured time in the proportion that the profile says (`profile`).

Steps that are made beside each other are judged together: a step's measured time ends with its longest response, which
may be whole before that of the step before, so that one has less than nothing and the next one more than it took.
"""

from collections import deque
from statistics import fmean

from tensorhub_rollout.policy.allocation import wants_one_less, wants_one_more
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress
from tensorhub_simulator.rollout_performance.sizing.profile import generation_of


class FleetSize:
    """How many instances there are to be, step by step."""

    def __init__(self, scenario: Scenario, units: int) -> None:
        """Begin with this number."""
        self.units = units
        self.units_of_steps: list[int] = []
        """How many there were to be in each step that is over."""
        self._scenario = scenario
        self._ended_at = 0.0
        self._took_s: deque[tuple[float, float]] = deque(maxlen=scenario.trainer.steps_ahead + 1)
        """Generation and training of the last steps, as many as are made beside each other."""
        self._settled_in = 0
        """How many steps were begun with another number."""

    def step_ended(self, step: StepProgress, training_s: float) -> None:
        """Take how long a step's responses and its training took, in seconds; decide on one more or one less."""
        self.units_of_steps.append(self.units)
        # A step that is made ahead has the fleet once the one before it has left it.
        generation_s = step.ends[-1] - max(step.submitted_at, self._ended_at)
        self._ended_at = step.ends[-1]
        self._took_s.append((generation_s, training_s))
        if self._settled_in:
            self._settled_in -= 1
            return
        before = self.units
        generation_s, training_s = (fmean(each) for each in zip(*self._took_s, strict=True))
        by = generation_of(self._scenario, self._scenario.engine, step.number)
        share = generation_s / by(self.units)
        if self.units < self._scenario.spot.most and wants_one_more(
            generation_s, training_s, share * by(self.units + 1)
        ):
            self.units += 1
        elif self.units > 1 and wants_one_less(generation_s, training_s, share * by(self.units - 1)):
            self.units -= 1
        if self.units != before:
            self._settled_in = self._scenario.trainer.steps_ahead
