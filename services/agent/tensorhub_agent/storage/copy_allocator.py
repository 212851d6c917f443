"""The allocator of storage for copies of retained versions, as the log has placed them: memory, or a file on the disk.

A copy is kept in memory while the memory limit allows it, then on the disk. The log knows only the total room. The
agent chooses between memory and disk, because only the agent sees its disk. A copy that fits into neither is given up
with a reason, and the log places it elsewhere.

`candidates` and `no_room` are pure.
"""

import asyncio
import logging
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_agent.core.effects import AllocateCopy, CopyMade
from tensorhub_agent.runtime.troubles import TROUBLES, TroubleKind
from tensorhub_agent.storage.shard_store import CopyQuota, JobShardStore, ShardStores, StoredShard
from tensorhub_common.errors import MemoryExhausted, TensorHubError
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol.decoding import MALFORMED


class CopyPlacement(StrEnum):
    """The medium of a copy."""

    MEMORY = "memory"
    DISK = "disk"


def candidates(nbytes: int, limits: CopyQuota, taken: CopyQuota) -> tuple[CopyPlacement, ...]:
    """Return the media where a copy of `nbytes` may be tried, the best first."""
    left = (
        (CopyPlacement.MEMORY, limits.memory_bytes - taken.memory_bytes),
        (CopyPlacement.DISK, limits.disk_bytes - taken.disk_bytes),
    )
    return tuple(where for where, room in left if room >= nbytes)


def no_room(nbytes: int, limits: CopyQuota, taken: CopyQuota) -> str:
    """Say why there is no candidate, and what to do."""
    return (
        f"a copy of {nbytes} bytes fits neither into memory ({taken.memory_bytes} of {limits.memory_bytes} bytes are "
        f"taken) nor onto the disk ({taken.disk_bytes} of {limits.disk_bytes}): raise TENSORHUB_CACHE_BYTES or "
        "TENSORHUB_CACHE_DISK_BYTES"
    )


LAYOUT_S_MAX: Final = 10.0
"""The layout is had within this, or the copy is given up."""

_log: Final = logging.getLogger(__name__)


class CopyAllocator:
    """Makes the copies of all jobs, one after another, so that each sees what those before it took."""

    def __init__(self, stores: ShardStores, blobs: BlobStore, limits: CopyQuota) -> None:
        """Make them on these stores, within the limits."""
        self._stores, self._blobs, self._limits = stores, blobs, limits
        self._turn = asyncio.Lock()

    async def make(self, wanted: AllocateCopy, job: str, incarnation: int) -> CopyMade:
        """Make a segment for the copy. What goes wrong is told, so that the log can place it elsewhere."""
        key, store = wanted.key, self._stores.of(job)
        try:
            async with asyncio.timeout(LAYOUT_S_MAX):
                layout = msgspec.msgpack.decode(await self._blobs.get(job, wanted.layout), type=Layout)
            async with self._turn:
                stored = await self._make(wanted, store, layout, incarnation)
        except (TensorHubError, TimeoutError, OSError, *MALFORMED) as why:
            reason = str(why) or "its layout did not come"
            TROUBLES.note(TroubleKind.COPY, f"a copy for {key.replica} of model {key.model} is given up: {reason}")
            _log.warning("a copy for %s of model %s is given up: %s", key.replica, key.model, reason)
            return CopyMade(key, wanted.shards, wanted.layout, failure=reason)
        return CopyMade(key, wanted.shards, wanted.layout, nbytes=tuple(stored.table.nbytes))

    async def _make(self, wanted: AllocateCopy, store: JobShardStore, layout: Layout, incarnation: int) -> StoredShard:
        await self._stores.files.idle()
        taken = self._stores.copies()
        reasons = []
        for where in candidates(wanted.nbytes, self._limits, taken):
            try:
                return await store.make(
                    wanted.key,
                    wanted.shards,
                    layout,
                    wanted.layout,
                    spot=False,
                    incarnation=incarnation,
                    on_disk=where is CopyPlacement.DISK,
                )
            except MemoryExhausted as why:
                # The host may have less memory than the limit says: then the disk is asked.
                reasons.append(str(why))
        raise MemoryExhausted("; ".join(reasons) or no_room(wanted.nbytes, self._limits, taken))
