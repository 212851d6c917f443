"""Which segment holds which shard, and the manifests beside them."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from tensorhub_agent import manifest as manifests
from tensorhub_agent.borrowed import Borrowed
from tensorhub_agent.cache_disk import DiskStore
from tensorhub_agent.cache_room import CacheRoom
from tensorhub_agent.copying import CopyPool
from tensorhub_agent.effects import Key, Save
from tensorhub_agent.manifest import Adopted, Manifest, pack_layout
from tensorhub_agent.segments import Segment, SegmentStore
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout import Layout, PieceTable, pieces, segment_bytes
from tensorhub_common.names import cached_version

_log: Final = logging.getLogger(__name__)

_STATES: Final[dict[str, Literal["empty", "filling", "ready"]]] = {
    "empty": "empty",
    "filling": "filling",
    "ready": "ready",
    # A draining shard is as good as empty for the next process: its readers were this process's, but for those who map
    # it, and they have locks that tell.
    "draining": "empty",
}


@dataclass(slots=True)
class ShelfPlace:
    """One shard's memory."""

    segment: Segment
    layout: Layout
    table: PieceTable
    digest: str
    """Of the layout."""
    manifest: Manifest
    store: SegmentStore
    spare: Segment | None = None
    """Where a staged shard is filled."""
    borrowed: Borrowed | None = None
    """What a mapped shard has instead: `segment` is one page that nobody reads."""

    @property
    def target(self) -> Segment:
        """Where reads write to."""
        return self.spare or self.segment

    @property
    def inode(self) -> int:
        """What tells the segment in which the shard stands from its spare one, for its worker."""
        return os.fstat(self.segment.fd).st_ino


class Shelf:
    """The segments of one job's shards."""

    def __init__(self, job: str, store: SegmentStore, disk: DiskStore | None = None) -> None:
        """Begin empty."""
        self.job = job
        self.places: dict[Key, ShelfPlace] = {}
        self._memory, self._disk = store, disk

    async def make(
        self,
        key: Key,
        shards: int,
        layout: Layout,
        digest: str,
        *,
        spot: bool,
        incarnation: int,
        install: str = "in-place",
        on_disk: bool = False,
    ) -> ShelfPlace:
        """Make memory for a new shard, all zero; twice as much for a staged one. Raises `MemoryExhausted`."""
        staged, mapped = install == "staged", install == "mapped"
        nbytes = 0 if mapped else segment_bytes(layout)
        store = self._disk if on_disk and self._disk is not None else self._memory
        # Before its pieces are counted: a size by mistake would have so many that the agent could do nothing else.
        store.check_room(2 * nbytes if staged else nbytes)
        table = await asyncio.to_thread(pieces, layout)
        packed = await asyncio.to_thread(pack_layout, layout)
        head = await asyncio.to_thread(store.head_of, layout)
        segment = await asyncio.to_thread(store.create, nbytes, head)
        spare = None
        if staged:
            with _undone_by(lambda: store.remove(segment)):
                spare = await asyncio.to_thread(store.create, nbytes)
        manifest = Manifest(
            incarnation=incarnation,
            job=self.job,
            model=key.model,
            replica=key.replica,
            shard=key.shard,
            shards=shards,
            spot=spot,
            layout=packed,
            layout_digest=digest,
            segment=segment.name,
            nbytes=segment.nbytes,
            state="empty",
            partial=False,
            spare=None if spare is None else spare.name,
        )
        borrowed = Borrowed() if mapped else None
        if borrowed is None:
            # A mapped shard's worker has its memory, so the next run of this agent has nothing to take back.
            with _undone_by(lambda: manifests.remove(store, manifest, segment, *([spare] if spare else []))):
                manifests.save(store, manifest)
        place = self.places[key] = ShelfPlace(segment, layout, table, digest, manifest, store, spare, borrowed)
        return place

    def adopt(self, adopted: Adopted, store: SegmentStore) -> ShelfPlace:
        """Take back what an earlier process left."""
        manifest = adopted.manifest
        key = Key(manifest.model, manifest.replica, manifest.shard)
        table = pieces(adopted.layout)
        digest = manifest.layout_digest
        place = ShelfPlace(adopted.segment, adopted.layout, table, digest, manifest, store, adopted.spare)
        self.places[key] = place
        return place

    def save(self, effect: Save) -> None:
        """Write a shard's manifest anew; one rename says that it has swapped, and what stands there."""
        place = self.places[effect.key]
        if place.borrowed is not None:
            if effect.swap:
                place.borrowed.swap()
            return
        if effect.swap and place.spare is not None:
            place.segment, place.spare = place.spare, place.segment
        place.manifest = msgspec.structs.replace(
            place.manifest,
            state=_STATES[effect.state],
            partial=effect.partial,
            version=effect.version,
            root=effect.root,
            digests=effect.digests or None,
            swapped=place.manifest.swapped != effect.swap,
        )
        try:
            manifests.save(place.store, place.manifest)
        except MemoryExhausted as why:
            # The old manifest stands. It is believed only for bytes that still hash to it, so it can cost a refill at
            # the next start, and never a wrong version.
            _log.warning("%s", why)

    def is_kept_on_disk(self, key: Key) -> bool:
        """Tell whether a whole copy stands in a file, which `settle` is owed."""
        place = self.places.get(key)
        return place is not None and place.store is self._disk and place.manifest.state == "ready"

    def settle(self, key: Key) -> None:
        """Bring a copy's file to the disk. Raises `OSError`; may take long."""
        place = self.places.get(key)
        if place is not None and self._disk is not None:
            self._disk.settle(place.segment)

    def copies(self) -> CacheRoom:
        """Return how many bytes the copies of retained versions take."""
        copies = [place for key, place in self.places.items() if cached_version(key.replica) is not None]
        memory = sum(sum(place.table.nbytes) for place in copies if place.store is self._memory)
        return CacheRoom(memory, sum(place.segment.file_bytes for place in copies if place.store is self._disk))

    def let_go(self, key: Key) -> None:
        """Let go of what a mapped shard's read has taken."""
        place = self.places.get(key)
        if place is not None and place.borrowed is not None:
            place.borrowed.let_go()

    def free(self, key: Key) -> None:
        """Remove a shard's memory; whoever has it mapped keeps it."""
        place = self.places.pop(key, None)
        if place is not None:
            if place.borrowed is not None:
                place.borrowed.close()
            spare = [place.spare] if place.spare is not None else []
            manifests.remove(place.store, place.manifest, place.segment, *spare)


@contextlib.contextmanager
def _undone_by(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


class Shelves:
    """The shelves of all jobs."""

    def __init__(self, store: SegmentStore, disk: DiskStore | None = None) -> None:
        """Begin empty; copies may stand on the disk, if there is one for them."""
        self.store, self.disk = store, disk
        self._shelves: dict[str, Shelf] = {}

    def of(self, job: str) -> Shelf:
        """Return a job's shelf."""
        if job not in self._shelves:
            self._shelves[job] = Shelf(job, self.store, self.disk)
        return self._shelves[job]

    async def adopt(self, pool: CopyPool) -> dict[str, list[Adopted]]:
        """Take back what an earlier process of this agent left, by job."""
        found: dict[str, list[Adopted]] = {}
        for store in self._stores():
            for adopted in await manifests.adopt(store, pool):
                self.of(adopted.manifest.job).adopt(adopted, store)
                found.setdefault(adopted.manifest.job, []).append(adopted)
        return found

    def copies(self) -> CacheRoom:
        """Return how many bytes the copies of retained versions take, of all jobs."""
        each = [shelf.copies() for shelf in self._shelves.values()]
        return CacheRoom(sum(one.memory_bytes for one in each), sum(one.disk_bytes for one in each))

    def _stores(self) -> list[SegmentStore]:
        return [self.store] if self.disk is None else [self.store, self.disk]

    def close(self) -> None:
        """Leave everything where it stands, for the next process."""
        for store in self._stores():
            store.close()
