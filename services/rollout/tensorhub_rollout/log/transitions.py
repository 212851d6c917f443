"""What happens to a request, as the log knows it; docs/design/rollouts/states.md is made of this table."""

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


REQUEST_TRANSITIONS: Final = {
    (RequestState.OPEN, RequestTransition.ENDED): RequestState.ENDED,
    (RequestState.OPEN, RequestTransition.CANCELLED): RequestState.ENDED,
    (RequestState.OPEN, RequestTransition.DROPPED): RequestState.DONE,
    (RequestState.ENDED, RequestTransition.ACKNOWLEDGED): RequestState.DONE,
    (RequestState.ENDED, RequestTransition.DROPPED): RequestState.DONE,
}
