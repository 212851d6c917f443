"""What the policy of scale is asked with: what a leader has open, measured, and heard of its trainer."""

import statistics
from collections.abc import Mapping
from typing import Final

import msgspec

from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.state import WishedInstances
from tensorhub_rollout.policy.scale import Peak, ScaleLimits, ScaleState, ScaleWish, wish

SCALE_LOOK_S: Final = 1.0
"""How often it is judged how many instances are worth having."""
SCALE_STEPS: Final = 2.0
"""What was needed within the last steps of the trainer, this number of them, is needed still."""
STEP_S_MAX: Final = 1800.0
"""A longer step was a trainer that was away."""


class FleetSize:
    """How many instances one leading manager wishes for."""

    def __init__(self, limits: ScaleLimits) -> None:
        """Know nothing yet."""
        self._limits = limits
        self._state = ScaleState()
        self._looked_at = 0.0
        self._keeps_up: tuple[float, int] | None = None
        """When a trainer has last learnt with how many instances it keeps up, and how many."""

    def learnt(self, instances: int, now: float) -> None:
        """Take with how many instances a trainer keeps up (N_prem)."""
        self._keeps_up = now, instances

    def look(
        self, leader: Leader, plateaus: Mapping[str, int], known: WishedInstances | None, now: float
    ) -> ScaleWish | None:
        """Return what is wished for now, where it is time to look and differs from `known`, which stands in the log."""
        if now - self._looked_at < SCALE_LOOK_S or not leader.fleet.has_gathered:
            return None
        self._looked_at = now
        if known is not None and not self._state.peaks:
            # A new leader takes none away before it has looked for as long as the one before.
            self._state = ScaleState((Peak(now, known.instances),))
        window_s = max(self._limits.window_s, SCALE_STEPS * min(leader.step_s(), STEP_S_MAX))
        limits = msgspec.structs.replace(self._limits, window_s=window_s)
        open_ = len(leader.requests)
        batch = _batch(leader, plateaus) or max(1, open_)
        found, self._state = wish(self._state, open_, batch, self._cap(now, window_s), limits, now)
        return None if known is not None and known.instances == found.instances else found

    def _cap(self, now: float, window_s: float) -> int | None:
        """Return with how many instances the trainer keeps up; None: it has not said so for long."""
        if self._keeps_up is None or now - self._keeps_up[0] >= window_s:
            return None
        return self._keeps_up[1]


def _batch(leader: Leader, plateaus: Mapping[str, int]) -> int | None:
    """Return how many requests an instance serves at its best; None: there is none whose slots are known."""
    sizes = [
        min(plateaus.get(runner, each.slots), each.slots)
        for runner, each in leader.instances.items()
        if each.slots and not each.is_local
    ]
    return statistics.median_low(sizes) if sizes else None
