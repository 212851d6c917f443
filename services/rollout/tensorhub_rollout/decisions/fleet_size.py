"""What the policy of scale is asked with: what a leader has open, measured, and heard of its trainers.

Each model has instances and trainers of its own, so it is asked for each by itself, and the wish is the sum.
"""

import statistics
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.log.state import WishedInstances
from tensorhub_rollout.policy.scale import Peak, ScaleLimits, ScaleState, ScaleWish, wish

SCALE_LOOK_S: Final = 1.0
"""How often it is judged how many instances are worth having."""
SCALE_STEPS: Final = 2.0
"""What was needed within the last steps of the trainer, this number of them, is needed still."""
STEPS_MEASURED_MIN: Final = 64
"""An instance counts with its slots until this number of its steps were measured: the first few may say 1, and a wish
that was too high once is not lower for a whole window."""
STEP_S_MAX: Final = 1800.0
"""A longer step was a trainer that was away."""


class FleetSize:
    """How many instances one leading manager wishes for."""

    def __init__(self, limits: ScaleLimits) -> None:
        """Know nothing yet."""
        self._limits = limits
        self._states: dict[str, ScaleState] = {}
        """By model."""
        self._before: Peak | None = None
        """When this manager first looked, and what was wished for then; None: it has not looked yet."""
        self._looked_at = 0.0
        self._keeps_up: dict[str, dict[str, Peak]] = {}
        """By model and consumer: when a trainer has last learnt with how many instances it keeps up, and how many."""

    def learnt(self, model: str, consumer: str, instances: int, now: float) -> None:
        """Take with how many instances a trainer keeps up (N_prem)."""
        self._keeps_up.setdefault(model, {})[consumer] = Peak(now, instances)

    def look(
        self, leader: Leader, plateaus: Mapping[str, int], known: WishedInstances | None, now: float
    ) -> ScaleWish | None:
        """Return what is wished for now, where it is time to look and differs from `known`, which stands in the log."""
        if now - self._looked_at < SCALE_LOOK_S or not leader.fleet.has_gathered:
            return None
        self._looked_at = now
        if self._before is None:
            self._before = Peak(now, 0 if known is None else known.instances)
        window_s = max(self._limits.window_s, SCALE_STEPS * min(leader.models.step_s(), STEP_S_MAX))
        found = self._wished(leader, plateaus, window_s, now)
        return None if known is not None and known.instances == found.instances else found

    def _wished(self, leader: Leader, plateaus: Mapping[str, int], window_s: float, now: float) -> ScaleWish:
        limits = msgspec.structs.replace(self._limits, window_s=window_s)
        models = sorted({each.model for each in leader.state.consumers.values()})
        open_, may_run = leader.admission.open_requests()
        wishes: dict[str, ScaleWish] = {}
        states: dict[str, ScaleState] = {}
        caps = {model: self._cap(model, window_s, now) for model in models}
        for model in models:
            batch = _batch(leader, plateaus, {model}) or _batch(leader, plateaus, models) or max(1, open_[model])
            wishes[model], states[model] = wish(
                self._states.get(model, ScaleState()),
                may_run[model],
                batch,
                caps[model],
                limits,
                now,
                held_back=open_[model] - may_run[model],
            )
        self._states = states
        total = sum(each.instances for each in wishes.values())
        before, is_capped = self._before, bool(caps) and None not in caps.values()
        if before is not None and total < before.instances and now - before.at < window_s and not is_capped:
            # A new leader takes none away before it has looked for as long as the one before.
            return ScaleWish(before.instances, f"{before.instances} were wished for when this manager began to lead")
        telling = {model: each for model, each in wishes.items() if each.instances} or wishes
        if len(telling) <= 1:
            return ScaleWish(total, next((each.reason for each in telling.values()), "nothing is open"))
        return ScaleWish(total, "; ".join(f"{model}: {each.reason}" for model, each in telling.items()))

    def _cap(self, model: str, window_s: float, now: float) -> int | None:
        """Return with how many instances a model's trainers keep up; None: none has said so for long.

        Of several, that of the one which keeps up with most: each has measured the same instances, not a share of them.
        """
        said = [each.instances for each in self._keeps_up.get(model, {}).values() if now - each.at < window_s]
        return max(said, default=None)


def _batch(leader: Leader, plateaus: Mapping[str, int], models: Collection[str]) -> int | None:
    """Return how many requests an instance of these models serves at its best; None: there is none with known slots."""
    sizes = [
        min(plateaus.get(runner, each.slots), each.slots) if each.measured.count >= STEPS_MEASURED_MIN else each.slots
        for runner, each in leader.instances.items()
        if each.slots and not each.is_local and each.model in models
    ]
    return statistics.median_low(sizes) if sizes else None
