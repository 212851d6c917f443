"""Follows one job's log for a process that folds it: from the newest snapshot on, and from a later one after a gap.

Invariants:
- The target gets the entries after what it has folded in the log's order, each once. Entries before that come only from
  where `restore` said that reading begins.
- While NATS is away the follower waits. It ends only by an error that no waiting can mend.
- The rest of the process has its turn after each burst of entries.
"""

import asyncio
from contextlib import aclosing
from typing import Final, NoReturn, Protocol

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import UNCERTAIN, LogGap
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.log_reader import OnReadState
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower import restore
from tensorhub_common.observability.logs import logger

_log: Final = logger(__name__)


class FoldTarget(Protocol):
    """What folds the log."""

    @property
    def folded_seq(self) -> int:
        """The last entry that is folded."""
        ...

    def restore(self, snapshot: Snapshot, extent: LogExtent) -> int:
        """Go on from this snapshot, which lies after what is folded; return the entry at which reading begins."""
        ...

    async def take(self, entry: StoredEntry) -> None:
        """Fold the next entry, or look at one that lies before the snapshot."""
        ...


def _ignore(_: Exception | None) -> None:
    """Do nothing: the owner does not show why its log can't be read."""


class LogFollower:
    """The follower of one job's log."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        target: FoldTarget,
        *,
        burst: int,
        retry_s: float,
        on_read_state: OnReadState = _ignore,
    ) -> None:
        """Prepare. `retry_s` is the pause after the snapshots could not be read.

        `on_read_state` takes the reason each time that snapshots or log can't be read, and None once they can.
        """
        self._bus, self._job, self._target = bus, job, target
        self._burst, self._retry_s, self._on_read_state = burst, retry_s, on_read_state
        self._read_from = 1

    async def run(self) -> NoReturn:
        """Follow the log. Raises `LogGap` where no snapshot bridges one, and what the snapshots and the log raise."""
        await self._restore()
        while True:
            reads_older = self._read_from <= self._target.folded_seq
            try:
                await self._follow()
            except LogGap:
                # The log was trimmed beyond what is folded, or beyond older entries that the target can do without.
                self._read_from = self._target.folded_seq + 1
                if not await self._restore() and not reads_older:
                    raise

    async def _restore(self) -> bool:
        """Go on from a snapshot that lies ahead; False: there is none."""
        while True:
            try:
                snapshot, extent = await restore.newest_snapshot(self._bus, self._job, self._target.folded_seq)
                break
            except UNCERTAIN as why:
                self._on_read_state(why)
                _log.debug("the snapshots can't be read yet", job=self._job, why=str(why))
            await asyncio.sleep(self._retry_s)
        self._on_read_state(None)
        if snapshot is None:
            return False
        _log.debug("restored", job=self._job, seq=snapshot.seq, log_ends_at=extent.last)
        self._read_from = self._target.restore(snapshot, extent)
        return True

    async def _follow(self) -> None:
        first = min(self._read_from, self._target.folded_seq + 1)
        entries = JobLog(self._bus, self._job).follow(first, on_read_state=self._on_read_state)
        taken = 0
        async with aclosing(entries):
            async for entry in entries:
                await self._target.take(entry)
                taken += 1
                if taken % self._burst == 0:
                    await asyncio.sleep(0)
