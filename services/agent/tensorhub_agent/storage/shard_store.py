"""Which segment holds which shard, and the manifests beside them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.effects import Keep, SaveManifest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.runtime.troubles import TROUBLES, TroubleKind
from tensorhub_agent.storage import manifest as manifests
from tensorhub_agent.storage.adoption import AdoptedShard, LimitedAdoption, SetAsideShard, adopt, key_of, remove_aside
from tensorhub_agent.storage.device_segments import (
    AnySegment,
    DeviceSegment,
    DeviceSegmentStore,
    DeviceStores,
    HandedBackSegment,
)
from tensorhub_agent.storage.disk_segments import DiskSegmentStore
from tensorhub_agent.storage.manifest import Manifest, pack_layout
from tensorhub_agent.storage.mapped_descriptors import MappedDescriptors
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_common.errors import AgentUnavailable, MemoryExhausted
from tensorhub_common.layout.layout import Layout, PieceTable, pieces, segment_bytes
from tensorhub_common.protocol.subjects import cached_version
from tensorhub_common.runtime.supervision import Supervisor, log_only


@dataclass(frozen=True, slots=True)
class CopyQuota:
    """Bytes of copies in memory and on the disk: the limits of both, or what is taken of each."""

    memory_bytes: int
    disk_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together, which is what the log is told."""
        return self.memory_bytes + self.disk_bytes


_log: Final = logging.getLogger(__name__)

_STATES: Final[dict[str, Literal["empty", "filling", "ready"]]] = {
    "empty": "empty",
    "filling": "filling",
    "ready": "ready",
    # A draining shard is as good as empty for the next process: its readers were this process's, but for those who map
    # it, and they have locks that tell.
    "draining": "empty",
}

NOT_WRITTEN: Final = "its manifest was not written: see the agent's log"


@dataclass(slots=True)
class StoredShard:
    """One shard's memory."""

    segment: AnySegment
    layout: Layout
    table: PieceTable
    digest: str
    """Of the layout."""
    manifest: Manifest
    """Only that of host memory is written, for only that is found by the next process of the agent."""
    store: SegmentStore | DeviceSegmentStore
    spare: AnySegment | None = None
    """Where a staged shard is filled."""
    descriptors: MappedDescriptors | None = None
    """What a mapped shard has instead: `segment` is one page that no process reads."""
    writing: asyncio.Task[None] | None = None
    """Brings the manifest of a copy on disk up to date, which `unwritten` asks for."""
    unwritten: bool = False
    unwritten_why: str | None = None
    """Why the manifest in the file is not the last one."""

    @property
    def target(self) -> AnySegment:
        """Where reads write to."""
        return self.spare or self.segment

    def remove(self) -> None:
        """Remove its memory; a process that has it mapped keeps it. It is called from any thread."""
        if isinstance(self.store, SegmentStore):
            manifests.remove(self.store, self.manifest)
        for segment in (self.segment, self.spare):
            if segment is not None:
                _removed(self.store, segment)

    @property
    def inode(self) -> int:
        """Which segment is live, as a worker tells it from the spare one."""
        return self.segment.inode


class FileWriter:
    """Writes and removes files that an event loop must not wait for, and memory that came too late to be wanted.

    Invariant: a shard's manifest is written by one thread at a time, and by none once its removal has begun.
    """

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self.work = Supervisor("the agent's memory")
        self._busy = self.work.group()

    def write(self, stored: StoredShard) -> None:
        """Bring a manifest up to date; of several changes the last one counts."""
        stored.unwritten, stored.unwritten_why = True, NOT_WRITTEN
        if stored.writing is None:
            stored.writing = self._busy.start(self._write(stored), "writing a manifest to the disk")

    async def _write(self, stored: StoredShard) -> None:
        try:
            while stored.unwritten:
                stored.unwritten, stored.unwritten_why = False, NOT_WRITTEN
                stored.unwritten_why = await asyncio.to_thread(_save, stored.store, stored.manifest)
        finally:
            stored.writing = None

    async def written(self, stored: StoredShard) -> str | None:
        """Return once the last manifest is written, or why it is not."""
        while stored.writing is not None:
            await asyncio.wait({stored.writing})
        return stored.unwritten_why

    def remove(self, stored: StoredShard) -> None:
        """Remove a shard's files. What a failing disk does not remove stays; the next process looks at it again."""
        self._busy.start(self._remove(stored), "removing a file from the disk", log_only)

    def remove_aside(self, store: SegmentStore, aside: SetAsideShard) -> None:
        """Remove what was set aside, in the same way."""
        removing = asyncio.to_thread(remove_aside, store, aside)
        self._busy.start(removing, "removing what was set aside", log_only)

    async def _remove(self, stored: StoredShard) -> None:
        stored.unwritten = False
        await self.written(stored)
        await asyncio.to_thread(stored.remove)

    async def idle(self) -> None:
        """Return once everything is written and removed that was to be, so that there is the room it leaves."""
        while self._busy:
            await self._busy.ended()

    def unwanted(self, making: "asyncio.Task[StoredShard]") -> None:
        """Take memory that was made when its worker had gone: no other code knows of it."""
        if not making.cancelled() and making.exception() is None:
            self._busy.start(asyncio.to_thread(making.result().remove), "removing memory that came too late")


def _save(store: SegmentStore | DeviceSegmentStore, manifest: Manifest) -> str | None:
    """Write the manifest of host memory; returns why it can't be written."""
    if isinstance(store, DeviceSegmentStore):
        return None
    try:
        manifests.save(store, manifest)
        TROUBLES.over(TroubleKind.MANIFEST)
    except MemoryExhausted as why:
        TROUBLES.note(TroubleKind.MANIFEST, why)
        # The old manifest is kept. It is believed only for bytes that still hash to it, so it can cost a refill at
        # the next start, and never a wrong version.
        _log.warning("%s", why)
        return str(why)
    return None


def _duplicated(handed_back: Sequence[HandedBackSegment]) -> tuple[dict[bool, HandedBackSegment], contextlib.ExitStack]:
    """Return memory that a worker keeps, by whether it is the live one, and what closes these descriptors."""
    with contextlib.ExitStack() as undo:
        own: dict[bool, HandedBackSegment] = {}
        for each in handed_back:
            own[each.is_live] = each.duplicate()
            undo.callback(own[each.is_live].close)
        return own, undo.pop_all()


class JobShardStore:
    """The segments of one job's shards."""

    def __init__(
        self,
        job: str,
        store: SegmentStore,
        disk: DiskSegmentStore | None = None,
        files: FileWriter | None = None,
        devices: DeviceStores | None = None,
    ) -> None:
        """Begin empty."""
        self.files = files or FileWriter()
        self.job = job
        self.shards: dict[ShardKey, StoredShard] = {}
        self.aside: dict[ShardKey, tuple[SetAsideShard, SegmentStore]] = {}
        """Shards whose memory is here and could not be taken back."""
        self._memory, self._disk, self._devices = store, disk, devices

    async def make(
        self,
        key: ShardKey,
        shards: int,
        layout: Layout,
        digest: str,
        *,
        spot: bool,
        incarnation: int,
        install: str = "in-stored",
        on_disk: bool = False,
        device: str = "",
        handed_back: Sequence[HandedBackSegment] = (),
    ) -> StoredShard:
        """Make memory for a new shard, all zero; twice as much for a staged one. Raises `MemoryExhausted`.

        With `device`, the UUID of a GPU, it is memory there. Raises `DeviceUnavailable` where this agent can't use it.
        A mapped shard shows others' memory, of which this agent needs to see nothing: it has a page of the host's.

        `handed_back` is memory of the GPU that the worker kept. It is taken in place of new, and stays the caller's.

        What is being made when it is cancelled is removed as soon as that can be. Raises `AgentUnavailable` where
        memory of this shard was set aside.
        """
        if key in self.aside:
            aside, _ = self.aside[key]
            raise AgentUnavailable(
                f"the memory of {key} is on this agent, which could not take it back when it started "
                f" ({aside.reason}): start the agent again when it can, or remove "
                f"{aside.manifest.segment} and its manifest"
            )
        staged, mapped = install == "staged", install == "mapped"
        store: SegmentStore | DeviceSegmentStore = self._memory
        if device and not mapped and self._devices is not None:
            store = await asyncio.to_thread(self._devices.of, device)
        elif on_disk and self._disk is not None:
            store = self._disk
        nbytes = 0 if mapped else segment_bytes(layout)
        # Before its pieces are counted: a wrong size could have so many pieces that the agent did nothing else.
        store.account.check_room(2 * nbytes if staged else nbytes)
        table = await asyncio.to_thread(pieces, layout)
        packed = await asyncio.to_thread(pack_layout, layout)
        head = await asyncio.to_thread(store.head_of, layout)
        # All of a shard's memory or none. With descriptors of this call's own: the caller's end with the caller.
        are_all = len(handed_back) == (2 if staged else 1) and isinstance(store, DeviceSegmentStore)
        own, closing = _duplicated(handed_back if are_all else ())

        def made(*, is_live: bool) -> AnySegment:
            if isinstance(store, DeviceSegmentStore) and is_live in own:
                return store.take_back(own[is_live], nbytes)
            return store.create(nbytes, head if is_live else b"")

        def create() -> StoredShard:
            with closing:
                segment = made(is_live=True)
                spare: AnySegment | None = None
                if staged:
                    with _undone_by(lambda: _removed(store, segment)):
                        spare = made(is_live=False)
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
            stored = StoredShard(
                segment, layout, table, digest, manifest, store, spare, MappedDescriptors() if mapped else None
            )
            if not mapped and isinstance(store, SegmentStore):
                # A mapped shard's worker has its memory, and a GPU's is handed back by its worker, which says what it
                # has; so the next run of this agent finds nothing by a manifest.
                with _undone_by(stored.remove):
                    manifests.save(store, manifest)
            return stored

        making = self.files.work.start(asyncio.to_thread(create), "making memory for a shard", awaited=True)
        try:
            stored = self.shards[key] = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self.files.work.guarded(self.files.unwanted, "letting go of late memory"))
            raise
        return stored

    def adopt(self, adopted: AdoptedShard, store: SegmentStore) -> StoredShard:
        """Take back what an earlier process left."""
        manifest = adopted.manifest
        key = key_of(manifest)
        table = pieces(adopted.layout)
        digest = manifest.layout_digest
        stored = StoredShard(adopted.segment, adopted.layout, table, digest, manifest, store, adopted.spare)
        self.shards[key] = stored
        return stored

    def save(self, effect: SaveManifest) -> None:
        """Write a shard's manifest anew; one rename says that it has swapped, and what it has."""
        stored = self.shards[effect.key]
        if stored.descriptors is not None:
            if effect.swap:
                stored.descriptors.swap()
            return
        if effect.swap and stored.spare is not None:
            stored.segment, stored.spare = stored.spare, stored.segment
        manifest = msgspec.structs.replace(
            stored.manifest,
            state=_STATES[effect.state],
            partial=effect.partial,
            version=effect.version,
            root=effect.root,
            digests=effect.digests or None,
            swapped=stored.manifest.swapped != effect.swap,
        )
        if manifest == stored.manifest and stored.unwritten_why is None:
            # What was filled was kept before it counted.
            return
        self._change(stored, manifest)

    def _change(self, stored: StoredShard, manifest: Manifest) -> None:
        stored.manifest = manifest
        if stored.store is self._disk:
            self.files.write(stored)
        else:
            stored.unwritten_why = _save(stored.store, manifest)

    def keep(self, effect: Keep) -> None:
        """Have a shard's manifest say what was filled in; `written` tells when it does."""
        stored = self.shards[effect.key]
        self._change(
            stored,
            msgspec.structs.replace(
                stored.manifest,
                state="ready",
                partial=False,
                version=effect.version,
                root=effect.root,
                digests=effect.digests or None,
            ),
        )

    async def written(self, key: ShardKey) -> str | None:
        """Return once a shard's last manifest is written, or why it is not; None where the shard is gone."""
        stored = self.shards.get(key)
        return None if stored is None else await self.files.written(stored)

    def is_kept_on_disk(self, key: ShardKey) -> bool:
        """Tell whether a whole copy is in a file that `settle` is still to be called for."""
        stored = self.shards.get(key)
        return stored is not None and stored.store is self._disk and stored.manifest.state == "ready"

    async def settle(self, key: ShardKey) -> None:
        """Bring a copy's file and its manifest to the disk. Raises `OSError`; may take long."""
        stored = self.shards.get(key)
        if stored is not None and self._disk is not None and isinstance(stored.segment, Segment):
            await self.files.written(stored)
            await asyncio.to_thread(self._disk.make_durable, stored.segment)

    def copies(self) -> CopyQuota:
        """Return how many bytes the copies of retained versions take."""
        copies = [stored for key, stored in self.shards.items() if cached_version(key.replica) is not None]
        memory = sum(sum(stored.table.nbytes) for stored in copies if stored.store is self._memory)
        return CopyQuota(memory, sum(stored.segment.file_bytes for stored in copies if stored.store is self._disk))

    def let_go(self, key: ShardKey) -> None:
        """Let go of what a mapped shard's read has taken."""
        stored = self.shards.get(key)
        if stored is not None and stored.descriptors is not None:
            stored.descriptors.let_go()

    def free(self, key: ShardKey) -> None:
        """Remove a shard's memory, and what was set aside of one; a process that has it mapped keeps it."""
        stored = self.shards.pop(key, None)
        if stored is not None:
            if stored.descriptors is not None:
                stored.descriptors.close()
            if stored.store is self._disk:
                self.files.remove(stored)
            else:
                stored.remove()
        elif key in self.aside:
            aside, store = self.aside.pop(key)
            if store is self._disk:
                self.files.remove_aside(store, aside)
            else:
                remove_aside(store, aside)


def _removed(store: SegmentStore | DeviceSegmentStore, segment: AnySegment) -> None:
    """Remove a segment of this store."""
    if isinstance(segment, DeviceSegment):
        assert isinstance(store, DeviceSegmentStore)
        store.remove(segment)
    else:
        assert isinstance(store, SegmentStore)
        store.remove(segment)


@contextlib.contextmanager
def _undone_by(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


class ShardStores:
    """The shard stores of all jobs."""

    def __init__(
        self, store: SegmentStore, disk: DiskSegmentStore | None = None, devices: DeviceStores | None = None
    ) -> None:
        """Begin empty; copies may be on the disk, and shards on GPUs, if there are any for them."""
        self.store, self.disk, self.devices = store, disk, devices
        self.files = FileWriter()
        self._by_job: dict[str, JobShardStore] = {}

    def of(self, job: str) -> JobShardStore:
        """Return a job's shard store."""
        if job not in self._by_job:
            self._by_job[job] = JobShardStore(job, self.store, self.disk, self.files, self.devices)
        return self._by_job[job]

    async def adopt(self, pool: CopyPool, jobs_max: int) -> dict[str, list[AdoptedShard]]:
        """Take back what an earlier process of this agent left, by job; a job or shard too many is set aside."""
        found: dict[str, list[AdoptedShard]] = {}
        room = LimitedAdoption(jobs_max)
        for store in self._stores():
            adopted, aside = await adopt(store, pool, room)
            for each in adopted:
                self.of(each.manifest.job).adopt(each, store)
                found.setdefault(each.manifest.job, []).append(each)
            for left in aside:
                self.of(left.manifest.job).aside[key_of(left.manifest)] = left, store
        for job in [each for each, store in self._by_job.items() if store.aside and each not in found]:
            # Joining tells the log of them. Otherwise it would release them, and place no copies here either.
            if len(found) < jobs_max:
                found[job] = []
        return found

    def copies(self) -> CopyQuota:
        """Return how many bytes the copies of retained versions take, of all jobs."""
        each = [store.copies() for store in self._by_job.values()]
        return CopyQuota(sum(one.memory_bytes for one in each), sum(one.disk_bytes for one in each))

    def set_aside(self) -> list[tuple[str, int, str]]:
        """Return the jobs of which shards were set aside, how many of each, and why the first was."""
        return [
            (job, len(store.aside), next(iter(store.aside.values()))[0].reason)
            for job, store in self._by_job.items()
            if store.aside
        ]

    def _stores(self) -> list[SegmentStore]:
        return [self.store] if self.disk is None else [self.store, self.disk]

    def close(self) -> None:
        """Leave all files where they are, for the next process; workers keep the memory of GPUs."""
        for store in self._stores():
            store.close()
        if self.devices is not None:
            self.devices.close()
