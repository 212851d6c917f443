"""Snapshots of the rollouts' fold: where a manager begins, and what lets the log be trimmed. I/O.

docs/design/rollouts/log.md. Invariants:
- What is restored lies within the present log, and after what was folded already.
- The log loses only entries before the older of two snapshots, both of which were read back.
"""

import asyncio
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, SnapshotBroken, WrongLastSequence
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.rollout_log import RolloutLog
from tensorhub_common.jetstream.snapshot_store import (
    ROLLOUT_SNAPSHOTS,
    SNAPSHOT_BYTES_MAX,
    PackedSnapshot,
    SnapshotIndex,
    SnapshotRecord,
    SnapshotStore,
)
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_rollout.log.state import RolloutState, decode_state, encode_state

SNAPSHOT_ENTRIES_MAX: Final = 20_000
"""A snapshot is due after this many entries: to fold as many takes about a second."""
AGAIN_S: Final = 10.0
"""The pause after a snapshot that could not be kept."""

_log: Final = logger(__name__)


class RolloutSnapshots:
    """The snapshots of one job's rollouts."""

    def __init__(self, bus: Bus, log: RolloutLog) -> None:
        self._log, self._store = log, SnapshotStore(bus, log.job, place=ROLLOUT_SNAPSHOTS)

    async def newest(self, beyond: int) -> RolloutState | None:
        """Return the newest state after entry `beyond` that can be read; None: the log goes on from there.

        Raises `LogGap` where the log no longer reaches back to `beyond` and no snapshot bridges that, `LogMissing`
        without a log.
        """
        extent = await self._log.extent()
        index = await self._index(extent.created)
        reasons: list[str] = []
        for record in () if index is None else index.records:
            if record.seq <= beyond:
                break
            try:
                return await self._read(record)
            except SnapshotBroken as why:
                reasons.append(str(why))
                _log.error("a snapshot of rollouts can't be used", job=self._log.job, seq=record.seq, why=str(why))
        if extent.first > beyond + 1:
            raise LogGap(
                f"the rollout log of job {self._log.job!r} begins at {extent.first}, and no snapshot leads there: "
                f"{'; '.join(reasons) or 'there is none after it'}"
            )
        return None

    async def keep(self, body: bytes, seq: int) -> None:
        """Store a state as a snapshot, and trim the log. Raises `TensorHubError`: older ones and the log are kept."""
        if len(body) > SNAPSHOT_BYTES_MAX:
            raise TensorHubError(f"the state has {len(body)} bytes, and a snapshot at most {SNAPSHOT_BYTES_MAX}")
        packed = await asyncio.to_thread(PackedSnapshot.of, body)
        extent = await self._log.extent()
        before = await self._index(extent.created)
        if before is not None and before.newer.seq >= seq:
            return
        try:
            index = await self._store.write(packed, seq, 0.0, before, extent.created)
        except WrongLastSequence:
            # Another leader has made one.
            return
        for record in index.records:
            await self._read(record)
        await self._store.drop_older(index)
        if index.older is not None:
            await self._log.trim(index.older.seq + 1)
        _log.debug("snapshot of rollouts", job=self._log.job, seq=seq, nbytes=len(body))

    async def _index(self, log: str) -> SnapshotIndex | None:
        """Return what snapshots there are; of an index that can't be read, none: the next one is written over it."""
        try:
            return await self._store.index(log)
        except SnapshotBroken as why:
            _log.error("the index of snapshots can't be used", job=self._log.job, why=str(why))
            return None

    async def _read(self, record: SnapshotRecord) -> RolloutState:
        body = await self._store.read(record)
        try:
            state = await asyncio.to_thread(decode_state, body)
        except MALFORMED as why:
            raise SnapshotBroken(f"it is no state that this release can go on from: {why}"[:500]) from None
        if state.seq != record.seq or state.job != self._log.job:
            raise SnapshotBroken(f"it is of entry {state.seq} of job {state.job!r}, and not of {record.seq}")
        return state


class SnapshotMaker:
    """Makes snapshots while this manager leads: `note` each entry, and run `run`."""

    def __init__(self, snapshots: RolloutSnapshots, entries_max: int = SNAPSHOT_ENTRIES_MAX) -> None:
        self._snapshots, self._entries_max = snapshots, entries_max
        self._last = 0
        self._due: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue(1)

    def note(self, state: RolloutState) -> None:
        """Take the state between two entries, if a snapshot is due."""
        if state.seq - self._last >= self._entries_max and not self._due.full():
            self._last = state.seq
            self._due.put_nowait((encode_state(state), state.seq))

    async def run(self) -> None:
        """Keep what is due, until cancelled."""
        while True:
            body, seq = await self._due.get()
            try:
                await self._snapshots.keep(body, seq)
            except TensorHubError as why:
                _log.warning("a snapshot of rollouts could not be kept", seq=seq, why=str(why))
                await asyncio.sleep(AGAIN_S)
