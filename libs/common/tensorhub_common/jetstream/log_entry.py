"""One entry of a job's log, as it is read.

What a user may publish is NATS's to say, but JetStream sends its answers wherever a request's reply subject points,
with no regard to what the asker may publish: so whoever may read one message of a stream can make it stand in a job's
log, on any subject. Such words bear marks that their author can't take away: a header of JetStream's own on a message
that was looked up, and the subject of another stream on one that was delivered. Always true: a relayed entry has no
body and no headers here, so no fold takes it for the word of whom its subject names, and all folds take it alike.
"""

from collections.abc import Mapping
from typing import Final, Self

import msgspec

from tensorhub_common.jetstream.api import NS_PER_S, Stored
from tensorhub_common.protocol.subjects import PREFIX

RELAYED: Final = "relayed"
"""Stands in the verb's place of what was delivered out of another log: no command is called so."""


class StoredEntry(msgspec.Struct, frozen=True):
    """Entry number `seq`. `time` is JetStream's, in seconds since the epoch, and the same for every reader."""

    seq: int
    time: float
    subject: str
    headers: Mapping[str, str]
    data: bytes

    @classmethod
    def of(cls, stored: Stored, job: str) -> Self:
        """Make an entry of a message as it stands in the job's stream."""
        time = stored.time_ns / NS_PER_S
        if stored.is_relayed or not stored.subject.startswith(f"{PREFIX}.{job}."):
            own = stored.subject.startswith(f"{PREFIX}.{job}.")
            return cls(stored.seq, time, stored.subject if own else f"{PREFIX}.{job}.cmd.{RELAYED}", {}, b"")
        return cls(stored.seq, time, stored.subject, stored.headers, stored.data)
