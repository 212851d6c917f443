"""One attempt of a request on an instance: its states, and what is remembered of it. Never written to the log."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tensorhub_common.catalog.transitions import transition
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import Finished, FinishReason


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
