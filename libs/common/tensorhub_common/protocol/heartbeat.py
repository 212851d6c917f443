"""What an agent says of itself at regular intervals."""

from typing import Final

import msgspec

from tensorhub_common.protocol.plans import Transport

SERVED_MAX: Final = 128
"""A heartbeat names at most this many readers of each transport, and the count of the others."""


class ReaderLoad(msgspec.Struct, frozen=True, array_like=True):
    """A shard that reads from an agent, and how many bytes it was planned to read there.

    `decided` is the place in the job's log where its round was decided for what it reads: when the log says after that
    that the read is over, or decides anew, then this word is over too, however late it is heard.
    """

    job: str
    model: str
    replica: str
    shard: int
    decided: int
    nbytes: int


class ServingLoad(msgspec.Struct, frozen=True, array_like=True):
    """How many shards read from an agent over a transport, and how many bytes these were planned to read there."""

    transport: Transport
    readers: int
    nbytes: int
    served: tuple[ReaderLoad, ...] = ()
    """Some of them by name; an agent of an earlier release names none."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """An agent is alive. Sent on `beat.<agent>`, for all jobs at once."""

    agent: str
    incarnation: int
    serving: tuple[ServingLoad, ...] = ()
    """Who reads from it just now; a transport without readers is left out."""
