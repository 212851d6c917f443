"""The log of a job's rollouts: one JetStream stream that holds their entries in one total order.

docs/design/rollouts/log.md has the entries and who may append which. The log refuses what does not fit and drops
nothing. The stream gives single entries by its leader alone, through a request that agents have no permission for.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import MessageTooLarge
from tensorhub_common.bus.message import NO_HEADERS
from tensorhub_common.errors import InvalidName
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_entry import RELAYED, StoredEntry
from tensorhub_common.jetstream.log_reader import OnReadState
from tensorhub_common.jetstream.stream_log import APPEND_TIMEOUT_S, FIXED, StreamLog, log_config
from tensorhub_common.protocol.rollout import entries
from tensorhub_common.protocol.rollout.entries import AnyEntry, UnreadableEntry
from tensorhub_common.protocol.subjects import (
    RolloutEntrySubject,
    parse_subject,
    rollout_entries_of,
    rollout_entry,
    rollout_stream,
)

ROLLOUT_LOG_BYTES_MAX: Final = 512 * 1024 * 1024
"""A rollout log that is full refuses entries (`LogFull`); an operator may raise the limit."""
HEADER_BYTES_MAX: Final = 4096
"""Room for an entry's headers beside its body."""


class RolloutLogEntry(msgspec.Struct, frozen=True):
    """Entry number `seq` of a rollout log. `time` is JetStream's, in seconds since the epoch."""

    seq: int
    time: float
    entry: AnyEntry | UnreadableEntry
    headers: Mapping[str, str] = NO_HEADERS


def _config(job: str, replicas: int) -> dict[str, Any]:
    description = f"TensorHub's log of the rollouts of job {job}"
    bytes_max = entries.ENTRY_BYTES_MAX + HEADER_BYTES_MAX
    config = log_config(rollout_stream(job), description, [rollout_entries_of(job)], ROLLOUT_LOG_BYTES_MAX, bytes_max)
    return {**config, "num_replicas": replicas, "allow_direct": False}


async def open_rollout_log(bus: Bus, job: str, replicas: int = 1) -> "RolloutLog":
    """Make the log of the job's rollouts, or check the existing one. Raises `StreamMismatch` when it is not fit."""
    await api.ensure_stream(bus, _config(job, replicas), FIXED)
    return RolloutLog(bus, job)


class RolloutLog(StreamLog):
    """The log of one job's rollouts. Making it asks nothing of NATS and needs no `open_rollout_log` of its own."""

    def __init__(self, bus: Bus, job: str) -> None:
        super().__init__(bus, job, rollout_stream(job), "rollout log", is_direct=False)

    async def append(
        self,
        entry: AnyEntry,
        msg_id: str,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> int:
        """Write an entry under its verb and return its sequence number, also when the log has it already.

        Raises `LogFull`, `LogMissing`, `MessageTooLarge`: nothing was written. Raises `NoBus` when the bound is over:
        whether it was written is unknown, so repeat it with the same id.
        """
        verb, body = str(entry.__struct_config__.tag), entries.encode(entry)
        if len(body) > entries.ENTRY_BYTES_MAX:
            raise MessageTooLarge(
                f"the entry {verb} has {len(body)} bytes, and at most {entries.ENTRY_BYTES_MAX} are taken: split it up"
            )
        return await self._append_once(rollout_entry(self.job, verb), body, msg_id, headers, timeout_s)

    async def follow(
        self, start_seq: int = 1, *, on_read_state: OnReadState | None = None
    ) -> AsyncGenerator[RolloutLogEntry, None]:
        """Yield every entry from `start_seq` on, for ever, in order, each exactly once, whatever becomes of NATS.

        What is no entry comes as `UnreadableEntry`. While NATS is away it waits. Raises `LogGap` where an entry is no
        longer there, `LogShorter` when the log ends before what was read or before `start_seq - 1`, `LogMissing`
        without a log. Close it (`aclose`) when done. `on_read_state` is called with the reason while the log can't be
        read.
        """
        async with aclosing(self._entries(start_seq, on_read_state=on_read_state)) as found:
            async for stored in found:
                yield RolloutLogEntry(stored.seq, stored.time, decoded(stored), stored.headers)


def decoded(stored: StoredEntry) -> AnyEntry | UnreadableEntry:
    """Return what stands in the log; the word of JetStream itself, and a subject that is no entry's, are unreadable."""
    try:
        subject = parse_subject(stored.subject)
    except InvalidName as why:
        return UnreadableEntry("", str(why))
    if not isinstance(subject, RolloutEntrySubject):
        return UnreadableEntry(RELAYED, f"{stored.subject!r:.200} is no subject of an entry of rollouts")
    return entries.decode(subject.verb, stored.data)
