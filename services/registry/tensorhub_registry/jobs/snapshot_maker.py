"""Makes a job's snapshots while this registry leads, and trims the log behind them.

One at a time: the state is written down between two entries, then compressed, stored and named in the index, read back
and compared, and only then does the log lose what lies behind. Whatever fails or is cut short on the way leaves the
older snapshots and the log as they were (docs/design/protocol/snapshots.md).
"""

import asyncio
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import SnapshotBroken, WrongLastSequence
from tensorhub_common.catalog.snapshot import decode, encode
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.snapshot_store import SNAPSHOT_BYTES_MAX, PackedSnapshot, SnapshotIndex, SnapshotStore
from tensorhub_common.observability import logs
from tensorhub_common.protocol.log.entries import LogEntry
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.job_fold import JobFold
from tensorhub_registry.core.snapshot_policy import FULL_SHARE_MAX, SnapshotPolicy

ENTRY_OVERHEAD_BYTES: Final = 150
"""What an entry takes in the stream besides its body: subject, headers and the store's own."""

AGAIN_S: Final = 10.0
"""The pause after a snapshot that could not be kept."""

_log: Final = logs.logger(__name__)


class SnapshotMaker:
    """The snapshots of one job, as its leader makes them."""

    def __init__(self, bus: Bus, log: JobLog, replicas: int, work: Supervisor) -> None:
        self._log, self._work = log, work
        self._snapshots = SnapshotStore(bus, log.job, replicas)
        self._policy = SnapshotPolicy()
        self._looked_at = 0
        self._not_before = 0.0
        self._task: asyncio.Task[None] | None = None

    async def learn(self) -> None:
        """Count from the newest snapshot, whichever registry made it."""
        extent = await self._log.extent()
        self._policy.bytes_max = extent.bytes_max
        index = await self._index(extent.created)
        if index is not None:
            self._policy.stored(index.newer.seq, index.newer.time)

    async def _index(self, log: str) -> SnapshotIndex | None:
        """Return what snapshots there are. An index that can't be read names none, and the next one is written over it.

        What it named lies before the new snapshot, and the log is trimmed no further than what is read back.
        """
        try:
            return await self._snapshots.index(log)
        except SnapshotBroken as why:
            _log.error("the index of the snapshots is broken, and is written anew", job=self._log.job, why=str(why))
            return None

    def note(self, entry: LogEntry) -> None:
        """Count an entry that was folded."""
        self._policy.log_bytes += len(entry.data) + ENTRY_OVERHEAD_BYTES

    def make_room(self, fold: JobFold) -> None:
        """The log is full, or nearly so: trim it as far as a snapshot of now allows."""
        self._policy.is_full = True
        self.look(fold)

    async def look_for_room(self, fold: JobFold) -> None:
        """Look how full the log is, if it was full or has grown; call it now and then, while leading."""
        if fold.seq <= self._looked_at:
            return
        if (await self._log.extent()).fullness >= FULL_SHARE_MAX:
            self.make_room(fold)
        else:
            self._looked_at = fold.seq

    def look(self, fold: JobFold) -> None:
        """Make a snapshot if one is due; call it between two entries, while leading."""
        if self._task is not None or not self._policy.is_due(fold.seq):
            return
        if asyncio.get_running_loop().time() < self._not_before:
            return
        snapshot = fold.snapshot()
        if snapshot is None:
            return
        try:
            body = encode(snapshot)
        except OverflowError:
            # Below level 1 an event may repeat a sender's number of any length, until it stands in the log.
            return
        self._policy.took(snapshot.seq)
        self._task = self._work.start(self._keep(snapshot.seq, snapshot.time, body, fold), "keeping a snapshot")

    async def close(self, fold: JobFold) -> None:
        """The job was deleted: keep its sum, and nothing of the log before the command that did it.

        Raises `TensorHubError`; it may be called again, whatever was done until then.
        """
        self.cancel()
        snapshot = fold.snapshot()
        if snapshot is None:
            raise TensorHubError("the fold is behind the log's end")
        deleted, body = snapshot.catalog.deleted, encode(snapshot)
        extent = await self._log.extent()
        index = await self._index(extent.created)
        if index is None or index.newer.seq < deleted:
            packed = await asyncio.to_thread(PackedSnapshot.of, body)
            index = await self._snapshots.write(packed, snapshot.seq, snapshot.time, index, extent.created)
        self._policy.stored(index.newer.seq, index.newer.time)
        if await self._is_whole(index, 0) and extent.first < deleted:
            await self._log.trim(deleted)

    async def remove(self) -> None:
        """Delete the log, and then what sums it up: the log that is left without its sum could not be folded."""
        self.cancel()
        await self._log.remove()
        await self._snapshots.remove()

    def cancel(self) -> None:
        """Make no snapshot any more. One that is half made is left, which does no harm."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._policy.failed()

    async def _keep(self, seq: int, time: float, body: bytes, fold: JobFold) -> None:
        me = asyncio.current_task()
        try:
            await self._keep_one(seq, time, body, fold)
        except WrongLastSequence:
            _log.debug("another registry has made a snapshot", job=self._log.job, seq=seq)
        except TensorHubError as why:
            _log.warning("a snapshot could not be kept", job=self._log.job, seq=seq, why=str(why))
            self._not_before = asyncio.get_running_loop().time() + AGAIN_S
            self._policy.failed()
        finally:
            if self._task is me:
                self._task = None

    async def _keep_one(self, seq: int, time: float, body: bytes, fold: JobFold) -> None:
        if len(body) > SNAPSHOT_BYTES_MAX:
            raise TensorHubError(f"the state has {len(body)} bytes, and a snapshot at most {SNAPSHOT_BYTES_MAX}")
        packed = await asyncio.to_thread(PackedSnapshot.of, body)
        extent = await self._log.extent()
        before = await self._index(extent.created)
        if before is not None and before.newer.seq > seq:
            return
        if before is not None and before.newer.seq == seq:
            # It is stored, but the registry that made it got no further.
            await self._trim(before, fold)
            return
        index = await self._snapshots.write(packed, seq, time, before, extent.created)
        self._policy.nbytes = len(packed.data)
        self._policy.stored(seq, time)
        _log.debug("snapshot", job=self._log.job, seq=seq, bytes=len(body), packed=len(packed.data))
        await self._trim(index, fold)

    async def _trim(self, index: SnapshotIndex, fold: JobFold) -> None:
        """Read back what the index names, and remove from the log what lies safely behind."""
        whole = [await self._is_whole(index, number) for number in range(len(index.records))]
        extent = await self._log.extent()
        if not whole[0] or extent.created != index.log:
            return
        older = index.older.seq if index.older is not None and whole[-1] else None
        self._policy.bytes_max = extent.bytes_max
        fullness = 1.0 if self._policy.is_full else extent.fullness
        first = self._policy.first_kept(index.newer.seq, older, fold.last_event_seq, fold.time, fullness)
        await self._snapshots.drop_older(index)
        if fullness >= FULL_SHARE_MAX and first <= index.newer.seq:
            # Commands whose outcomes found no room stand behind the last event, which must stay.
            await self._log.trim_commands(index.newer.seq + 1)
        if first > extent.first:
            await self._log.trim(first)
            _log.debug("trimmed", job=self._log.job, first=first, entries=first - extent.first)
        if fullness >= FULL_SHARE_MAX:
            self._policy.made_room(index.newer.seq)

    async def _is_whole(self, index: SnapshotIndex, number: int) -> bool:
        record = index.records[number]
        body = await self._snapshots.read(record)
        snapshot = await asyncio.to_thread(decode, self._log.job, body)
        return snapshot.seq == record.seq
