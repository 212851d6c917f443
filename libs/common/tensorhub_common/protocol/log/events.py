"""What all events have in common, and what those about one model, replica, shard or round have."""

from typing import Final

import msgspec

from tensorhub_common.protocol.log.commands import Sender

HUB_MODEL: Final = "_hub"
"""Stands in the subject's model token for events that belong to no model."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part common to all events. `time` is JetStream's time of the command, in seconds since the epoch."""

    cmd: int = 0
    i: int = 0
    k: int = 0
    time: float = 0.0
    by: Sender | None = None


class ModelEvent(Event, frozen=True, kw_only=True):
    """An event about one model."""

    model: str


class ReplicaEvent(ModelEvent, frozen=True, kw_only=True):
    """An event about one replica."""

    replica: str


class ShardEvent(ReplicaEvent, frozen=True, kw_only=True):
    """An event about one shard."""

    shard: int


class RoundEvent(ReplicaEvent, frozen=True, kw_only=True):
    """An event about a replica's round. A round's number is the log sequence of the command that opened it."""

    round: int


def kind_of(event: Event) -> str:
    """Return the event's kind, "noun.what", as it stands in the body and the subject."""
    return str(event.__struct_config__.tag)


def model_of(event: Event) -> str:
    """Return what stands in the subject's model token."""
    model = getattr(event, "model", HUB_MODEL)
    return model if isinstance(model, str) else HUB_MODEL
