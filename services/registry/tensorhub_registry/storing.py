"""Writing a publication into the log: one event, two under way at once, or a batch."""

import asyncio
from secrets import token_hex
from typing import Final

from tensorhub_common.bus import jetstream
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.joblog import JobLog
from tensorhub_common.errors import TensorHubError
from tensorhub_common.subjects import events_of
from tensorhub_registry.batches import Batches
from tensorhub_registry.steps import Acknowledged, Outgoing, Publication

PAIR: Final = 2
"""So many events are sent at once, where it is not a batch."""


class Storing:
    """What one registry writes into one job's log."""

    def __init__(self, bus: Bus, log: JobLog) -> None:
        self._bus = bus
        self._log = log
        self._events = events_of(log.job)
        self.batches = Batches(bus, log.job)
        self._life = token_hex(6)

    async def store(self, publication: Publication) -> Acknowledged:
        """Write it, or a beginning of it. Raises as `JobLog.append` and `Batches.store` do."""
        events = publication.events
        if len(events) > PAIR:
            return Acknowledged(len(events), await self.batches.store(publication))
        if len(events) == 1:
            return Acknowledged(1, await self._store_one(events[0], publication.expected))
        # Both requests are on their way before the first answer is awaited, in this order.
        first = asyncio.create_task(self._store_one(events[0], publication.expected))
        second = asyncio.create_task(self._store_ahead(events[1], publication.ahead, self._id_of(events[0])))
        try:
            seq = await first
            seq_ahead = await second
        finally:
            first.cancel()
            second.cancel()
        return Acknowledged(1, seq) if seq_ahead is None else Acknowledged(2, seq_ahead)

    async def _store_one(self, outgoing: Outgoing, expected: int) -> int:
        return await self._log.append(outgoing.subject, outgoing.body, self._id_of(outgoing), outgoing.trace, expected)

    def _id_of(self, outgoing: Outgoing) -> str:
        """Return an id that nobody else can have used, or JetStream would take the event for a repeat."""
        return f"{self._life}.{outgoing.event.cmd}.{outgoing.event.i}"

    async def _store_ahead(self, outgoing: Outgoing, expected: int, behind: str) -> int | None:
        """Store the second of two events, unless somebody wrote in between; if in doubt, the next attempt will tell."""
        headers = {
            **outgoing.trace,
            jetstream.EXPECTED_LAST: str(expected),
            jetstream.EXPECTED_LAST_OF: self._events,
            # What is nobody's event may stand at the number that the first one was to have.
            jetstream.EXPECTED_LAST_ID: behind,
        }
        try:
            return (await jetstream.store(self._bus, outgoing.subject, outgoing.body, headers)).seq
        except TensorHubError:
            return None
