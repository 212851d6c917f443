"""The trainer of a simulated job: it seeds, trains in micro-batches as responses come, and publishes. Pure.

One step: submit its groups; generate with its own engines for as long as RLBoost's Algorithm 1 says (NSDI'26), or,
where it has only these, until all is made; train what there is, at least a micro-batch at a time; publish.
"""

from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_simulator.rollout_performance.config import Trainer


@dataclass(slots=True)
class StepRecord:
    """One step; times in seconds."""

    began_at: float
    seeded_s: float = 0.0
    waited_s: float = 0.0
    """The trainer had less than a micro-batch."""
    trained_s: float = 0.0
    tokens: int = 0
    """Of responses that were trained."""
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.began_at


@dataclass(slots=True)
class StepProgress:
    """The responses of one step: those that are open, and those that wait to be trained."""

    limits: Trainer
    open: set[RequestId] = field(default_factory=set)
    ready: list[tuple[RequestId, int]] = field(default_factory=list)
    """With their tokens."""

    def ended(self, of: RequestId, tokens: int) -> None:
        """Note that a response is whole."""
        self.open.remove(of)
        self.ready.append((of, tokens))

    def take(self) -> list[tuple[RequestId, int]]:
        """Return what to train now; nothing: there is less than a micro-batch, and more to come."""
        if self.open and len(self.ready) < self.limits.micro_batch:
            return []
        found, self.ready = self.ready, []
        return found

    @property
    def is_over(self) -> bool:
        """Whether all of it was trained."""
        return not self.open and not self.ready
