"""When a trainer's own engines have generated enough in a step, as predicted while they do. Pure.

RLBoost learns from step to step how long the trainer seeds (`seeding`), though responses of one step are longer than
those of another, and machines come and go meanwhile. So the policy `arrival` looks ahead instead: seeding is over as
soon as the other instances are predicted to be done with all that is open before the trainer has trained. The trainer's
engines then give what they have to the others, which compute its context anew.

The time of the others is predicted as if their work were divided evenly, each with the longest response. A prediction
leaves out what the model of steps does, in each step alike: `Correction` learns by how much it is off.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from tensorhub_rollout.policy.finish_times import Load
from tensorhub_rollout.policy.plateau import StepModel

CORRECTION_MIN: Final = 0.5
CORRECTION_MAX: Final = 2.0
"""Limits of a correction."""
LEARNT_SHARE: Final = 0.5
"""The last step's share of a correction."""


class Correction(msgspec.Struct, frozen=True):
    """By what factor the others took longer than predicted, in the last steps."""

    factor: float = 1.0

    def after(self, predicted_s: float, took_s: float) -> "Correction":
        """Return the correction after a step; `predicted_s` without any correction."""
        if predicted_s <= 0:
            return self
        seen = min(CORRECTION_MAX, max(CORRECTION_MIN, took_s / predicted_s))
        return Correction(self.factor + LEARNT_SHARE * (seen - self.factor))


def others_take_s(others: Iterable[Load], local: Iterable[Load], steps: StepModel) -> float:
    """Return how long the others take for what they have and what the trainer's engines have, in seconds.

    Raises `ValueError` where there are no others.
    """
    others, local = [*others], [*local]
    if not others:
        raise ValueError("there are no other instances, which would take for ever")
    longest = max(each.longest for each in (*others, *local))
    prefill_s = steps.each_s * sum(each.context for each in local)
    busy_s = sum(each.busy_s for each in (*others, *local)) + prefill_s
    return steps.fixed_s * longest + busy_s / len(others)
