"""A job's log: one JetStream stream that holds all its commands and events in one total order.

The log is the truth of the hub: the catalog is a fold over it. Invariants of `append`: those of `stream_log`; an event
that was appended against the last event's sequence is stored only if no other event came between.
"""

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoResponder
from tensorhub_common.bus.message import NO_HEADERS
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.log_reader import EntryFilter, OnReadState
from tensorhub_common.jetstream.stream_log import APPEND_TIMEOUT_S, FIXED, StreamLog, log_config
from tensorhub_common.protocol.subjects import PREFIX, commands_of, events_of, job_of_log, log_stream

LOG_BYTES_MAX: Final = 1024 * 1024 * 1024
"""About two million entries. A log that is full refuses entries (`LogFull`); an operator may raise the limit."""
ENTRY_BYTES_MAX: Final = 1024 * 1024

JOB_PAGES_MAX: Final = 100
"""Of at most 1,024 names each."""


def _config(job: str, replicas: int) -> dict[str, Any]:
    subjects = (commands_of(job), events_of(job))
    description = f"TensorHub's log of job {job}"
    return {
        **log_config(log_stream(job), description, subjects, LOG_BYTES_MAX, ENTRY_BYTES_MAX),
        "num_replicas": replicas,
        "allow_atomic": True,
    }


async def open_job(bus: Bus, job: str, replicas: int = 1) -> "JobLog":
    """Make the job's log, or check the existing one. Raises `StreamMismatch` when it is not fit to be one."""
    await api.ensure_stream(bus, _config(job, replicas), FIXED)
    return JobLog(bus, job)


async def list_jobs(bus: Bus) -> list[str]:
    """Return the names of all jobs that have a log, sorted."""
    found: set[str] = set()
    offset = 0
    for _ in range(JOB_PAGES_MAX):
        wanted = {"offset": offset, "subject": f"{PREFIX}.*.cmd.>"}
        page = await api.insist(partial(api.api, bus, "STREAM.NAMES", wanted))
        streams = page["streams"] or []
        found.update(job for stream in streams if (job := job_of_log(stream)) is not None)
        offset += len(streams)
        if not streams or offset >= page["total"]:
            break
    return sorted(found)


class JobLog(StreamLog):
    """One job's log, for reading and writing. Making it asks nothing of NATS and needs no `open_job` of its own."""

    def __init__(self, bus: Bus, job: str) -> None:
        super().__init__(bus, job, log_stream(job), "log", is_direct=True)
        self._events = events_of(job)

    async def append(
        self,
        subject: str,
        body: bytes,
        msg_id: str,
        headers: Mapping[str, str] = NO_HEADERS,
        expected_last_event_seq: int | None = None,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> int:
        """Write an entry and return its sequence number, also when the log has it already.

        With `expected_last_event_seq` (0: there is no event yet) it is written only if the job's last event has that
        number, and `WrongLastSequence` is raised otherwise. Raises `LogFull`, `LogMissing`, `MessageTooLarge`:
        nothing was written. Raises `NoBus` when the bound is over: whether it was written is unknown, so repeat it
        with the same id or look for it in the log.
        """
        expected = None if expected_last_event_seq is None else (self._events, expected_last_event_seq)
        return await self._append_once(subject, body, msg_id, headers, timeout_s, expected)

    async def trim_commands(self, first: int) -> None:
        """Remove the commands before number `first`, and leave the events among them where they are."""
        purge = {"seq": first, "filter": commands_of(self.job)}
        await api.insist(lambda: api.api(self._bus, f"STREAM.PURGE.{self.stream}", purge))

    async def last_event(self) -> StoredEntry | None:
        """Return the job's last event, or None."""
        return await self._last(self._events)

    async def last_command(self) -> StoredEntry | None:
        """Return the job's last command, or None."""
        return await self._last(commands_of(self.job))

    def follow(
        self,
        start_seq: int = 1,
        *filter_subjects: str,
        wanted: EntryFilter | None = None,
        on_read_state: OnReadState | None = None,
    ) -> AsyncGenerator[StoredEntry, None]:
        """Yield every entry from `start_seq` on, for ever, in order, each exactly once, whatever becomes of NATS.

        While NATS is away it waits. Raises `LogGap` where an entry is no longer there, `LogShorter` when the log ends
        before what was read or before `start_seq - 1`, `LogMissing` without a log. With filters only entries on these
        subjects come; with `wanted`, of those whose body isn't wanted, only some. Close it (`aclose`) when done.
        `on_read_state` is called with the reason while the log can't be read.
        """
        return self._entries(start_seq, filter_subjects, wanted, on_read_state)

    async def _last(self, subject: str) -> StoredEntry | None:
        try:
            stored = await api.insist(lambda: api.last_of(self._bus, self.stream, subject))
        except NoResponder:
            await self._check_exists()
            raise
        return None if stored is None else StoredEntry.of(stored, self.job)
