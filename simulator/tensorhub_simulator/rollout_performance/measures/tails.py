"""How long a step's last responses take. Pure.

A step's tail is the time from when 90 % of the responses that are trained are whole to when all are; the same from
80 % stands beside it. No placement is faster than the longest response alone on an instance, `bound_s`.
"""

from typing import Final

import msgspec

from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.models.engine_model import ends_s
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress

SHARES: Final = (0.8, 0.9)


class StepTail(msgspec.Struct, frozen=True):
    """When a step's responses were whole, in seconds since the step began, and how soon they could have been."""

    most_s: float
    """80 % of them."""
    nearly_s: float
    """90 %."""
    all_s: float
    bound_s: float
    """The longest one takes so long alone, with its prompt (longest x PTL(1))."""

    @property
    def tail_s(self) -> float:
        """From 90 % to all."""
        return self.all_s - self.nearly_s

    @property
    def tail80_s(self) -> float:
        """From 80 % to all."""
        return self.all_s - self.most_s


def tail_of(step: StepProgress, began_at: float, scenario: Scenario) -> StepTail:
    """Return the tail of a step that is over."""
    ends = step.ends
    most, nearly = (ends[max(0, round(share * len(ends)) - 1)] - began_at for share in SHARES)
    far = scenario.far.engine if scenario.far is not None else None
    alone_s = min(
        ends_s([step.longest], scenario.lengths.prompt, costs) for costs in (scenario.engine, far) if costs is not None
    )
    return StepTail(most, nearly, ends[-1] - began_at, alone_s)
