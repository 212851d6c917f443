"""Outcomes that were asked for on an inbox: each is sent once by the leader, and kept while nobody leads for certain.

Always true: nothing is sent on a subject that is no inbox, and whoever wanted that is told of once in the log.
"""

from collections import deque
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability import logs
from tensorhub_registry.core.job_fold import OutcomeStored

REPLIES_KEPT_MAX: Final = 256
REPLY_AGAIN_S: Final = 5.0
"""Whoever asked for an outcome so shortly before the log's end may have missed it when a leader died: send it again."""

_log: Final = logs.logger(__name__)


class OutcomeReplies:
    """The inboxes that one job's commands name."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus, self._job = bus, job
        self._late: deque[OutcomeStored] = deque(maxlen=REPLIES_KEPT_MAX)
        self._told_foreign = False

    async def answer(self, stands: OutcomeStored, *, ready: bool) -> None:
        """Send an outcome that stands in the log to whom it is owed; while not ready, keep it."""
        if stands.origin is None:
            return
        if stands.origin.reply_to is None:
            self._note_foreign(stands.origin.foreign_reply_to)
        elif not ready:
            self._late.append(stands)
        else:
            await self._send(stands, stands.origin.reply_to)

    async def send_late(self, now: float) -> None:
        """Send what was kept, of the last moments before `now`, the log's own time."""
        late, self._late = list(self._late), deque(maxlen=REPLIES_KEPT_MAX)
        for stands in late:
            if stands.events[0].time >= now - REPLY_AGAIN_S:
                await self.answer(stands, ready=True)

    def _note_foreign(self, wanted: str | None) -> None:
        """Say once in a job's life here that somebody would have this registry speak where only others may."""
        if wanted is not None and not self._told_foreign:
            self._told_foreign = True
            _log.warning(
                "an outcome was wanted on a subject that is no inbox, and was not sent", job=self._job, wanted=wanted
            )

    async def _send(self, stands: OutcomeStored, inbox: str) -> None:
        trace = stands.origin.trace if stands.origin is not None else {}
        try:
            await self._bus.publish(inbox, msgspec.json.encode(stands.events), trace)
        except TensorHubError as why:
            _log.warning("an outcome could not be sent", job=self._job, seq=stands.events[0].cmd, why=str(why))
