"""The steps of a simulated trainer: what each took, and which of its responses are open or wait to be trained. Pure."""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_simulator.rollout_performance.config.scenario import Trainer


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
    number: int = 0
    """The step, from 0 on."""
    submitted: int = 0
    """How many responses were asked for until now."""
    open: set[RequestId] = field(default_factory=set)
    ready: list[tuple[RequestId, int]] = field(default_factory=list)
    """With their tokens."""
    submitted_at: float = 0.0
    """When its prompts were submitted, in seconds, as all times."""
    ends: list[float] = field(default_factory=list)
    """When each response was whole that is trained, the first first."""
    longest: int = 0
    """Tokens of the longest of these."""

    def ended(self, of: RequestId, tokens: int, now: float) -> None:
        """Note that a response is whole."""
        self.open.remove(of)
        self.add([(of, tokens, now)])

    def add(self, found: Iterable[tuple[RequestId, int, float]]) -> None:
        """Have responses be trained: each with its tokens, and when it was whole."""
        for of, tokens, at in found:
            self.ready.append((of, tokens))
            insort(self.ends, at)
            self.longest = max(self.longest, tokens)

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


@dataclass(slots=True)
class StreamProgress(StepProgress):
    """The responses of a trainer without steps: which prompt they are of does not matter."""

    left: int = 0
    """How many are to be trained until the next version."""

    def take(self) -> list[tuple[RequestId, int]]:
        """Return what to train now, up to the next version; nothing: there is less than a micro-batch."""
        count = min(len(self.ready), self.left)
        if count < min(self.limits.micro_batch, self.left):
            return []
        found, self.ready = self.ready[:count], self.ready[count:]
        self.left -= count
        return found

    @property
    def is_over(self) -> bool:
        """Whether a version is to be published."""
        return not self.left
