"""Every transition that the catalog knows, in one place; docs/design/protocol/states.md is made of these tables.

The catalog changes a state only through `transition`, so a move that is not written here can't happen.
"""

from enum import StrEnum
from typing import Final, TypeVar

from tensorhub_common.protocol.queries import VersionState


class ShardState(StrEnum):
    """What a shard's memory is, as far as the log knows."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


class ShardTransition(StrEnum):
    """What happens to a shard."""

    PUBLISHED = "published"
    UNPUBLISHED = "unpublished"
    DRAINED = "drained"
    STARTED = "started"
    FILLED = "filled"
    GIVEN_UP = "given-up"
    SWAPPED = "swapped"
    LOST = "lost"
    RESTATED = "restated"


class VersionTransition(StrEnum):
    """What happens to a version."""

    HOLDER_GONE = "holder-gone"
    HOLDER_BACK = "holder-back"
    FORGOTTEN = "forgotten"
    REWOUND = "rewound"


class RoundState(StrEnum):
    """How far a replica's round is."""

    JOINING = "joining"
    DECIDED = "decided"
    STARTED = "started"
    OVER = "over"


class RoundTransition(StrEnum):
    """What happens to a round."""

    JOINED = "joined"
    DECIDED = "decided"
    REOPENED = "reopened"
    STARTED = "started"
    COMPLETED = "completed"
    SETTLED = "settled"
    FAILED = "failed"
    EMPTIED = "emptied"


class AgentState(StrEnum):
    """Whether an agent's word counts."""

    UNKNOWN = "unknown"
    LIVE = "live"
    LOST = "lost"


class AgentTransition(StrEnum):
    """What happens to an agent."""

    JOINED = "joined"
    EXPIRED = "expired"


SHARD_TRANSITIONS: Final = {
    (ShardState.EMPTY, ShardTransition.PUBLISHED): ShardState.READY,
    (ShardState.READY, ShardTransition.UNPUBLISHED): ShardState.DRAINING,
    (ShardState.DRAINING, ShardTransition.DRAINED): ShardState.EMPTY,
    (ShardState.EMPTY, ShardTransition.STARTED): ShardState.FILLING,
    (ShardState.FILLING, ShardTransition.FILLED): ShardState.READY,
    (ShardState.FILLING, ShardTransition.GIVEN_UP): ShardState.EMPTY,
    (ShardState.EMPTY, ShardTransition.SWAPPED): ShardState.READY,
    (ShardState.READY, ShardTransition.SWAPPED): ShardState.READY,
    (ShardState.EMPTY, ShardTransition.LOST): ShardState.EMPTY,
    (ShardState.FILLING, ShardTransition.LOST): ShardState.EMPTY,
    (ShardState.READY, ShardTransition.LOST): ShardState.EMPTY,
    (ShardState.DRAINING, ShardTransition.LOST): ShardState.EMPTY,
    (ShardState.EMPTY, ShardTransition.RESTATED): ShardState.READY,
}

VERSION_TRANSITIONS: Final = {
    (VersionState.AVAILABLE, VersionTransition.HOLDER_GONE): VersionState.UNAVAILABLE,
    (VersionState.UNAVAILABLE, VersionTransition.HOLDER_BACK): VersionState.AVAILABLE,
    (VersionState.UNAVAILABLE, VersionTransition.FORGOTTEN): VersionState.RETIRED,
    (VersionState.AVAILABLE, VersionTransition.REWOUND): VersionState.RETIRED,
    (VersionState.UNAVAILABLE, VersionTransition.REWOUND): VersionState.RETIRED,
}

ROUND_TRANSITIONS: Final = {
    (RoundState.JOINING, RoundTransition.JOINED): RoundState.JOINING,
    (RoundState.JOINING, RoundTransition.DECIDED): RoundState.DECIDED,
    (RoundState.JOINING, RoundTransition.SETTLED): RoundState.OVER,
    (RoundState.JOINING, RoundTransition.FAILED): RoundState.OVER,
    (RoundState.JOINING, RoundTransition.EMPTIED): RoundState.OVER,
    (RoundState.DECIDED, RoundTransition.DECIDED): RoundState.DECIDED,
    (RoundState.DECIDED, RoundTransition.REOPENED): RoundState.JOINING,
    (RoundState.DECIDED, RoundTransition.STARTED): RoundState.STARTED,
    (RoundState.DECIDED, RoundTransition.COMPLETED): RoundState.OVER,
    (RoundState.DECIDED, RoundTransition.FAILED): RoundState.OVER,
    (RoundState.STARTED, RoundTransition.DECIDED): RoundState.DECIDED,
    (RoundState.STARTED, RoundTransition.REOPENED): RoundState.JOINING,
    (RoundState.STARTED, RoundTransition.COMPLETED): RoundState.OVER,
    (RoundState.STARTED, RoundTransition.FAILED): RoundState.OVER,
}

AGENT_TRANSITIONS: Final = {
    (AgentState.UNKNOWN, AgentTransition.JOINED): AgentState.LIVE,
    (AgentState.LIVE, AgentTransition.JOINED): AgentState.LIVE,
    (AgentState.LOST, AgentTransition.JOINED): AgentState.LIVE,
    (AgentState.LIVE, AgentTransition.EXPIRED): AgentState.LOST,
}

S = TypeVar("S", bound=StrEnum)
M = TypeVar("M", bound=StrEnum)


class IllegalTransition(AssertionError):
    """A handler tried a transition that no table has: a bug, never a user's fault."""


def transition(table: dict[tuple[S, M], S], state: S, what: M) -> S:
    """Return the state after `what`. Raises `IllegalTransition`."""
    after = table.get((state, what))
    if after is None:
        raise IllegalTransition(f"{state!s} knows no {what!s}")
    return after
