"""Every transition that the catalog knows, in one place; docs/protocol.md is checked against these tables.

The catalog changes a state only through `move`, so a move that is not written here can't happen.
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


class ShardMove(StrEnum):
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


class VersionMove(StrEnum):
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


class RoundMove(StrEnum):
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


class AgentMove(StrEnum):
    """What happens to an agent."""

    JOINED = "joined"
    EXPIRED = "expired"


SHARD_MOVES: Final = {
    (ShardState.EMPTY, ShardMove.PUBLISHED): ShardState.READY,
    (ShardState.READY, ShardMove.UNPUBLISHED): ShardState.DRAINING,
    (ShardState.DRAINING, ShardMove.DRAINED): ShardState.EMPTY,
    (ShardState.EMPTY, ShardMove.STARTED): ShardState.FILLING,
    (ShardState.FILLING, ShardMove.FILLED): ShardState.READY,
    (ShardState.FILLING, ShardMove.GIVEN_UP): ShardState.EMPTY,
    (ShardState.EMPTY, ShardMove.SWAPPED): ShardState.READY,
    (ShardState.READY, ShardMove.SWAPPED): ShardState.READY,
    (ShardState.EMPTY, ShardMove.LOST): ShardState.EMPTY,
    (ShardState.FILLING, ShardMove.LOST): ShardState.EMPTY,
    (ShardState.READY, ShardMove.LOST): ShardState.EMPTY,
    (ShardState.DRAINING, ShardMove.LOST): ShardState.EMPTY,
    (ShardState.EMPTY, ShardMove.RESTATED): ShardState.READY,
}

VERSION_MOVES: Final = {
    (VersionState.AVAILABLE, VersionMove.HOLDER_GONE): VersionState.UNAVAILABLE,
    (VersionState.UNAVAILABLE, VersionMove.HOLDER_BACK): VersionState.AVAILABLE,
    (VersionState.UNAVAILABLE, VersionMove.FORGOTTEN): VersionState.RETIRED,
    (VersionState.AVAILABLE, VersionMove.REWOUND): VersionState.RETIRED,
    (VersionState.UNAVAILABLE, VersionMove.REWOUND): VersionState.RETIRED,
}

ROUND_MOVES: Final = {
    (RoundState.JOINING, RoundMove.JOINED): RoundState.JOINING,
    (RoundState.JOINING, RoundMove.DECIDED): RoundState.DECIDED,
    (RoundState.JOINING, RoundMove.SETTLED): RoundState.OVER,
    (RoundState.JOINING, RoundMove.FAILED): RoundState.OVER,
    (RoundState.JOINING, RoundMove.EMPTIED): RoundState.OVER,
    (RoundState.DECIDED, RoundMove.DECIDED): RoundState.DECIDED,
    (RoundState.DECIDED, RoundMove.REOPENED): RoundState.JOINING,
    (RoundState.DECIDED, RoundMove.STARTED): RoundState.STARTED,
    (RoundState.DECIDED, RoundMove.COMPLETED): RoundState.OVER,
    (RoundState.DECIDED, RoundMove.FAILED): RoundState.OVER,
    (RoundState.STARTED, RoundMove.DECIDED): RoundState.DECIDED,
    (RoundState.STARTED, RoundMove.REOPENED): RoundState.JOINING,
    (RoundState.STARTED, RoundMove.COMPLETED): RoundState.OVER,
    (RoundState.STARTED, RoundMove.FAILED): RoundState.OVER,
}

AGENT_MOVES: Final = {
    (AgentState.UNKNOWN, AgentMove.JOINED): AgentState.LIVE,
    (AgentState.LIVE, AgentMove.JOINED): AgentState.LIVE,
    (AgentState.LOST, AgentMove.JOINED): AgentState.LIVE,
    (AgentState.LIVE, AgentMove.EXPIRED): AgentState.LOST,
}

S = TypeVar("S", bound=StrEnum)
M = TypeVar("M", bound=StrEnum)


class IllegalMove(AssertionError):
    """A handler tried a transition that no table has: a bug, never a user's fault."""


def move(table: dict[tuple[S, M], S], state: S, what: M) -> S:
    """Return the state after `what`. Raises `IllegalMove`."""
    after = table.get((state, what))
    if after is None:
        raise IllegalMove(f"{state!s} knows no {what!s}")
    return after
