"""Attempts and instances, as the leading manager knows them. Never written to the log."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from tensorhub_common.catalog.transitions import transition
from tensorhub_common.protocol.rollout.entries import Attempt, RequestEnded, RequestId
from tensorhub_common.protocol.rollout.messages import Finished, FinishReason
from tensorhub_rollout.core.leader_counts import DiscardReason
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.policy.plateau import StepModel, StepSums
from tensorhub_rollout.policy.view import InstanceView

PAST_ATTEMPTS_MAX: Final = 16
"""Limit of the attempts that are over and are told of a response, the latest."""


class AttemptState(StrEnum):
    """How far an attempt is, as the leader knows it."""

    PREPARED = "prepared"
    ASSIGNED = "assigned"
    HELD = "held"
    STOPPING = "stopping"
    COMPLETE = "complete"
    OVER = "over"


class AttemptTransition(StrEnum):
    """What happens to an attempt."""

    LOADED = "loaded"
    CONFIRMED = "confirmed"
    ADOPTED = "adopted"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    STOPPED = "stopped"
    COMPLETED = "completed"
    LOST = "lost"
    CLOSED = "closed"


ATTEMPT_TRANSITIONS: Final = {
    (AttemptState.PREPARED, AttemptTransition.LOADED): AttemptState.ASSIGNED,
    (AttemptState.PREPARED, AttemptTransition.ADOPTED): AttemptState.HELD,
    (AttemptState.PREPARED, AttemptTransition.LOST): AttemptState.OVER,
    (AttemptState.PREPARED, AttemptTransition.CLOSED): AttemptState.OVER,
    (AttemptState.ASSIGNED, AttemptTransition.CONFIRMED): AttemptState.HELD,
    (AttemptState.ASSIGNED, AttemptTransition.REFUSED): AttemptState.OVER,
    (AttemptState.ASSIGNED, AttemptTransition.WITHDRAWN): AttemptState.STOPPING,
    (AttemptState.ASSIGNED, AttemptTransition.LOST): AttemptState.OVER,
    (AttemptState.ASSIGNED, AttemptTransition.CLOSED): AttemptState.OVER,
    (AttemptState.HELD, AttemptTransition.WITHDRAWN): AttemptState.STOPPING,
    (AttemptState.HELD, AttemptTransition.COMPLETED): AttemptState.COMPLETE,
    (AttemptState.HELD, AttemptTransition.LOST): AttemptState.OVER,
    (AttemptState.HELD, AttemptTransition.CLOSED): AttemptState.OVER,
    (AttemptState.STOPPING, AttemptTransition.STOPPED): AttemptState.OVER,
    (AttemptState.STOPPING, AttemptTransition.COMPLETED): AttemptState.COMPLETE,
    (AttemptState.STOPPING, AttemptTransition.LOST): AttemptState.OVER,
    (AttemptState.STOPPING, AttemptTransition.CLOSED): AttemptState.OVER,
    (AttemptState.COMPLETE, AttemptTransition.CLOSED): AttemptState.OVER,
}
"""docs/design/rollouts/states.md is made of this table."""


@dataclass(slots=True, eq=False)
class Placement:
    """One attempt of a request on an instance."""

    request: RequestId
    attempt: Attempt
    runner: str
    began_at: int
    """How many tokens of the request were held when it was placed."""
    tokens_max: int
    """Limit of the tokens of the response."""
    state: AttemptState = AttemptState.PREPARED
    confirmed: int = 0
    """How many tokens of the prefix the runner has said that it holds."""
    asked_at: float | None = None
    """When it was last asked to begin or to stop, and did not answer since."""
    stopped_at: int | None = None
    """After how many tokens of the request the runner has stopped it."""
    finished: Finished | None = None
    moves_to: str | None = None
    """Where its request goes once it is stopped."""
    placed_at: float = 0.0
    first_token_at: float | None = None
    """When its first token came."""
    completed_at: float | None = None
    """When its last token came."""
    moved_by: AttemptTransition | None = None
    """The last transition."""
    reason: str = ""
    """Why it was placed there; of a request that was moved, why it was."""
    withdrawn_why: str = ""
    """Why it was taken from there; empty: it was not."""

    def move(self, what: AttemptTransition) -> None:
        """Change the state. Raises `IllegalTransition`."""
        self.state = transition(ATTEMPT_TRANSITIONS, self.state, what)
        self.moved_by = what


@dataclass(slots=True, frozen=True)
class PastAttempt:
    """An attempt that is over, as far as this leader saw it. Times are the leader's own, in seconds."""

    attempt: Attempt
    runner: str
    placed_at: float
    first_token_at: float | None
    over_at: float
    began_at: int
    """How many tokens there were when it was placed."""
    tokens: int
    """How many there were when it was over."""
    ended_by: AttemptTransition | None
    finished: FinishReason | None
    """Why it ended at its runner by itself; None: it did not."""
    why: str | None = None
    """With what it failed."""
    reason: str = ""
    """Why it was placed there."""
    withdrawn_why: str = ""
    """Why it was taken from there; empty: it was not."""

    @classmethod
    def of(cls, placement: Placement, tokens: int, now: float, why: str | None = None) -> "PastAttempt":
        """Return a placement as it is now, at its end."""
        over_at = now if placement.completed_at is None else placement.completed_at
        return cls(
            placement.attempt,
            placement.runner,
            placement.placed_at,
            placement.first_token_at,
            over_at,
            placement.began_at,
            # A response that is to begin anew has none left.
            tokens if placement.finished is None else placement.finished.tokens,
            placement.moved_by,
            None if placement.finished is None else placement.finished.reason,
            why,
            placement.reason,
            placement.withdrawn_why,
        )


class RequestsInOrder:
    """Requests, each once, in the order in which they came. A tuple of them is made once for each change."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, None] = {}
        self._shown: tuple[RequestId, ...] | None = ()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, of: object) -> bool:
        return of in self._requests

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._requests)

    def add(self, of: RequestId) -> None:
        """Add a request behind the others, if it is not there."""
        self._requests[of] = None
        self._shown = None

    def discard(self, of: RequestId) -> None:
        """Take a request out, if it is there."""
        if of in self._requests:
            del self._requests[of]
            self._shown = None

    def shown(self) -> tuple[RequestId, ...]:
        """Return all of them."""
        if self._shown is None:
            self._shown = tuple(self._requests)
        return self._shown


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
    tokens_per_s: float = 0.0
    """Over the last look at its rate."""
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


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What the leader knows of an open request beside its tokens."""

    model: str
    step: int
    """How many of the model's newest versions the leader had seen when it came."""
    placement: Placement | None = None
    """Its one attempt that is not over."""
    unforgotten: dict[Attempt, str] = field(default_factory=dict)
    """Earlier attempts with their runners, which keep their tokens until a later one is confirmed."""
    fruitless: int = 0
    """Attempts one after the other that were lost or failed, and made no token, while no other was tried there."""
    lost_together: int = 0
    """Attempts one after the other that were lost without a token together with others: which of them did it?"""
    restarts: int = 0
    age_max: int | None = None
    """How many newer versions may be published when it is delivered; None: any number, or not read yet."""
    newest: int | None = None
    """The newest version when it was submitted; None: not known, or not read yet."""
    void: DiscardReason | None = None
    """Why its tokens count for nothing once its attempt is stopped; None: they count."""
    ending: RequestEnded | None = None
    """How it ends without another attempt: it was tried too often, or its tokens are all here."""
    past: list[PastAttempt] = field(default_factory=list)
    """Its attempts that are over, the latest; nothing is decided by them."""

    def note_past(self, past: PastAttempt) -> None:
        """Remember an attempt that is over."""
        self.past.append(past)
        if len(self.past) > PAST_ATTEMPTS_MAX:
            del self.past[0]

    def attempts(self, tokens: int, now: float) -> tuple[PastAttempt, ...]:
        """Return its attempts as if it had ended now with so many tokens: that ends the one that is not over."""
        last = () if self.placement is None else (PastAttempt.of(self.placement, tokens, now),)
        return (*self.past, *last)

    @property
    def is_waiting(self) -> bool:
        """Whether it may be placed."""
        return self.placement is None and self.ending is None
