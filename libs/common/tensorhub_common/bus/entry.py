"""One entry of a job's log, as it is read."""

from collections.abc import Mapping
from typing import Self

import msgspec

from tensorhub_common.bus.jetstream import NS_PER_S, Stored


class Entry(msgspec.Struct, frozen=True):
    """Entry number `seq`. `time` is JetStream's, in seconds since the epoch, and the same for every reader."""

    seq: int
    time: float
    subject: str
    headers: Mapping[str, str]
    data: bytes

    @classmethod
    def of(cls, stored: Stored) -> Self:
        """Make an entry of a message as it stands in the stream."""
        return cls(stored.seq, stored.time_ns / NS_PER_S, stored.subject, stored.headers, stored.data)
