"""Finding what a fold may begin with: the newest of a job's snapshots that is whole and that this release knows.

Invariant: what is returned lies within the present log, and after what was folded already.
"""

import asyncio
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogShorter, SnapshotBroken
from tensorhub_common.catalog.snapshot import Snapshot, SnapshotNewer, SnapshotUnreadable, decode
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.snapshot_store import SnapshotIndex, SnapshotRecord, SnapshotStore
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.log.levels import LevelUnknown

LOOKS_MAX: Final = 4
LOOK_AGAIN_S: Final = 0.3

_log: Final = logger(__name__)


async def newest_snapshot(bus: Bus, job: str, beyond: int) -> tuple[Snapshot | None, LogExtent]:
    """Return the newest usable snapshot after entry `beyond` (None: there is none), and how far the log goes.

    Raises `LogGap` when the log no longer reaches back to `beyond` and no snapshot bridges that, `LogShorter` when the
    log ends before the snapshot, `LevelUnknown` when the only way on is a snapshot that a newer release wrote,
    `LogMissing` without a log. It looks again before the first two: in a cluster log and snapshots are read from
    different nodes, and one of them may have slept.
    """
    for _ in range(LOOKS_MAX - 1):
        try:
            return await _newest(bus, job, beyond)
        except (LogGap, LogShorter) as why:
            _log.debug("log and snapshots don't fit together", job=job, why=str(why))
        await asyncio.sleep(LOOK_AGAIN_S)
    return await _newest(bus, job, beyond)


async def _newest(bus: Bus, job: str, beyond: int) -> tuple[Snapshot | None, LogExtent]:
    extent = await JobLog(bus, job).extent()
    snapshots = SnapshotStore(bus, job)
    unreadable: list[str] = []
    is_newer = False
    for record in _records(await _index(snapshots, extent, unreadable)):
        if record.seq <= beyond:
            break
        if record.seq > extent.last:
            raise LogShorter(
                f"the log of job {job!r} ends at {extent.last}, and a snapshot of it at {record.seq}: it is not the "
                "log that it was, so stop and find out who replaced it"
            )
        try:
            return decode(job, await snapshots.read(record)), extent
        except (SnapshotBroken, SnapshotUnreadable) as why:
            unreadable.append(str(why))
            is_newer = is_newer or isinstance(why, SnapshotNewer)
            _log.error("a snapshot can't be used", job=job, seq=record.seq, why=str(why))
    if extent.first > beyond + 1:
        reasons = "; ".join(unreadable) or "there is none after it"
        why_not = f"the log of job {job!r} begins at {extent.first}, and no snapshot leads there: {reasons}"
        raise LevelUnknown(why_not) if is_newer else LogGap(why_not)
    return None, extent


async def _index(snapshots: SnapshotStore, extent: LogExtent, unreadable: list[str]) -> SnapshotIndex | None:
    try:
        return await snapshots.index(extent.created)
    except SnapshotBroken as why:
        unreadable.append(str(why))
        return None


def _records(index: SnapshotIndex | None) -> tuple[SnapshotRecord, ...]:
    return () if index is None else index.records
