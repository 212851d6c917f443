"""One engine and its runner, as the leading manager knows them. Never written to the log."""

import math
from dataclasses import dataclass, field
from typing import Literal

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import RunnerHeartbeat, attempt_key
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.policy.plateau import StepModel, StepSums
from tensorhub_rollout.policy.view import InstanceView


class RequestsInOrder(dict[RequestId, None]):
    """Requests, each once, in the order in which they came: policies see these themselves, and no copies."""

    def add(self, of: RequestId) -> None:
        """Add a request behind the others, if it is not there."""
        self[of] = None

    def discard(self, of: RequestId) -> None:
        """Take a request out, if it is there."""
        self.pop(of, None)


@dataclass(slots=True, eq=False)
class Instance:
    """One engine and its runner."""

    runner: str
    incarnation: int
    heard_at: float
    has_reported: bool = False
    """Whether this leader knows what it holds."""
    model: str = ""
    """Empty until a heartbeat says it."""
    slots: int = 0
    version: int | None = None
    is_leaving: bool = False
    is_local: bool = False
    """Whether it is the trainer's own engine."""
    is_enough: bool = False
    """Whether that is told that it may stop."""
    keeps_versions: bool = False
    """Whether it loads the version that it is asked for, and keeps that."""
    version_wanted: int | Literal["newest"] | None = None
    """What it was told to have in memory; None: this leader has told it nothing yet."""
    steps: int = 0
    stepped_at: float = 0.0
    """When its engine was last seen to make a step, or to have nothing to do."""
    tokens: int = 0
    """How many tokens it has made since this leader knows it."""
    tokens_rated: int = 0
    """How many of them there were at the last look at its rate."""
    tokens_per_s: float = 0.0
    """Over the time before that look."""
    attempts: set[Attempt] = field(default_factory=set)
    """Those that are placed on it and not over."""
    pending: RequestsInOrder = field(default_factory=RequestsInOrder)
    """Requests that are to run on it and have made no token there, in the order in which they were placed."""
    executing: RequestsInOrder = field(default_factory=RequestsInOrder)
    """Requests that have made tokens there and are to go on."""
    streaming: dict[int, tuple[Response, int]] = field(default_factory=dict)
    """By `attempt_key`: the responses of attempts that have made tokens and go on, with the limit of their tokens."""
    measured: StepSums = field(default_factory=StepSums)
    """The latest steps of its engine."""
    step_model: StepModel | None = None
    """How long its steps take; None: too little was measured."""
    fitted_at: float = -math.inf
    """When that was last fitted to them."""
    checkpointed_at: float = 0.0
    to_forget: dict[Attempt, None] = field(default_factory=dict)
    """Attempts that it may forget and has not said that it has."""
    asked_to_forget_at: float | None = None
    shown: InstanceView | None = None
    """As policies saw it last; None: something of it has changed since, beside its requests."""

    @property
    def takes_more(self) -> bool:
        """Whether requests may be placed on it."""
        return self.has_reported and not self.is_leaving and self.version is not None and self.slots > 0

    @property
    def awaits_version(self) -> bool:
        """Whether it is to have one version, and does not have it yet."""
        return isinstance(self.version_wanted, int) and self.version != self.version_wanted

    def take(self, beat: RunnerHeartbeat, now: float) -> bool:
        """Take what its runner tells; tell whether policies see something else of it than before."""
        before = self._told()
        if beat.steps != self.steps or not self.attempts:
            self.stepped_at = now
        self.steps = beat.steps
        self.model, self.slots, self.version = beat.model, beat.slots, beat.version
        self.is_leaving, self.is_local, self.keeps_versions = beat.is_leaving, beat.is_local, beat.keeps_versions
        self.measured.extend(beat.measured)
        return self._told() != before

    def _told(self) -> tuple[object, ...]:
        return self.model, self.slots, self.version, self.is_leaving, self.is_local, self.keeps_versions

    def note_idle(self, of: RequestId, attempt: Attempt) -> None:
        """Note that a request is to run no more on it, of which it had this attempt."""
        self.pending.discard(of)
        self.executing.discard(of)
        self.streaming.pop(attempt_key(attempt), None)
