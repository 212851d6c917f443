"""What an engine of a scenario can do. Pure."""

import msgspec

from tensorhub_rollout.policy.plateau import StepModel


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one instance can do. Seconds of a step: fixed, for each request, for each context token of each request."""

    fixed_s: float
    each_s: float
    attention_s: float
    prefill_tokens_per_s: float
    slots: int
    """How many requests it runs at once."""
    kv_tokens: int | None = None
    """Limit of the context tokens of all that run, for which there is memory; None: none."""

    @property
    def step(self) -> StepModel:
        """How long a step takes."""
        return StepModel(self.fixed_s, self.each_s, self.attention_s)
