"""Whether a trainer's own engines have generated enough in a step: one leader's watch over one model. Pure.

It begins to judge once a trainer has told of a whole step, and so how long it trains. A leader that took over within a
step does not know that: the trainer's engines then generate until nothing is left for them.
"""

from collections.abc import Mapping

from tensorhub_rollout.policy.finish_times import Load
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.seeding_end import Correction, others_take_s
from tensorhub_rollout.policy.view import FleetView


class SeedingWatch:
    """What one leader knows of the seeding of one model's trainer."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._train_s = 0.0
        """How long the trainer trained in its last step; 0: not known."""
        self._correction = Correction()
        self._predicted: tuple[float, float] | None = None
        """When the seeding of this step was ended, and what was predicted then without correction."""

    def learnt(self, train_s: float, last_remote_token_at: float, *, is_steady: bool) -> None:
        """Take how long the trainer trained in the step that has ended, and when the last remote token came in it.

        Where instances came or went within it (not `is_steady`), it does not tell how far predictions are off.
        """
        if self._predicted is not None and is_steady:
            ended_at, predicted_s = self._predicted
            self._correction = self._correction.after(predicted_s, last_remote_token_at - ended_at)
        self._train_s, self._predicted = train_s, None

    @property
    def can_tell(self) -> bool:
        """Whether it will say when the seeding of this step is to end."""
        return self._train_s > 0

    def is_enough(self, view: FleetView, loads: Mapping[str, Load], steps: StepModel, now: float) -> str | None:
        """Say why the trainer's engines may stop; None: they may not yet."""
        there = [each for each in view.instances if each.runner in loads and not each.is_leaving]
        others = [loads[each.runner] for each in there if each.takes_more and each.may_start and not each.is_local]
        local = [loads[each.runner] for each in there if each.is_local]
        if any(view.first_waiting(1)) or not others or not local or not self.can_tell:
            return None
        if not any(each.executing or each.pending for each in there):
            # The step's prompts may be yet to come: a trainer begins to seed before it submits them.
            return None
        predicted_s = others_take_s(others, local, steps)
        takes_s = self._correction.factor * predicted_s
        if takes_s > self._train_s:
            return None
        self._predicted = now, predicted_s
        return f"the others are done in {takes_s:.0f} s with all that is open, and training takes {self._train_s:.0f} s"
