"""Copies on the disk: any library reads the file, and a file is believed for its bytes alone."""

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import Keep, SaveManifest
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.adoption import AdoptedShard, adopt
from tensorhub_agent.storage.disk_segments import DiskSegmentStore
from tensorhub_agent.storage.manifest import Manifest, manifest_path, save
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import TensorEntry, layout_digest, layout_of, placements

MIB = 1024 * 1024
KEY = ShardKey("policy", "_cache-12-40", 0)
SAVE = "tensorhub_agent.storage.manifest.save"
EMPTY = SaveManifest(key=KEY, state="empty", partial=True)


def entry(name: str, dtype: str, itemsize: int, *shape: int) -> TensorEntry:
    return TensorEntry(name, dtype, itemsize, shape, shape, (0,) * len(shape))


LAYOUT = layout_of(
    [
        entry("__metadata__", "float32", 4, 3),
        entry("_gap.40", "uint8", 1, 40),
        entry("empty", "float32", 4, 0, 7),
        entry("rows", "float32", 4, 300, 41),
        entry("scalar", "int64", 8),
        entry("twice", "complex128", 16, 5),
        entry("ümlaut", "float16", 2, 9),
    ]
)


def disk(folder: Path, bytes_max: int = 64 * MIB) -> DiskSegmentStore:
    store = DiskSegmentStore.in_state(folder / "state", bytes_max)
    assert store is not None
    return store


def files(store: DiskSegmentStore) -> list[str]:
    return sorted(path.name for path in store.shm_dir.iterdir())


def full(*_: object) -> None:
    raise MemoryExhausted("the disk is full")


def on_host(place: StoredShard) -> Segment:
    assert isinstance(place.segment, Segment)
    return place.segment


@dataclass
class Copy:
    """A copy on the disk, with bytes in it that nobody has told of yet."""

    folder: Path
    pool: CopyPool
    store: DiskSegmentStore
    shards: JobShardStore
    place: StoredShard

    @property
    def path(self) -> Path:
        """Where the file stands, with its name or before it has that."""
        named = on_host(self.place).path
        return named if named.exists() else self.store.shm_dir / f"{self.place.segment.name}.part"

    async def wish(self) -> Keep:
        """Return the core's wish, once all bytes stand."""
        digests = await self.pool.digest(self.place.segment.view, Spans.of(self.place.table)).result()
        return Keep(key=KEY, number=7, version=12, root=root_digest(digests), digests=digests)

    async def counts(self) -> SaveManifest:
        wish = await self.wish()
        return SaveManifest(
            key=KEY, state="ready", partial=False, version=12, root=wish.root, digests=wish.digests, swap=False
        )

    async def kept(self) -> str | None:
        """Keep it; why that was not possible."""
        self.shards.keep(await self.wish())
        return await self.shards.written(KEY)

    async def save(self, saved: SaveManifest) -> None:
        self.shards.save(saved)
        await self.shards.files.idle()

    async def fill(self, *, settled: bool = True) -> None:
        """Say that it is whole, as the core does."""
        await self.save(await self.counts())
        if settled:
            await self.shards.settle(KEY)

    async def found(self) -> list[AdoptedShard]:
        """Take back what the run that had this store left."""
        self.store.close()
        return (await adopt(disk(self.folder), self.pool))[0]

    def flip(self, at: int) -> None:
        """Change a bit of the file."""
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
async def copy(tmp_path: Path, pool: CopyPool) -> Copy:
    store = disk(tmp_path)
    shards = JobShardStore("run-7", SegmentStore(tmp_path, "tensorhub-hub-a-", MIB), store)
    place = await shards.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, on_disk=True)
    on_host(place).view[:] = np.random.default_rng(1).bytes(place.segment.nbytes)
    return Copy(tmp_path, pool, store, shards, place)


async def test_the_file_is_one_that_any_library_reads(copy: Copy) -> None:
    await copy.fill()
    segment = on_host(copy.place)
    tensors = load_file(segment.path)
    for each, begin in zip(LAYOUT.tensors, placements(LAYOUT), strict=True):
        name = {"__metadata__": "__metadata___"}.get(each.name, each.name)
        assert tensors[name].tobytes() == bytes(segment.view[begin : begin + each.nbytes])
    assert (tensors["rows"].shape, tensors["scalar"].shape, tensors["empty"].shape) == ((300, 41), (), (0, 7))
    with safe_open(segment.path, "np") as file:
        assert file.metadata()["dtype of twice"] == "complex128 [5]"
    assert segment.path.stat().st_mode & 0o777 == 0o600


async def test_it_has_its_name_once_it_is_whole_and_on_the_disk(copy: Copy) -> None:
    name = copy.place.segment.name
    assert files(copy.store) == [f"{name}.json", f"{name}.part"]
    assert not copy.shards.is_kept_on_disk(KEY)
    await copy.fill(settled=False)
    assert copy.shards.is_kept_on_disk(KEY)
    for _ in range(2):
        await copy.shards.settle(KEY)
        assert files(copy.store) == [name, f"{name}.json"]
    copy.shards.free(KEY)
    await copy.shards.files.idle()
    assert (files(copy.store), copy.store.account.total_bytes) == ([], 0)
    copy.store.make_durable(on_host(copy.place))
    assert files(copy.store) == []


@pytest.mark.parametrize("settled", [True, False], ids=["named", "killed before it had its name"])
async def test_a_whole_file_is_found_again(copy: Copy, *, settled: bool) -> None:
    await copy.fill(settled=settled)
    held = bytes(on_host(copy.place).view)
    [again] = await copy.found()
    assert (again.whole, again.manifest.version, again.manifest.replica) == (True, 12, KEY.replica)
    assert bytes(again.segment.view) == held


async def test_who_is_told_that_a_copy_is_kept_finds_it_again(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the disk takes: until then nobody is told, and an agent that is killed begins it anew."""
    wish, goes_on = await copy.wish(), threading.Event()

    def slow(store: SegmentStore, manifest: Manifest) -> None:
        assert goes_on.wait(10)
        save(store, manifest)

    monkeypatch.setattr(SAVE, slow)
    copy.shards.keep(wish)
    keeping = asyncio.create_task(copy.shards.written(KEY))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not keeping.done()
    assert b'"state":"empty"' in manifest_path(copy.store, copy.place.segment.name).read_bytes()
    goes_on.set()
    assert await keeping is None
    [again] = await copy.found()
    assert (again.whole, again.manifest.version) == (True, 12)


async def test_a_manifest_that_was_kept_is_not_written_once_more_when_it_counts(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await copy.kept() is None
    counts = await copy.counts()
    written: list[Manifest] = []
    monkeypatch.setattr(SAVE, lambda _, manifest: written.append(manifest))
    await copy.save(counts)
    assert written == []
    copy.shards.save(EMPTY)
    await copy.save(counts)
    assert [manifest.version for manifest in written] == [12]


async def test_why_a_manifest_is_not_written_is_told(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails in a way that nobody thought of is not kept either, and the next one is written again."""
    tries: list[Any] = []

    def odd(*given: Any) -> None:
        tries.append(given)
        if len(tries) > 1:
            raise ArithmeticError("planted")

    monkeypatch.setattr(SAVE, full)
    assert await copy.kept() == "the disk is full"
    wish = await copy.wish()
    monkeypatch.setattr(SAVE, odd)
    copy.shards.save(SaveManifest(key=KEY, state="filling", partial=True))
    await asyncio.sleep(0)
    # The first write is under way, and the second one begins where it ends.
    copy.shards.keep(wish)
    assert "was not written" in (await copy.shards.written(KEY) or "")
    monkeypatch.setattr(SAVE, save)
    assert await copy.kept() is None
    copy.shards.free(KEY)
    await copy.shards.files.idle()
    assert await copy.shards.written(KEY) is None


async def test_a_manifest_that_could_not_be_kept_is_tried_again_when_it_counts(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAVE, full)
    assert await copy.kept() == "the disk is full"
    monkeypatch.setattr(SAVE, save)
    await copy.fill(settled=False)
    [again] = await copy.found()
    assert (again.whole, again.manifest.version) == (True, 12)


async def test_what_is_decided_after_a_fill_was_kept_stands(copy: Copy) -> None:
    """The round has failed in the same turn, so the memory is empty for whoever takes it back."""
    copy.shards.keep(await copy.wish())
    copy.shards.save(EMPTY)
    assert await copy.shards.written(KEY) is None
    [again] = await copy.found()
    assert (again.whole, again.manifest.state) == (False, "empty")


async def test_what_was_being_written_or_has_one_wrong_bit_is_taken_back_as_empty(copy: Copy) -> None:
    """Its room is used again, and what stands in it counts for nothing."""
    await copy.fill()
    copy.flip(copy.place.segment.origin + placements(LAYOUT)[3] + 1000)
    [again] = await copy.found()
    assert (again.whole, again.manifest.root) == (False, None)
    await copy.save(SaveManifest(key=KEY, state="filling", partial=True, digests=b"", swap=False))
    [again] = await copy.found()
    assert (again.whole, again.manifest.state, again.manifest.partial) == (False, "empty", True)
    assert again.segment.name == copy.place.segment.name


def without_manifest(copy: Copy) -> None:
    manifest_path(copy.store, copy.place.segment.name).unlink()


CUT: list[Callable[[Copy], None]] = [lambda copy, to=to: os.truncate(copy.path, to) for to in (0, 1, 4096)]  # type: ignore[misc]
DAMAGED: list[Callable[[Copy], None]] = [lambda copy, at=at: copy.flip(at) for at in (0, 5, 60)]  # type: ignore[misc]


@pytest.mark.parametrize("damage", [*CUT, *DAMAGED, without_manifest])
@pytest.mark.parametrize("settled", [True, False])
async def test_a_file_that_was_cut_or_whose_head_or_manifest_is_damaged_is_gone(
    copy: Copy, damage: Callable[[Copy], None], *, settled: bool
) -> None:
    await copy.fill(settled=settled)
    damage(copy)
    (copy.store.shm_dir / "notes.txt").write_text("not ours")
    assert await copy.found() == []
    assert files(copy.store) == ["notes.txt"]


async def test_a_file_that_the_disk_cannot_read_is_gone(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of `read` and no signal, so the agent comes up without it."""
    await copy.fill()

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tensorhub_agent.storage.disk_segments.os.preadv", broken)
    assert await copy.found() == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = disk(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(MemoryExhausted, match=r"the disk has \d+ bytes free; make room"):
            store.create(2 * MIB, store.head_of(LAYOUT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (files(store), store.account.total_bytes) == ([], 0)


def test_without_a_limit_and_a_folder_there_is_no_disk(tmp_path: Path) -> None:
    """A limit that was taken away leaves what stands there already, for the log to decide."""
    assert DiskSegmentStore.in_state(tmp_path, 0) is None
    assert DiskSegmentStore.in_state(tmp_path, MIB) is not None
    left = DiskSegmentStore.in_state(tmp_path, 0)
    assert left is not None
    with pytest.raises(MemoryExhausted):
        left.create(1)


def test_too_many_tensors_for_the_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_agent.storage.disk_segments.HEAD_BYTES_MAX", 4096)
    many = layout_of(entry(f"layer-{number:05}", "float32", 4, 1) for number in range(100))
    with pytest.raises(LayoutMismatch, match="safetensors"):
        disk(tmp_path).head_of(many)


def test_an_opened_file_counts_with_its_head_and_over_the_limit_it_says_what_to_raise(tmp_path: Path) -> None:
    store = disk(tmp_path)
    segment = store.create(MIB, store.head_of(LAYOUT))
    assert store.account.total_bytes == segment.file_bytes == MIB + segment.origin
    store.close()
    again = disk(tmp_path, 3 * MIB)
    opened = again.open(segment.name)
    assert (opened.origin, opened.nbytes, again.account.total_bytes) == (segment.origin, MIB, segment.file_bytes)
    with pytest.raises(MemoryExhausted, match="TENSORHUB_CACHE_DISK_BYTES"):
        again.create(2 * MIB, again.head_of(LAYOUT))
