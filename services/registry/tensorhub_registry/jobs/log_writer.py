"""Writing a publication into the log: one event, some under way at once, or a batch.

Several events are sent without a wait between them, as a chain: each is stored right behind the one before it, or not
at all. So of a chain always a beginning is stored, and the log reads as if they had been sent one by one.

Always true: a cluster is sent no chain. There the leader does not look at the name of the event before; each node does
when it stores, and one of NATS 2.15 that finds another name stores nothing in this log any more, after a restart
neither. So one command in between would end the log on all nodes.
"""

from itertools import pairwise
from secrets import token_hex
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.subjects import events_of
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.steps import Acknowledged, Outgoing, Publication
from tensorhub_registry.jobs.batches import Batches

CHAIN_EVENTS_MAX: Final = 8
"""So many events are sent at once, where it is not a batch: what one publication says to seven waiting replicas."""
CHAIN_EVENTS_MIN: Final = 2
"""A chain is never tried with fewer. It is short where others write in between."""


class Storing:
    """What one registry writes into one job's log."""

    def __init__(self, bus: Bus, log: JobLog, work: Supervisor) -> None:
        self._bus, self._log, self._work = bus, log, work
        self._events = events_of(log.job)
        self.batches = Batches(bus, log.job)
        self._life = token_hex(6)
        self.chain_max = CHAIN_EVENTS_MAX
        """As many events were stored of a chain of late, and as many again. In a cluster 1."""

    async def store(self, publication: Publication) -> Acknowledged:
        """Write it, or a beginning of it. Raises as `JobLog.append` and `Batches.store` do."""
        events = publication.events
        if len(events) > CHAIN_EVENTS_MAX:
            return Acknowledged(len(events), await self.batches.store(publication))
        if api.is_clustered(self._bus):
            self.chain_max = 1
        if len(events) == 1 or self.chain_max == 1:
            return Acknowledged(1, await self._store_one(events[0], publication.expected))
        return await self._store_chain(publication)

    async def _store_chain(self, publication: Publication) -> Acknowledged:
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
        return Acknowledged(len(seqs), seqs[-1])

    async def _store_one(self, outgoing: Outgoing, expected: int) -> int:
        return await self._log.append(outgoing.subject, outgoing.body, self._id_of(outgoing), outgoing.trace, expected)

    def _id_of(self, outgoing: Outgoing) -> str:
        """Return an id that nobody else can have used, or JetStream would take the event for a repeat."""
        return f"{self._life}.{outgoing.event.cmd}.{outgoing.event.i}"

    async def _store_behind(self, before: Outgoing, outgoing: Outgoing, expected: int) -> int | None:
        """Store an event right behind another one; if that is in doubt, the next attempt will tell."""
        headers = {
            **outgoing.trace,
            api.MSG_ID: self._id_of(outgoing),
            api.EXPECTED_LAST: str(expected),
            api.EXPECTED_LAST_OF: self._events,
            # What is nobody's event, or an event that is another one, may stand at the number that it was to have.
            api.EXPECTED_LAST_ID: self._id_of(before),
        }
        try:
            return (await api.store(self._bus, outgoing.subject, outgoing.body, headers)).seq
        except TensorHubError:
            return None
