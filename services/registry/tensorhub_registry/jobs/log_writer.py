"""The writer of a job's publications into its log: as one event, as a chain of events, or as an atomic batch.

A chain is several events sent without a wait between them. Each is stored right behind the one before it, or not at
all. The stored part of a chain is therefore always its beginning, and the log reads as if the events had been sent one
by one.

A batch is JetStream's atomic batch: all of its events are stored or none, against one expected last event. Each event
is published against the sequence of the one before it, and that sequence is known only after the acknowledgement.
Single events therefore cost a round trip each. A batch costs about ten round trips for any number of events, since the
server stages it on disk. It pays off if many events wait: after an outage, or while many replicas move at once.
Measured on one machine, one event takes 0.3 ms, a batch of 3 to 20 events about 3 ms, and one of 1,000 events 13 ms.

Invariant: a cluster receives no chain. The leader of a cluster does not check the id of the event before; each node
checks it when it stores. A node of NATS 2.15 that finds another id stores no further message in this log, not even
after a restart. One command in between would therefore end the log on all nodes.
"""

from itertools import count, pairwise
from secrets import token_hex
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.subjects import events_of, log_stream
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.job_fold import EventBatch, Outgoing, PublicationStored

BATCH_EVENTS_MIN: Final = 12
"""Fewer events are faster one by one."""
BATCH_EVENTS_MAX: Final = 1_000
"""The server's own limit."""
BATCH_TIMEOUT_S: Final = 5.0

_ID: Final = "Nats-Batch-Id"
_SEQUENCE: Final = "Nats-Batch-Sequence"
_COMMIT: Final = "Nats-Batch-Commit"
_ALLOWED: Final = "allow_atomic"


class AtomicBatches:
    """One registry's batches for one job's log."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._stream = log_stream(job)
        self._events = events_of(job)
        self._process = token_hex(8)
        self._numbers = count(1)
        self.allowed = False

    async def allow(self) -> None:
        """Let the log take batches, if its server knows them. Raises `StreamFailure` where it refuses."""
        config = (await api.api(self._bus, f"STREAM.INFO.{self._stream}"))["config"]
        if not config.get(_ALLOWED):
            changed = await api.api(self._bus, f"STREAM.UPDATE.{self._stream}", {**config, _ALLOWED: True})
            config = changed["config"]
        self.allowed = bool(config.get(_ALLOWED))

    async def store(self, publication: EventBatch) -> int:
        """Write the events of a publication, two or more, or none of them; return the sequence of the last.

        Raises as `api.store` does.
        """
        batch = f"{self._process}-{next(self._numbers)}"
        *before, last = publication.events
        for number, event in enumerate(before, start=1):
            headers = {_ID: batch, _SEQUENCE: str(number), **event.trace}
            if number == 1:
                headers[api.EXPECTED_LAST] = str(publication.expected)
                headers[api.EXPECTED_LAST_OF] = self._events
            await self._bus.publish(event.subject, event.body, headers)
        headers = {_ID: batch, _SEQUENCE: str(len(publication.events)), _COMMIT: "1", **last.trace}
        return (await api.store(self._bus, last.subject, last.body, headers, BATCH_TIMEOUT_S)).seq

    async def try_allow(self) -> str | None:
        """Call `allow` and return why it did not work, or None."""
        try:
            await self.allow()
        except StreamFailure as why:
            return str(why)
        return None


CHAIN_EVENTS_MAX: Final = 8
"""Limit of events sent at once without a batch: the events of one publication with seven waiting replicas."""
CHAIN_EVENTS_MIN: Final = 2
"""A chain is never tried with fewer. It is short where others write in between."""


class LogWriter:
    """The publications of one registry in one job's log."""

    def __init__(self, bus: Bus, log: JobLog, work: Supervisor) -> None:
        self._bus, self._log, self._work = bus, log, work
        self._events = events_of(log.job)
        self.batches = AtomicBatches(bus, log.job)
        self._life = token_hex(6)
        self.chain_max = CHAIN_EVENTS_MAX
        """Twice the number of events that were stored of the last chain. In a cluster 1."""

    async def store(self, publication: EventBatch) -> PublicationStored:
        """Write it, or a beginning of it. Raises as `JobLog.append` and `AtomicBatches.store` do."""
        events = publication.events
        if len(events) > CHAIN_EVENTS_MAX:
            return PublicationStored(len(events), await self.batches.store(publication))
        if api.is_clustered(self._bus):
            self.chain_max = 1
        if len(events) == 1 or self.chain_max == 1:
            return PublicationStored(1, await self._store_one(events[0], publication.expected))
        return await self._store_chain(publication)

    async def _store_chain(self, publication: EventBatch) -> PublicationStored:
        events = publication.events
        # All requests are on their way before the first answer is awaited, in this order.
        first = self._work.start(self._store_one(events[0], publication.expected), "storing an event", awaited=True)
        behind = [
            self._work.start(
                self._store_behind(before, event, publication.ahead + number), "storing an event", awaited=True
            )
            for number, (before, event) in enumerate(pairwise(events))
        ]
        try:
            seqs = [await first]
            for each in behind:
                seq = await each
                if seq is None:
                    break
                seqs.append(seq)
        finally:
            first.cancel()
            for each in behind:
                each.cancel()
        self.chain_max = max(CHAIN_EVENTS_MIN, min(CHAIN_EVENTS_MAX, 2 * len(seqs)))
        return PublicationStored(len(seqs), seqs[-1])

    async def _store_one(self, outgoing: Outgoing, expected: int) -> int:
        return await self._log.append(outgoing.subject, outgoing.body, self._id_of(outgoing), outgoing.trace, expected)

    def _id_of(self, outgoing: Outgoing) -> str:
        """Return an id that no other process can have used, or JetStream would take the event for a repeat."""
        return f"{self._life}.{outgoing.event.cmd}.{outgoing.event.i}"

    async def _store_behind(self, before: Outgoing, outgoing: Outgoing, expected: int) -> int | None:
        """Store an event right behind another one; if that is in doubt, the next attempt will tell."""
        headers = {
            **outgoing.trace,
            api.MSG_ID: self._id_of(outgoing),
            api.EXPECTED_LAST: str(expected),
            api.EXPECTED_LAST_OF: self._events,
            # Another event, or an entry that is none, may have been stored at the expected number.
            api.EXPECTED_LAST_ID: self._id_of(before),
        }
        try:
            return (await api.store(self._bus, outgoing.subject, outgoing.body, headers)).seq
        except TensorHubError:
            return None
