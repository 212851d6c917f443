"""Saying in a job's log that an agent is lost. The fold decides; this is only the leader's word.

All registries speak on one lane, under one name that no agent can have: terms order their words, so what an older
leader says late is refused by the fold. A leader speaks only once its own term stands in the log (see `claiming`). What
the log does not take is dropped: the liveness core says it again.
"""

import asyncio
from itertools import count
from typing import Final

from tensorhub_common import subjects, telemetry
from tensorhub_common.errors import TensorHubError
from tensorhub_common.wire.codec import encode
from tensorhub_common.wire.commands import Expire, Sender
from tensorhub_registry.claim import PROCESS
from tensorhub_registry.job import Job
from tensorhub_registry.liveness import ExpireAgent

WAITING_MAX: Final = 65_536
APPEND_TIMEOUT_S: Final = 2.0

_log: Final = telemetry.logger(__name__)


class Expiring:
    """Appends the expiries one after the other, in the order in which they were decided."""

    def __init__(self, jobs: dict[str, Job]) -> None:
        self._jobs = jobs
        self._waiting: asyncio.Queue[ExpireAgent] = asyncio.Queue(WAITING_MAX)
        self._numbers = count(1)

    def say(self, lost: list[ExpireAgent]) -> None:
        """Take expiries that the liveness core decided."""
        for expiry in lost:
            if self._waiting.full():
                return
            self._waiting.put_nowait(expiry)

    async def append_all(self) -> None:
        """Append what `say` takes, until cancelled."""
        while True:
            expiry = await self._waiting.get()
            job = self._jobs.get(expiry.job)
            if job is None or job.term != expiry.term or job.claim.term is None:
                continue
            _log.warning("an agent is silent and counts as lost", **_fields(expiry))
            try:
                await self._append(job, expiry, job.claim.term)
            except TensorHubError as why:
                _log.warning("an expiry could not be written", why=str(why), **_fields(expiry))

    async def _append(self, job: Job, expiry: ExpireAgent, term: int) -> None:
        number = next(self._numbers)
        by = Sender(PROCESS, term, number)
        command = Expire(by=by, agent=expiry.agent, incarnation=expiry.incarnation, term=term)
        # `subjects.cmd` lets only agents' names in; ours is one that they can't have.
        subject = f"{subjects.cmd(job.name, 'expire')}.{PROCESS}"
        msg_id = f"{PROCESS}.{term}.{number}"
        await job.log.append(subject, encode(command), msg_id, timeout_s=APPEND_TIMEOUT_S)


def _fields(expiry: ExpireAgent) -> dict[str, object]:
    return {"job": expiry.job, "agent": expiry.agent, "incarnation": expiry.incarnation, "term": expiry.term}
