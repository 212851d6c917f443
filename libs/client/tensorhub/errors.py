"""The errors of the SDK, one list: `tensorhub` shows each of them."""

from tensorhub_common.bus.errors import LogGap, LogMissing
from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    BadPrompt,
    DrainTimeout,
    IntegrityError,
    InvalidName,
    JobGone,
    LayoutMismatch,
    MemoryExhausted,
    NoInstance,
    NotFilled,
    NotInThisVersion,
    NotPublished,
    RegistryUnavailable,
    ReplicaConflict,
    RetentionFull,
    RolloutUnavailable,
    RoundTimeout,
    StaleSender,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)

__all__ = [
    "AgentUnavailable",
    "BadCommand",
    "BadPrompt",
    "DrainTimeout",
    "IntegrityError",
    "InvalidName",
    "InvalidSetting",
    "JobGone",
    "LayoutMismatch",
    "LogGap",
    "LogMissing",
    "MemoryExhausted",
    "NoInstance",
    "NotFilled",
    "NotInThisVersion",
    "NotPublished",
    "RegistryUnavailable",
    "ReplicaConflict",
    "RetentionFull",
    "RolloutUnavailable",
    "RoundTimeout",
    "StaleSender",
    "TensorHubError",
    "VersionConflict",
    "VersionUnavailable",
]


def closed_error() -> AgentUnavailable:
    """Return the error of a call on a hub that is closed."""
    return AgentUnavailable("this hub is closed: call tensorhub.connect() again")
