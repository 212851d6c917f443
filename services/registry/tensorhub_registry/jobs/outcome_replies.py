"""Outcomes that a command asked for on an inbox: the leader sends each once, and keeps it while it is not ready.

Invariant: nothing is sent on a subject that is no inbox. The first such request of a job is logged.
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
"""An outcome that was decided less than this before the log's end is sent again, since a dead leader may not have."""

_log: Final = logs.logger(__name__)


class OutcomeReplies:
    """The inboxes that one job's commands name."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus, self._job = bus, job
        self._late: deque[OutcomeStored] = deque(maxlen=REPLIES_KEPT_MAX)
        self._has_logged_foreign = False

    async def answer(self, stands: OutcomeStored, *, ready: bool) -> None:
        """Send a stored outcome to the inbox that its command named. While not ready, keep it."""
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
        """Log the first outcome that was wanted on a subject that is no inbox."""
        if wanted is not None and not self._has_logged_foreign:
            self._has_logged_foreign = True
            _log.warning(
                "an outcome was wanted on a subject that is no inbox, and was not sent", job=self._job, wanted=wanted
            )

    async def _send(self, stands: OutcomeStored, inbox: str) -> None:
        trace = stands.origin.trace if stands.origin is not None else {}
        try:
            await self._bus.publish(inbox, msgspec.json.encode(stands.events), trace)
        except TensorHubError as why:
            _log.warning("an outcome could not be sent", job=self._job, seq=stands.events[0].cmd, why=str(why))
