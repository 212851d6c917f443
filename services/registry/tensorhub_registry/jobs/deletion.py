"""Deletion of a job: its log is cut down to the command that deleted it, and is then its tombstone.

The log itself says that the job was deleted, also to a process that was away, so there is no second record that could
differ. The leader removes the rest as soon as the event is in the log, and again each time that it begins to lead. Each
step may be repeated, and a registry that is killed between two steps leaves the same work to the next one.

Invariants:
- Nothing is removed before the log says that the job is deleted.
- A log that is left can be folded, since its snapshot is removed after it.
- There are at most `TOMBSTONES_MAX` tombstones, and none is older than `TOMBSTONE_S`.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import RolloutLog
from tensorhub_common.observability import logs
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.job_fold import JobFold
from tensorhub_registry.jobs.snapshot_maker import SnapshotMaker

TOMBSTONE_S: Final = 7 * 24 * 3600.0
"""A deleted job's name is refused for this time, so that a leftover process of the job can't bring it back."""

TOMBSTONES_MAX: Final = 100
"""Limit of remembered deleted jobs; the one that was deleted first is forgotten first."""

AGAIN_S: Final = 2.0
"""The pause after something could not be removed."""

_log: Final = logs.logger(__name__)


def expired_tombstones(tombstones: Iterable[tuple[float, str]], now: float) -> list[str]:
    """Name the deleted jobs that may be forgotten, given all with the time of their deletion."""
    ordered = sorted(tombstones, reverse=True)
    return [name for number, (at, name) in enumerate(ordered) if number >= TOMBSTONES_MAX or at < now - TOMBSTONE_S]


class JobDeletion:
    """Removes what is left of one deleted job, while this registry leads."""

    def __init__(self, bus: Bus, snapshotting: SnapshotMaker, work: Supervisor) -> None:
        self._bus, self._snapshotting, self._work = bus, snapshotting, work
        self._task: asyncio.Task[None] | None = None

    def begin(self, fold: JobFold) -> None:
        """Cut the log down and remove the rest, in the background; once for each time that this registry leads."""
        if self._task is None:
            self._task = self._work.start(self._clear(fold), "clearing up after the deleted job")

    def cancel(self) -> None:
        """Stop. The next leader does it again."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def remove(self, job: str) -> None:
        """Delete all that NATS has of the job, the tombstone first, since it alone leads to the rest."""
        await self._snapshotting.remove()
        await self._remove_stores(job)
        _log.info("a deleted job is forgotten", job=job)

    async def _remove_stores(self, job: str) -> None:
        """Delete blobs, the rollout log, and then its payloads, so that it never names what is gone."""
        await BlobStore(self._bus).remove(job)
        await RolloutLog(self._bus, job).remove()
        await PayloadStore(self._bus).remove(job)

    async def _clear(self, fold: JobFold) -> None:
        while True:
            try:
                await self._snapshotting.close(fold)
                await self._remove_stores(fold.job)
            except TensorHubError as why:
                _log.warning("a deleted job can't be cleared up yet", job=fold.job, why=str(why))
                await asyncio.sleep(AGAIN_S)
            else:
                _log.info("the job is deleted", job=fold.job, seq=fold.catalog.deleted)
                return
