"""One job's deltas on this agent: made of what its workers publish, kept of what its readers apply, lent to others.

Invariant: an offer leads from exactly the bytes that the reader names to exactly those that its lease is for, by
their roots; whether that is what comes out is for the digests in the destination to say.
"""

from collections.abc import Callable

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.effects import SaveManifest
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.deltas.builder import DeltaBuilder
from tensorhub_agent.deltas.shadow import PublishedMemory
from tensorhub_agent.leases.delta_store import Delta, DeltaStore, PatchOffer
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_agent.storage.shard_store import StoredShard


class JobDeltas:
    """The deltas of one job."""

    def __init__(
        self,
        job: str,
        book: DeltaStore,
        pool: CopyPool,
        store: SegmentStore,
        made: Callable[[], None],
        *,
        is_making: bool,
    ) -> None:
        """Keep deltas in the agent's book; `made` is called when there is a new one to be lent."""
        self._job, self._book, self._is_making = job, book, is_making
        self._maker = DeltaBuilder(pool, store, book, made)
        self._digested: dict[ShardKey, bytes] = {}
        """What a publication of the shard that is under way was digested to."""
        self._applied: dict[ShardKey, Delta] = {}
        """What the read that is under way has brought."""

    # What happens to shards.

    def digested(self, key: ShardKey, digests: bytes) -> None:
        """The shard's memory is being published, and hashes to this."""
        if self._is_making and digests:
            self._digested[key] = digests

    def saved(self, effect: SaveManifest, stored: StoredShard) -> None:
        """The shard's memory is something else now."""
        key = effect.key
        digests = self._digested.pop(key, b"")
        if effect.state != MemoryState.READY:
            self._maker.withdrawn(self._name(key))
        elif digests and digests == effect.digests and effect.root is not None:
            publication = PublishedMemory(stored.segment, stored.table, effect.root, digests)
            self._maker.published(self._name(key), publication)
        delta = self._applied.get(key)
        if delta is not None and (effect.state != MemoryState.FILLING or effect.swap):
            self._book.end(self._applied.pop(key))

    def freed(self, key: ShardKey) -> None:
        """The shard is gone."""
        self._digested.pop(key, None)
        self._applied.pop(key, None)
        self._maker.freed(self._name(key))

    async def stop(self) -> None:
        """End everything; no memory is read any more when this returns."""
        await self._maker.stop()

    # For readers of others.

    def is_coming(self, key: ShardKey, base: str, root: str) -> bool:
        """Tell whether a delta that leads there is being made, or will be as soon as the log has taken the version."""
        digests = self._digested.get(key)
        if digests is not None and root_digest(digests) == root and self._maker.follows(self._name(key)):
            return True
        return self._book.is_coming(self._name(key), base, root)

    def offer(self, key: ShardKey, base: str, root: str, stored: StoredShard) -> PatchOffer | None:
        """Return what a reader that holds `base` may have instead of pieces."""
        return self._book.offer(self._name(key), base, root, stored.table.nbytes)

    # For reads of this agent.

    def applied(self, key: ShardKey, base: BaseVersion, root: str, pieces: int, patches: dict[int, bytes]) -> None:
        """Keep patches that have led this shard's pieces from its old version to what the log vouches for."""
        delta = self._applied.get(key)
        if delta is None or (delta.base, delta.root) != (base.root, root):
            if delta is not None:
                # The read that brought it was given up: no patch of it comes any more, so no reader may wait for one.
                self._book.end(delta)
            delta = self._applied[key] = self._book.begin(self._name(key), base.root, root, pieces)
        for piece, patch in patches.items():
            self._book.put(delta, piece, patch)

    def _name(self, key: ShardKey) -> tuple[str, ShardKey]:
        return self._job, key
