"""Writing many events at once: JetStream's atomic batch, all of it or nothing, against one expected last event.

Each event is published against the sequence of the one before it, which is known only once that one is acknowledged;
so one at a time costs a round trip each. A batch costs about ten of them, however many events it has (the server stages
it on disk): it pays off where many wait, after an outage or while many replicas move at once. Measured on one machine:
one event 0.3 ms, a batch of 3 to 20 about 3 ms, of 1,000 events 13 ms.
"""

from itertools import count
from secrets import token_hex
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.subjects import events_of, log_stream
from tensorhub_registry.core.steps import Publication

BATCH_EVENTS_MIN: Final = 12
"""Fewer events are faster one by one."""
BATCH_EVENTS_MAX: Final = 1_000
"""The server's own limit."""
BATCH_TIMEOUT_S: Final = 5.0

_ID: Final = "Nats-Batch-Id"
_SEQUENCE: Final = "Nats-Batch-Sequence"
_COMMIT: Final = "Nats-Batch-Commit"
_ALLOWED: Final = "allow_atomic"


class Batches:
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

    async def store(self, publication: Publication) -> int:
        """Write the events of a publication, two or more, or none of them; return the sequence of the last.

        Raises as `jetstream.store` does.
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
