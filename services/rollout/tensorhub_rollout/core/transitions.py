"""Every transition of rollouts, in one place; docs/design/rollouts/states.md is made of these tables."""

from enum import StrEnum
from typing import Final


class RequestState(StrEnum):
    """How far a request is, as the log knows it."""

    OPEN = "open"
    ENDED = "ended"
    DONE = "done"


class RequestTransition(StrEnum):
    """What happens to a request."""

    ENDED = "ended"
    CANCELLED = "cancelled"
    ACKNOWLEDGED = "acknowledged"
    DROPPED = "dropped"


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


REQUEST_TRANSITIONS: Final = {
    (RequestState.OPEN, RequestTransition.ENDED): RequestState.ENDED,
    (RequestState.OPEN, RequestTransition.CANCELLED): RequestState.ENDED,
    (RequestState.OPEN, RequestTransition.DROPPED): RequestState.DONE,
    (RequestState.ENDED, RequestTransition.ACKNOWLEDGED): RequestState.DONE,
    (RequestState.ENDED, RequestTransition.DROPPED): RequestState.DONE,
}

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
