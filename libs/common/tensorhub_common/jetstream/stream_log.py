"""A log that is one JetStream stream: appended to once per id, read in order, trimmed from its beginning.

`JobLog` (commands and events) and `RolloutLog` (entries of rollouts) are such logs. A log is the truth of what is
folded from it. So nothing is dropped from it by age or to make room (it is refused instead), and no user may delete an
entry out of its middle. Invariants of appending: tried as often as needed within its bound, it writes the entry at most
once, by the entry's id within the stream's duplicate window; an entry that was appended against the last sequence of
some subjects is stored only if no other entry on them came between.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
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
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.log_reader import EntryFilter, LogReader, OnReadState

DUPLICATE_WINDOW_S: Final = 120

APPEND_TIMEOUT_S: Final = 15.0
"""Longer than three servers take to elect a stream's new leader (4.5 to 7.3 s were measured)."""
APPEND_ATTEMPT_S: Final = 2.0
APPEND_ATTEMPTS_MAX: Final = 64
APPEND_WAIT_FIRST_S: Final = 0.05
APPEND_WAIT_MAX_S: Final = 0.5

FIXED: Final = (
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
"""The properties of a stream that a log rests on. What is not among them an operator may change."""


def log_config(
    name: str, description: str, subjects: Sequence[str], bytes_max: int, entry_bytes_max: int
) -> Mapping[str, Any]:
    """Return the configuration of a stream that is a log on one server."""
    return {
        "name": name,
        "description": description,
        "subjects": list(subjects),
        "retention": "limits",
        "discard": "new",
        "max_age": 0,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_bytes": bytes_max,
        "max_msg_size": entry_bytes_max,
        "duplicate_window": DUPLICATE_WINDOW_S * api.NS_PER_S,
        "storage": "file",
        "num_replicas": 1,
        "allow_direct": True,
        "deny_delete": True,
    }


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


def extent_of(info: Mapping[str, Any]) -> LogExtent:
    """Return the extent that JetStream's information about a stream says."""
    state = info["state"]
    return LogExtent(
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        created=str(info["created"]),
        nbytes=int(state["bytes"]),
        bytes_max=max(0, int(info["config"].get("max_bytes", 0))),
    )


class StreamLog:
    """One log, for reading and writing. Making it asks nothing of NATS."""

    def __init__(self, bus: Bus, job: str, stream: str, what: str, *, is_direct: bool) -> None:
        """Name the job and its stream. `what` is how errors call the log.

        `is_direct`: any server of a cluster may answer for a single entry, and not the stream's leader alone.
        """
        self.job = job
        self.stream = stream
        self._bus = bus
        self._what = what
        self._is_direct = is_direct

    @property
    def is_reachable(self) -> bool:
        """Whether there is a connection to NATS, as far as is known."""
        return self._bus.is_connected

    async def last_seq(self) -> int:
        """Return the number of the last entry, 0 when there is none: who has read up to it has caught up."""
        return (await self.extent()).last

    async def extent(self) -> LogExtent:
        """Return the first and last sequence of the log now. Raises `LogMissing`."""
        try:
            info = await api.insist(lambda: api.stream_info(self._bus, self.stream))
        except StreamFailure as failure:
            raise self._missing(failure) from None
        return extent_of(info)

    async def trim(self, first: int) -> None:
        """Remove all entries before number `first`. A fold that starts there needs a snapshot of them."""
        verb = f"STREAM.PURGE.{self.stream}"
        await api.insist(lambda: api.api(self._bus, verb, {"seq": first}))

    async def remove(self) -> None:
        """Delete the log; where there is none, nothing is done."""
        await api.delete_stream(self._bus, self.stream)

    async def entry(self, seq: int) -> StoredEntry | None:
        """Return the entry with this number, or None."""
        number = api.number if self._is_direct else api.number_at_leader
        try:
            stored = await api.insist(lambda: number(self._bus, self.stream, seq))
        except NoResponder:
            await self._check_exists()
            raise
        return None if stored is None else StoredEntry.of(stored, self.job)

    async def _append_once(
        self,
        subject: str,
        body: bytes,
        msg_id: str,
        headers: Mapping[str, str],
        timeout_s: float,
        expected: tuple[str, int] | None = None,
    ) -> int:
        """Write an entry and return its sequence number, also when the log has it already.

        `expected`: subjects, wildcards and all, and the sequence that their last entry must have (0: there is none).
        """
        headers = {**headers, api.MSG_ID: msg_id}
        if expected is not None:
            headers[api.EXPECTED_LAST_OF], headers[api.EXPECTED_LAST] = expected[0], str(expected[1])
        try:
            async with asyncio.timeout(timeout_s):
                return await self._append(subject, body, headers)
        except TimeoutError:
            raise NoBus(
                f"the {self._what} of job {self.job} took nothing for {timeout_s:g} s: whether {subject} was written "
                "is unknown"
            ) from None

    async def _append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> int:
        wait_s = APPEND_WAIT_FIRST_S
        for _ in range(APPEND_ATTEMPTS_MAX):
            try:
                return (await api.store(self._bus, subject, body, headers, APPEND_ATTEMPT_S)).seq
            except WrongLastSequence as refusal:
                # The server compares sequences before it looks for duplicates, so this may be our own entry, whose
                # acknowledgement was lost.
                return await self._own(refusal, headers)
            except NoResponder:
                await self._check_exists()
            except (NoBus, NoAnswer):
                pass
            except StreamFailure as failure:
                if failure.err_code != api.DUPLICATE_UNDER_WAY:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, APPEND_WAIT_MAX_S)
        raise NoBus(
            f"the {self._what} of job {self.job} took nothing in {APPEND_ATTEMPTS_MAX} attempts: try again later"
        )

    async def _own(self, refusal: WrongLastSequence, headers: Mapping[str, str]) -> int:
        try:
            if refusal.last_seq is None:
                last = await api.last_of(self._bus, self.stream, headers[api.EXPECTED_LAST_OF])
            else:
                last = await api.number(self._bus, self.stream, refusal.last_seq)
        except UNCERTAIN:
            raise refusal from None
        if last is None or last.headers.get(api.MSG_ID) != headers[api.MSG_ID]:
            raise refusal
        return last.seq

    def _entries(
        self,
        start_seq: int,
        filter_subjects: Sequence[str] = (),
        wanted: EntryFilter | None = None,
        on_read_state: OnReadState | None = None,
    ) -> AsyncGenerator[StoredEntry, None]:
        reader = LogReader(self._bus, self.job, self.stream, start_seq, filter_subjects, wanted, on_read_state)
        return reader.entries()

    async def _check_exists(self) -> None:
        with contextlib.suppress(*UNCERTAIN):
            if await api.is_missing(self._bus, self.stream, APPEND_ATTEMPT_S):
                raise self._no_log()

    def _missing(self, failure: StreamFailure) -> Exception:
        if failure.err_code != api.STREAM_NOT_FOUND:
            return failure
        return self._no_log()

    def _no_log(self) -> LogMissing:
        return LogMissing(f"job {self.job!r} has no {self._what}: a registry must open the job first")
