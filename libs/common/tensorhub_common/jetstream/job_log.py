"""A job's log: one JetStream stream that holds all its commands and events in one total order.

The log is the truth of the hub: the catalog is a fold over it. So nothing is dropped from it by age or to make room
(it is refused instead), and no user may delete an entry out of its middle. Invariants of `append`: tried as often as
needed within its bound, it writes the entry at most once, by the entry's id within the stream's duplicate window; an
entry that was appended against the last event's sequence is stored only if no other event came between.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import (
    UNCERTAIN,
    LogMissing,
    NoAnswer,
    NoBus,
    NoResponder,
    StreamFailure,
    WrongLastSequence,
)
from tensorhub_common.bus.message import NO_HEADERS
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.log_reader import EntryFilter, LogReader, OnReadState
from tensorhub_common.protocol.subjects import PREFIX, commands_of, events_of, job_of_log, log_stream

LOG_BYTES_MAX: Final = 1024 * 1024 * 1024
"""About two million entries. A log that is full refuses entries (`LogFull`); an operator may raise the limit."""
ENTRY_BYTES_MAX: Final = 1024 * 1024
DUPLICATE_WINDOW_S: Final = 120

APPEND_TIMEOUT_S: Final = 15.0
"""Longer than three servers take to elect a stream's new leader (4.5 to 7.3 s were measured)."""
APPEND_ATTEMPT_S: Final = 2.0
APPEND_ATTEMPTS_MAX: Final = 64
APPEND_WAIT_FIRST_S: Final = 0.05
APPEND_WAIT_MAX_S: Final = 0.5

JOB_PAGES_MAX: Final = 100
"""Of at most 1,024 names each."""

_FIXED: Final = (
    "subjects",
    "retention",
    "discard",
    "max_age",
    "max_msgs",
    "max_msgs_per_subject",
    "duplicate_window",
    "allow_direct",
    "deny_delete",
    "storage",
)


def _config(job: str, replicas: int) -> dict[str, Any]:
    return {
        "name": log_stream(job),
        "description": f"TensorHub's log of job {job}",
        "subjects": [commands_of(job), events_of(job)],
        "retention": "limits",
        "discard": "new",
        "max_age": 0,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_bytes": LOG_BYTES_MAX,
        "max_msg_size": ENTRY_BYTES_MAX,
        "duplicate_window": DUPLICATE_WINDOW_S * api.NS_PER_S,
        "storage": "file",
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_atomic": True,
        "deny_delete": True,
    }


async def open_job(bus: Bus, job: str, replicas: int = 1) -> "JobLog":
    """Make the job's log, or check the existing one. Raises `StreamMismatch` when it is not fit to be one."""
    await api.ensure_stream(bus, _config(job, replicas), _FIXED)
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


class LogExtent(msgspec.Struct, frozen=True):
    """From where to where a log goes. `created` tells it from one that was made anew; `bytes_max` 0: no limit."""

    first: int
    last: int
    created: str
    nbytes: int
    bytes_max: int

    @property
    def fullness(self) -> float:
        """How much of its limit it has reached, 0 to 1."""
        return self.nbytes / self.bytes_max if self.bytes_max else 0.0


class JobLog:
    """One job's log, for reading and writing. Making it asks nothing of NATS and needs no `open_job` of its own."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.job = job
        self.stream = log_stream(job)
        self._bus = bus
        self._events = events_of(job)

    @property
    def is_reachable(self) -> bool:
        """Whether there is a connection to NATS, as far as is known."""
        return self._bus.is_connected

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
        headers = {**headers, api.MSG_ID: msg_id}
        if expected_last_event_seq is not None:
            headers[api.EXPECTED_LAST] = str(expected_last_event_seq)
            headers[api.EXPECTED_LAST_OF] = self._events
        try:
            async with asyncio.timeout(timeout_s):
                return await self._append(subject, body, headers)
        except TimeoutError:
            raise NoBus(
                f"the log of job {self.job} took nothing for {timeout_s:g} s: whether {subject} was written is unknown"
            ) from None

    async def _append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> int:
        wait_s = APPEND_WAIT_FIRST_S
        for _ in range(APPEND_ATTEMPTS_MAX):
            try:
                return (await api.store(self._bus, subject, body, headers, APPEND_ATTEMPT_S)).seq
            except WrongLastSequence as refusal:
                # The server compares sequences before it looks for duplicates, so this may be our own entry, whose
                # acknowledgement was lost.
                return await self._own(refusal, headers[api.MSG_ID])
            except NoResponder:
                await self._check_exists()
            except (NoBus, NoAnswer):
                pass
            except StreamFailure as failure:
                if failure.err_code != api.DUPLICATE_UNDER_WAY:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, APPEND_WAIT_MAX_S)
        raise NoBus(f"the log of job {self.job} took nothing in {APPEND_ATTEMPTS_MAX} attempts: try again later")

    async def _own(self, refusal: WrongLastSequence, msg_id: str) -> int:
        try:
            if refusal.last_seq is None:
                last = await api.last_of(self._bus, self.stream, self._events)
            else:
                last = await api.number(self._bus, self.stream, refusal.last_seq)
        except UNCERTAIN:
            raise refusal from None
        if last is None or last.headers.get(api.MSG_ID) != msg_id:
            raise refusal
        return last.seq

    async def last_seq(self) -> int:
        """Return the number of the last entry, 0 when there is none: who has read up to it has caught up."""
        return (await self.extent()).last

    async def extent(self) -> LogExtent:
        """Return the first and last sequence of the log now. Raises `LogMissing`."""
        try:
            info = await api.insist(lambda: api.stream_info(self._bus, self.stream))
        except StreamFailure as failure:
            raise self._missing(failure) from None
        state = info["state"]
        return LogExtent(
            first=int(state["first_seq"]),
            last=int(state["last_seq"]),
            created=str(info["created"]),
            nbytes=int(state["bytes"]),
            bytes_max=max(0, int(info["config"].get("max_bytes", 0))),
        )

    async def trim(self, first: int) -> None:
        """Remove all entries before number `first`. A fold that starts there needs a snapshot of them."""
        verb = f"STREAM.PURGE.{self.stream}"
        await api.insist(lambda: api.api(self._bus, verb, {"seq": first}))

    async def trim_commands(self, first: int) -> None:
        """Remove the commands before number `first`, and leave the events among them where they are."""
        purge = {"seq": first, "filter": commands_of(self.job)}
        await api.insist(lambda: api.api(self._bus, f"STREAM.PURGE.{self.stream}", purge))

    async def remove(self) -> None:
        """Delete the log; where there is none, nothing is done."""
        await api.delete_stream(self._bus, self.stream)

    async def last_event(self) -> StoredEntry | None:
        """Return the job's last event, or None."""
        return await self._last(self._events)

    async def last_command(self) -> StoredEntry | None:
        """Return the job's last command, or None."""
        return await self._last(commands_of(self.job))

    async def entry(self, seq: int) -> StoredEntry | None:
        """Return the entry with this number, or None."""
        try:
            stored = await api.insist(lambda: api.number(self._bus, self.stream, seq))
        except NoResponder:
            await self._check_exists()
            raise
        return None if stored is None else StoredEntry.of(stored, self.job)

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
        return LogReader(self._bus, self.job, start_seq, filter_subjects, wanted, on_read_state).entries()

    async def _last(self, subject: str) -> StoredEntry | None:
        try:
            stored = await api.insist(lambda: api.last_of(self._bus, self.stream, subject))
        except NoResponder:
            await self._check_exists()
            raise
        return None if stored is None else StoredEntry.of(stored, self.job)

    async def _check_exists(self) -> None:
        with contextlib.suppress(*UNCERTAIN):
            if await api.is_missing(self._bus, self.stream, APPEND_ATTEMPT_S):
                raise self._no_log()

    def _missing(self, failure: StreamFailure) -> Exception:
        if failure.err_code != api.STREAM_NOT_FOUND:
            return failure
        return self._no_log()

    def _no_log(self) -> LogMissing:
        return LogMissing(f"job {self.job!r} has no log: a registry must open the job first")
