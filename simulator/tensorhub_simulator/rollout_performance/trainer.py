"""The trainer of a simulated job: it seeds, trains in micro-batches as responses come, and publishes. Pure.

One step: submit its groups; generate with its own engines for as long as RLBoost's Algorithm 1 says (NSDI'26), or,
where it has only these, until all is made; train what there is, at least a micro-batch at a time; publish.

A trainer that is one step ahead (StreamRL, arXiv 2504.15930, section 3) submits a step's groups when the step before
begins: they are made on weights that lack one step of training, while that step is trained.

One without steps trains whatever has ended, and publishes after as many responses as a step has.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_simulator.rollout_performance.config import Scenario, System, Trainer

COLOCATED: Final[frozenset[System]] = frozenset({"waitall", "rollpacker"})
"""All machines of these generate until a step is made, and then train it."""


def trainer_of(scenario: Scenario, system: System) -> Trainer:
    """Return a scenario's trainer as a system has it."""
    found = scenario.trainer
    if system in COLOCATED:
        # The same machines, which generate together and then train together.
        engines = found.engines + scenario.spot.first
        token_s = found.token_s * found.engines / engines
        whole = found.groups * found.group_size
        return replace(
            found, seeds=True, steps_ahead=0, streams=False, micro_batch=whole, engines=engines, token_s=token_s
        )
    if system in ("rounds", "graded"):
        return replace(found, steps_ahead=0)
    if system == "disaggregated":
        return replace(found, seeds=False, steps_ahead=0, streams=False, micro_batch=found.groups * found.group_size)
    if system == "reserved" and not found.seeds:
        # The same machines, which generate together and then train together.
        engines = found.engines + scenario.spot.first
        token_s = found.token_s * found.engines / engines
        return replace(found, seeds=True, steps_ahead=0, streams=False, engines=engines, token_s=token_s)
    return found


def misfit_of(scenario: Scenario, system: System) -> str | None:
    """Say why a system is not made for a scenario's trainer, and what to do; None: it is."""
    if system == "polyrl" and not scenario.trainer.seeds:
        return "polyrl is of a trainer whose GPUs generate first and then train: set trainer.seeds to true"
    if system == "laminar" and not scenario.trainer.steps_ahead:
        return "laminar's instances go on with older weights: set trainer.seeds to false and trainer.steps_ahead to 1"
    return None


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
