"""Reads a stream in order, each message exactly once, through restarts of the server.

It pulls from a consumer of its own that is kept in the server's memory and made anew, from the next wanted sequence
on, whenever something is in doubt: after a reconnection, when heartbeats stay away, when a message was lost on the
way. (Measured on one machine: push and pull deliver equally fast, in about 0.5 ms from publish; a pull bounds what is
under way without flow control, and a consumer made anew at the reconnection resumes in some tens of ms where
nats-py's own took 1 to 20 s.) A reader that wants only some of the entries, by their content, passes `wanted`: an
entry that comes while the reader waits, and isn't wanted, is counted and wakes no task.

Always true: what is yielded has a higher sequence than all before, and without a filter exactly the next one; at most
`BATCH` messages lie unread; a silent skip (a consumer that is asked for a purged sequence starts later) is an error.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Any, Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import (
    UNCERTAIN,
    LogGap,
    LogMissing,
    LogShorter,
    NoAnswer,
    NoBus,
    NoResponder,
    StreamFailure,
)
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.subscription import Subscription
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.api import NS_PER_S, Stored
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.runtime.peer_status import PeerStatus

BATCH: Final = 512
PULL_EXPIRES_S: Final = 30.0
HEARTBEAT_S: Final = 0.5
HEARTBEATS_MISSED_MAX: Final = 3
CONSUMER_IDLE_S: Final = 5.0
"""The server drops a consumer without a pull for this long."""

OPEN_TIMEOUT_S: Final = 2.0
OPEN_WAIT_S: Final = 0.05
OPEN_WAIT_MAX_S: Final = 0.5

LOOKS_MAX: Final = 20
"""A replicated log counts as shorter than it was once its leader has said so for about ten seconds: a leader that was
replaced while it slept notices that sooner."""

HEARTBEAT: Final = "100"
PULL_ENDED: Final = frozenset({"404", "408"})
_LOOKING: Final = "watching over a consumer"

EntryFilter = Callable[[bytes], bool]
"""Tells by an entry's body whether it is wanted. It is asked while all entries before were taken and acted upon."""

OnReadState = Callable[[Exception | None], None]
"""Called at each attempt with the reason why the stream can't be read just now, and with None once it can."""

_log: Final = logging.getLogger(__name__)


class LogReader:
    """One reader of one stream of a job. It is used once, through `entries`."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        stream: str,
        start_seq: int,
        filter_subjects: Sequence[str],
        wanted: EntryFilter | None = None,
        on_read_state: OnReadState | None = None,
    ) -> None:
        self._bus = bus
        self._job = job
        self._stream = stream
        self._filters = list(filter_subjects)
        self._wanted = wanted
        self._on_read_state = on_read_state
        self._server = PeerStatus(
            f"stream {self._stream}", lost="can't be followed, so that is tried again", back="is followed again"
        )
        self._next_seq = max(1, start_seq)
        self._created: str | None = None
        self._looks = 0
        self._consumer = ""
        self._replies = ""
        self._consumer_next = 1
        self._pulled = 0
        self._pull_no = 0
        self._pulls = count()
        self._inbox: Subscription | None = None
        self._arrived: deque[Message] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._in_doubt = True
        self._heard_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    async def entries(self) -> AsyncGenerator[StoredEntry, None]:
        """Yield entry after entry, for ever."""
        unwatch = self._bus.watch(self._on_connection)
        try:
            while True:
                if not self._arrived:
                    if self._in_doubt:
                        await self._open()
                    await self._wait()
                    continue
                entry = await self._take(self._arrived.popleft())
                if entry is not None:
                    yield entry
        finally:
            unwatch()
            if self._watchdog is not None:
                self._watchdog.cancel()
            if self._inbox is not None:
                await self._inbox.close()

    # -------------------------------------------------------------------------------------- opening

    async def _open(self) -> None:
        """Make the consumer anew, trying until it exists: a follower outlives every outage."""
        wait_s = OPEN_WAIT_S
        while True:
            try:
                await self._bus.wait_connected(OPEN_TIMEOUT_S)
                await self._begin()
                self._server.answers()
                return self._tell(None)
            except (NoBus, NoAnswer, NoResponder) as error:
                self._tell(error)
                _log.debug("stream %s can't be followed yet: %s", self._stream, error)
            except StreamFailure as failure:
                if failure.err_code == api.STREAM_NOT_FOUND and await self._is_missing():
                    raise self._gone() from None
                self._tell(failure)
                self._server.is_silent(str(failure))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, OPEN_WAIT_MAX_S)

    def _tell(self, why: Exception | None) -> None:
        if self._on_read_state is not None:
            self._on_read_state(why)

    async def _begin(self) -> None:
        # Cleared first, so that a connection that breaks in the middle of this puts it in doubt again.
        self._in_doubt = False
        self._arrived.clear()
        if self._inbox is not None:
            await self._inbox.close()
        self._replies = self._bus.new_inbox()
        self._inbox = await self._bus.subscribe(f"{self._replies}.*", self._on_message)
        self._consumer = self._replies.rpartition(".")[2]
        self._consumer_next = 1
        await self._create()
        # Asked after the consumer exists, so that a purge between the two can't go unseen.
        info = await api.api(self._bus, f"STREAM.INFO.{self._stream}", None, OPEN_TIMEOUT_S)
        self._check_log(info)
        await self._pull()

    async def _create(self) -> None:
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next_seq,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(CONSUMER_IDLE_S * NS_PER_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        verb = f"CONSUMER.CREATE.{self._stream}.{self._consumer}"
        if len(self._filters) == 1:
            # A single filter is part of the subject too, where a server's permissions may name it.
            config["filter_subject"] = self._filters[0]
            verb = f"{verb}.{self._filters[0]}"
        elif self._filters:
            config["filter_subjects"] = self._filters
        await api.api(self._bus, verb, {"stream_name": self._stream, "config": config}, OPEN_TIMEOUT_S)

    def _check_log(self, info: dict[str, Any]) -> None:
        first, last = int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
        created = str(info["created"])
        is_replicated = int(info["config"].get("num_replicas", 1)) > 1
        if last < self._next_seq - 1 and is_replicated and self._looks < LOOKS_MAX:
            self._looks += 1
            raise NoAnswer(f"stream {self._stream} ends at {last} by the word of a leader that may be another's")
        self._looks = 0
        if last < self._next_seq - 1 or created != (self._created or created):
            raise LogShorter(
                f"stream {self._stream} ends at {last} and was read up to {self._next_seq - 1}, or it was made anew: "
                "it is not the log that it was, so stop and find out who replaced it"
            )
        if first > self._next_seq:
            raise self._gap(first)
        self._created = created

    async def _is_missing(self) -> bool:
        """Tell whether there is no log, by more than one node's first answer; without an answer, nothing is known."""
        try:
            return await api.is_missing(self._bus, self._stream, OPEN_TIMEOUT_S)
        except UNCERTAIN:
            return False

    def _gone(self) -> Exception:
        if self._next_seq > 1:
            return LogShorter(
                f"stream {self._stream} is gone and was read up to {self._next_seq - 1}: its log was deleted"
            )
        return LogMissing(f"there is no stream {self._stream}: a registry must open the job first")

    def _gap(self, found: int) -> LogGap:
        return LogGap(
            f"stream {self._stream} has no entry {self._next_seq} any more (the next is {found}): "
            "load a newer snapshot and follow from there"
        )

    # -------------------------------------------------------------------------------------- reading

    async def _pull(self) -> None:
        self._pulled = BATCH
        self._pull_no = next(self._pulls)
        request = {
            "batch": BATCH,
            "expires": int(PULL_EXPIRES_S * NS_PER_S),
            "idle_heartbeat": int(HEARTBEAT_S * NS_PER_S),
        }
        subject = f"{api.API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        reply = f"{self._replies}.{self._pull_no}"
        try:
            await self._bus.publish(subject, json.dumps(request).encode(), reply=reply)
        except NoBus:
            self._in_doubt = True

    async def _take(self, message: Message) -> StoredEntry | None:
        if message.status is None:
            return await self._take_entry(message)
        if message.status in PULL_ENDED:
            if message.subject.endswith(f".{self._pull_no}"):
                await self._pull()
        else:
            # The consumer is gone, its leader changes or the server shuts down.
            self._in_doubt = True
        return None

    async def _take_entry(self, message: Message) -> StoredEntry | None:
        seq, consumer_seq, time_ns = api.delivery_of(message.reply)
        if consumer_seq != self._consumer_next:
            _log.warning(
                "stream %s: a message was lost on the way, so it is read again from %d", self._stream, self._next_seq
            )
            self._arrived.clear()
            self._in_doubt = True
            return None
        if not self._is_due(seq):
            raise self._gap(seq)
        self._count(seq)
        if self._pulled == 0:
            await self._pull()
        relayed = api.is_relayed(message.headers)
        stored = Stored(seq, time_ns, message.subject, message.headers, message.data, relayed)
        return StoredEntry.of(stored, self._job)

    async def _wait(self) -> None:
        """Return when something has come, or when so little has that the consumer is in doubt."""
        if self._arrived or self._in_doubt:
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        self._heard_at = loop.time()
        if self._watchdog is None:
            self._watchdog = self._bus.work.call_later(HEARTBEAT_S * HEARTBEATS_MISSED_MAX, self._look, what=_LOOKING)
        try:
            await self._wake
        finally:
            self._wake = None

    def _look(self) -> None:
        """Doubt the consumer when nothing has come for too long. One timer serves all waits, many and short."""
        self._watchdog = None
        if self._wake is None:
            return
        loop = asyncio.get_running_loop()
        due = self._heard_at + HEARTBEAT_S * HEARTBEATS_MISSED_MAX
        if loop.time() >= due:
            self._in_doubt = True
            self._rouse()
        else:
            self._watchdog = self._bus.work.call_at(due, self._look, what=_LOOKING)

    def _on_message(self, message: Message) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if message.status != HEARTBEAT and not self._passes_over(message):
            self._arrived.append(message)
            self._rouse()

    def _passes_over(self, message: Message) -> bool:
        """Count an entry that is the next one and not wanted. Whatever else is to be done about one is the reader's."""
        if self._wanted is None or self._arrived or self._wake is None or self._wake.done() or self._pulled <= 1:
            return False
        if message.status is not None or self._wanted(message.data):
            return False
        try:
            seq, consumer_seq, _ = api.delivery_of(message.reply)
        except StreamFailure:
            return False
        if consumer_seq != self._consumer_next or not self._is_due(seq):
            return False
        self._count(seq)
        return True

    def _is_due(self, seq: int) -> bool:
        return seq == self._next_seq or (bool(self._filters) and seq > self._next_seq)

    def _count(self, seq: int) -> None:
        self._consumer_next += 1
        self._next_seq = seq + 1
        self._pulled -= 1

    def _on_connection(self, connected: bool) -> None:  # noqa: FBT001 (the bus calls it so)
        if connected:
            self._in_doubt = True
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
