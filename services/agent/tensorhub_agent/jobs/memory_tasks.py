"""The tasks that an agent does on the memory of a job's shards for its core: hashing, duplicating and probing.

`blank` writes zeros into the padding of mapped tensors: elements that no global tensor has, and that no program writes.
Replicas of one layout must hold equal bytes at equal versions, and the old bytes in the padding are arbitrary. So a
shard that was filled by a program gets zero padding before the digests of its memory are reported.

Invariants:
- Each task ends in one outcome, unless its shard is gone, which may happen before the task begins.
- No task changes what readers may have.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import Digested, DigestMemory, Duplicated, EffectOutcome, Probed, ProbeMapping
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.jobs.early_digests import EarlyDigests
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.memory_region import MemoryRegion, host
from tensorhub_agent.storage.shard_store import JobShardStore
from tensorhub_common.layout.layout import Layout, placements


def blank(region: MemoryRegion, layout: Layout) -> None:
    """Write zeros into the padding of a segment of this layout."""
    if not any(part.is_padding for entry in layout.tensors for part in entry.parts):
        return
    if isinstance(region, DeviceRegion):
        blank_on_device(region, layout)
        return
    memory = np.frombuffer(host(region), np.uint8)
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        empty = [part for part in entry.parts if part.is_padding and 0 not in part.shape]
        if empty:
            tensor = memory[at : at + entry.nbytes].reshape(*entry.shape, entry.itemsize)
            for part in empty:
                tensor[tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))] = 0


def blank_on_device(region: DeviceRegion, layout: Layout) -> None:
    """Do what `blank` does in the memory of a GPU, run by run."""
    stream = region.device.stream()
    try:
        for entry, at in zip(layout.tensors, placements(layout), strict=True):
            # Where each byte of the tensor is: only tensors with padding, which are few, take so much memory.
            empty = [part for part in entry.parts if part.is_padding and 0 not in part.shape]
            if not empty:
                continue
            mask = np.zeros((*entry.shape, entry.itemsize), np.bool_)
            for part in empty:
                mask[tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))] = True
            edges = np.flatnonzero(np.diff(mask.reshape(-1), prepend=False, append=False)).reshape(-1, 2)
            for begin, end in edges.tolist():
                stream.fill(region.address + at + begin, end - begin)
        stream.record().wait()
    finally:
        stream.close()


class MemoryTasks:
    """The work on what stands on one job's store."""

    def __init__(
        self,
        store: JobShardStore,
        pool: CopyPool,
        deltas: JobDeltas,
        take_outcome: Callable[[EffectOutcome], None],
        early: EarlyDigests,
        *,
        digests: bool,
    ) -> None:
        """Prepare; without `digests` nothing is hashed, and who asks is told so."""
        self._store, self._pool, self._deltas, self._take_outcome = store, pool, deltas, take_outcome
        self._early, self._digests = early, digests

    async def digest(self, effect: DigestMemory) -> None:
        """Hash a shard's pieces: what was written by its worker, or what was filled from other layouts."""
        stored = self._store.shards.get(effect.key)
        if stored is None:
            return
        digests = b""
        if self._digests:
            segment = stored.target if effect.filled else stored.segment
            if effect.filled:
                await asyncio.to_thread(blank, segment.view, stored.layout)
            early = None if effect.filled else await self._early.of(effect.key)
            digests = early or await self._pool.digest(segment.view, Spans.of(stored.table)).result()
            if not effect.filled:
                self._deltas.digested(effect.key, digests)
        self._take_outcome(Digested(effect.key, effect.number, digests))

    async def overwritten(self, key: ShardKey, digests: bytes) -> tuple[str, ...]:
        """Return the tensors of a shard whose bytes are not those with these digests any more."""
        stored = self._store.shards.get(key)
        if stored is None:
            return ()
        found = await self._pool.digest(stored.segment.view, Spans.of(stored.table)).result()
        size, table = PIECE_DIGEST_BYTES, stored.table
        cuts = ((number, slice(number * size, number * size + size)) for number in range(len(table)))
        wrong = (number for number, cut in cuts if found[cut] != digests[cut])
        return tuple(dict.fromkeys(table.layout.tensors[table.tensor[number]].name for number in wrong))

    def probe(self, effect: ProbeMapping) -> None:
        """See whether anybody maps a shard's memory, and have those who do see whether it is waited for."""
        stored = self._store.shards.get(effect.key)
        if stored is not None:
            segment = stored.spare if effect.spare and stored.spare is not None else stored.segment
            try:
                lent = segment.is_lent()
                if effect.asks_back or not lent:
                    segment.ask_back(is_wanted=lent)
            except OSError:
                # Without a descriptor it is unknown; it is asked again soon.
                lent = True
            self._take_outcome(Probed(effect.key, effect.spare, lent))

    async def duplicate(self, key: ShardKey) -> None:
        """Copy what a shard holds into its other segment."""
        stored = self._store.shards.get(key)
        if stored is None:
            return
        assert stored.spare is not None
        job = self._pool.copy_and_digest(stored.spare.view, stored.segment.view, Spans.of(stored.table), digests=False)
        await job.result()
        self._take_outcome(Duplicated(key))
