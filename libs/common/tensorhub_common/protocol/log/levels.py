"""Levels: which transitions the folders of a job's log use. Pure.

Registries and planners fold one log, and during an upgrade they are of two releases. So a transition that changes is
written beside the old one and used from a *level* on. The level of a job is part of its catalog. It is 0 in a log of a
release before levels, and only the leading registry raises it, by a command in the log (`lead`). All folders switch at
that command.

Always true: at a level that two releases know they fold one log alike; a folder that meets a level above its
`NEWEST_LEVEL` stops that job with `LevelUnknown` and folds nothing of it differently; a level never goes down.

A new level takes three things: a member of `Level`, the look at `catalog.level` in the handler, and a row in the table
here of what is new: a verb, a field of a command, a field of the state, or the code of an error.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from tensorhub_common.errors import TensorHubError


class Level(IntEnum):
    """What a job's folders do from each level on. Append only: a number that was released keeps its meaning."""

    FIRST = 0
    """As releases before levels fold. A command with an unknown field is refused, from any sender."""
    TOLERANT = 1
    """A field that this release does not know is passed over in the command of an agent; from outside it is refused.
    A sender's numbers that JSON readers don't keep exact are none, and no event repeats them."""
    WAKING_ONCE = 2
    """Where replicas that wait are ready at once, each of the others is decided once in a command."""
    FORGETTING = 3
    """Agents that were lost long ago are forgotten, with the shards that only they had, on the leader's word."""
    NEVER_OLDER = 4
    """A round for something newer takes nothing older than what the replica held when the round began, also once that
    is overwritten."""
    LEAVING_COPIES = 5
    """A copy of a retained version that leaves, or that its agent can't take back, is replaced while somebody holds
    the version, and makes no other copy useless."""
    HOLDING = 6
    """A version has a copy while somebody holds it, and the hold ends by itself."""


NEWEST_LEVEL: Final = max(Level)
"""The highest level that this release can fold."""

VERBS_SINCE: Final[Mapping[str, Level]] = {
    "forget_agent": Level.FORGETTING,
    "hold": Level.HOLDING,
    "end_hold": Level.HOLDING,
}
"""Verbs that were added later. Below their level they are no commands, as older releases say."""

ERRORS_SINCE: Final[Mapping[str, Level]] = dict.fromkeys(
    (
        "AgentUnavailable",
        "BadCommand",
        "DrainTimeout",
        "IntegrityError",
        "InvalidName",
        "JobGone",
        "LayoutMismatch",
        "MemoryExhausted",
        "NotFilled",
        "NotInThisVersion",
        "NotPublished",
        "RegistryUnavailable",
        "ReplicaConflict",
        "RetentionFull",
        "RoundTimeout",
        "StaleSender",
        "VersionConflict",
        "VersionUnavailable",
    ),
    Level.FIRST,
)
"""Codes of errors that a command may name and an event repeats. Below its level a code counts as unknown."""

ERRORS_NEVER_LOGGED: Final = frozenset({"BadPrompt", "NoInstance", "RolloutUnavailable"})
"""Codes of rollouts, which have a log of their own. In the log of a job they count as unknown at every level."""

COMMAND_FIELDS_SINCE: Final[Mapping[tuple[str, str], Level]] = {}
"""Fields of commands that were added later, by verb and field. Below their level they count as unknown."""

STATE_FIELDS_SINCE: Final[Mapping[tuple[str, str], Level]] = {
    ("Catalog", "level"): Level.TOLERANT,
    ("AgentRecord", "lost_at"): Level.FORGETTING,
    ("Round", "began_with"): Level.NEVER_OLDER,
    ("Shard", "aside"): Level.LEAVING_COPIES,
    ("Model", "holds"): Level.HOLDING,
    ("VersionHold", "term"): Level.HOLDING,
    ("VersionHold", "n"): Level.HOLDING,
    ("VersionHold", "versions"): Level.HOLDING,
    ("VersionHold", "until"): Level.HOLDING,
}
"""Fields of the catalog's dataclasses that were added later, by class and field. Below their level they keep their
default, and a snapshot does not name them, so that an older release can go on from it."""


class LevelUnknown(TensorHubError):
    """The log was raised to a level above what this release can fold."""


def check_level(job: str, level: int) -> None:
    """Raise `LevelUnknown` where this release can't fold a job at this level."""
    if level > NEWEST_LEVEL:
        raise LevelUnknown(
            f"job {job!r} was raised to level {level}, and this release folds levels up to {int(NEWEST_LEVEL)}: it "
            "stops this job here. Run the release that raised it, or a newer one"
        )


def known_error(level: int, code: str) -> str:
    """Return the code of an error that a command names, as folders at this level repeat it."""
    return code if code in ERRORS_SINCE and level >= ERRORS_SINCE[code] else TensorHubError.__name__
