"""Copies on the disk: any library reads the file, and a file is believed for its bytes alone."""

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
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
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of, placements

MIB = 1024 * 1024
KEY = ShardKey("policy", "_cache-12-40", 0)


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


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


def disk(tmp_path: Path, bytes_max: int = 64 * MIB) -> DiskSegmentStore:
    store = DiskSegmentStore.in_state(tmp_path / "state", bytes_max)
    assert store is not None
    return store


async def made(tmp_path: Path, store: DiskSegmentStore, layout: Layout = LAYOUT) -> tuple[JobShardStore, StoredShard]:
    """Make a copy on the disk, with bytes in it that nobody has told of yet."""
    shards = JobShardStore("run-7", SegmentStore(tmp_path, "tensorhub-hub-a-", MIB), store)
    place = await shards.make(KEY, 1, layout, layout_digest(layout), spot=False, incarnation=1, on_disk=True)
    place.segment.view[:] = np.random.default_rng(1).bytes(place.segment.nbytes)
    return shards, place


async def filled(shards: JobShardStore, place: StoredShard, pool: CopyPool) -> None:
    """Say that it is whole, as the core does."""
    digests = await pool.digest(place.segment.view, Spans.of(place.table)).result()
    root = root_digest(digests)
    shards.save(SaveManifest(key=KEY, state="ready", partial=False, version=12, root=root, digests=digests, swap=False))
    await shards.files.idle()


async def found(tmp_path: Path, store: DiskSegmentStore, pool: CopyPool) -> list[AdoptedShard]:
    """Take back what the run that had this store left."""
    store.close()
    return (await adopt(disk(tmp_path), pool))[0]


def files(store: DiskSegmentStore) -> list[str]:
    return sorted(path.name for path in store.shm_dir.iterdir())


async def test_the_file_is_one_that_any_library_reads(tmp_path: Path, pool: CopyPool) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    await shards.settle(KEY)
    tensors = load_file(place.segment.path)
    for each, begin in zip(LAYOUT.tensors, placements(LAYOUT), strict=True):
        name = {"__metadata__": "__metadata___"}.get(each.name, each.name)
        assert tensors[name].tobytes() == bytes(place.segment.view[begin : begin + each.nbytes])
    assert (tensors["rows"].shape, tensors["scalar"].shape, tensors["empty"].shape) == ((300, 41), (), (0, 7))
    with safe_open(place.segment.path, "np") as file:
        assert file.metadata()["dtype of twice"] == "complex128 [5]"
    assert place.segment.path.stat().st_mode & 0o777 == 0o600


async def test_it_has_its_name_once_it_is_whole_and_on_the_disk(tmp_path: Path, pool: CopyPool) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    name = place.segment.name
    assert files(store) == [f"{name}.json", f"{name}.part"]
    assert not shards.is_kept_on_disk(KEY)
    await filled(shards, place, pool)
    assert shards.is_kept_on_disk(KEY)
    await shards.settle(KEY)
    assert files(store) == [name, f"{name}.json"]
    await shards.settle(KEY)
    shards.free(KEY)
    await shards.files.idle()
    assert (files(store), store.total_bytes) == ([], 0)
    store.make_durable(place.segment)
    assert files(store) == []


@pytest.mark.parametrize("settled", [True, False], ids=["named", "killed before it had its name"])
async def test_a_whole_file_is_found_again(tmp_path: Path, pool: CopyPool, settled: bool) -> None:  # noqa: FBT001
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    if settled:
        await shards.settle(KEY)
    held = bytes(place.segment.view)
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.version, again.manifest.replica) == (True, 12, KEY.replica)
    assert bytes(again.segment.view) == held


async def keep_of(place: StoredShard, pool: CopyPool) -> Keep:
    """Return the core's wish, once all bytes stand."""
    digests = await pool.digest(place.segment.view, Spans.of(place.table)).result()
    return Keep(key=KEY, number=7, version=12, root=root_digest(digests), digests=digests)


async def test_who_is_told_that_a_copy_is_kept_finds_it_again(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the disk takes: until then nobody is told, and an agent that is killed begins it anew."""
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    effect, goes_on = await keep_of(place, pool), threading.Event()

    def slow(store: SegmentStore, manifest: Manifest) -> None:
        assert goes_on.wait(10)
        save(store, manifest)

    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", slow)
    shards.keep(effect)
    keeping = asyncio.create_task(shards.written(KEY))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not keeping.done()
    assert b'"state":"empty"' in manifest_path(store, place.segment.name).read_bytes()
    goes_on.set()
    assert await keeping is None
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.version) == (True, 12)


async def test_a_manifest_that_was_kept_is_not_written_once_more_when_it_counts(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    effect = await keep_of(place, pool)
    shards.keep(effect)
    assert await shards.written(KEY) is None
    written: list[Manifest] = []
    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", lambda _, manifest: written.append(manifest))
    counts = SaveManifest(key=KEY, state="ready", partial=False, version=12, root=effect.root, digests=effect.digests)
    shards.save(counts)
    await shards.files.idle()
    assert written == []
    shards.save(SaveManifest(key=KEY, state="empty", partial=True))
    shards.save(counts)
    await shards.files.idle()
    assert [manifest.version for manifest in written] == [12]


async def test_why_a_manifest_is_not_written_is_told(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails in a way that nobody thought of is not kept either, and the next one is written again."""
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    effect, tries = await keep_of(place, pool), []

    def full(*_: object) -> None:
        raise MemoryExhausted("the disk is full")

    def odd(*given: Any) -> None:
        tries.append(given)
        if len(tries) > 1:
            raise ArithmeticError("planted")

    async def kept() -> str | None:
        shards.keep(effect)
        return await shards.written(KEY)

    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", full)
    assert await kept() == "the disk is full"
    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", odd)
    shards.save(SaveManifest(key=KEY, state="filling", partial=True))
    await asyncio.sleep(0)
    # The first write is under way, and the second one begins where it ends.
    assert "was not written" in (await kept() or "")
    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", save)
    assert await kept() is None
    shards.free(KEY)
    await shards.files.idle()
    assert await shards.written(KEY) is None


async def test_a_manifest_that_could_not_be_kept_is_tried_again_when_it_counts(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    effect = await keep_of(place, pool)

    def full(*_: object) -> None:
        raise MemoryExhausted("the disk is full")

    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", full)
    shards.keep(effect)
    assert await shards.written(KEY) == "the disk is full"
    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", save)
    shards.save(
        SaveManifest(key=KEY, state="ready", partial=False, version=12, root=effect.root, digests=effect.digests)
    )
    await shards.files.idle()
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.version) == (True, 12)


async def test_what_is_decided_after_a_fill_was_kept_stands(tmp_path: Path, pool: CopyPool) -> None:
    """The round has failed in the same turn, so the memory is empty for whoever takes it back."""
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    shards.keep(await keep_of(place, pool))
    shards.save(SaveManifest(key=KEY, state="empty", partial=True))
    assert await shards.written(KEY) is None
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.state) == (False, "empty")


async def test_what_was_being_written_is_taken_back_as_empty(tmp_path: Path, pool: CopyPool) -> None:
    """Its room is used again, and what stands in it counts for nothing."""
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    shards.save(SaveManifest(key=KEY, state="filling", partial=True, version=None, root=None, digests=b"", swap=False))
    await shards.files.idle()
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.state, again.manifest.partial) == (False, "empty", True)
    assert again.segment.name == place.segment.name


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


async def test_one_wrong_bit_and_it_is_not_believed(tmp_path: Path, pool: CopyPool) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    await shards.settle(KEY)
    flip(place.segment.path, place.segment.origin + placements(LAYOUT)[3] + 1000)
    [again] = await found(tmp_path, store, pool)
    assert (again.whole, again.manifest.root) == (False, None)


@pytest.mark.parametrize("at", [0, 5, 60])
async def test_a_file_whose_head_is_damaged_is_gone(tmp_path: Path, pool: CopyPool, at: int) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    await shards.settle(KEY)
    flip(place.segment.path, at)
    assert await found(tmp_path, store, pool) == []
    assert files(store) == []


@pytest.mark.parametrize("nbytes", [0, 1, 4096])
async def test_a_file_that_was_cut_is_gone(tmp_path: Path, pool: CopyPool, nbytes: int) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    os.truncate(store.shm_dir / f"{place.segment.name}.part", nbytes)
    assert await found(tmp_path, store, pool) == []
    assert files(store) == []


async def test_a_file_that_the_disk_cannot_read_is_gone(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of `read` and no signal, so the agent comes up without it."""
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    await shards.settle(KEY)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tensorhub_agent.storage.disk_segments.os.preadv", broken)
    assert await found(tmp_path, store, pool) == []


async def test_a_lost_manifest_takes_the_file_with_it(tmp_path: Path, pool: CopyPool) -> None:
    store = disk(tmp_path)
    shards, place = await made(tmp_path, store)
    await filled(shards, place, pool)
    manifest_path(store, place.segment.name).unlink()
    (store.shm_dir / "notes.txt").write_text("not ours")
    assert await found(tmp_path, store, pool) == []
    assert files(store) == ["notes.txt"]


def test_over_the_limit_it_says_what_to_raise(tmp_path: Path) -> None:
    store = disk(tmp_path, 3 * MIB)
    store.create(MIB, store.head_of(LAYOUT))
    with pytest.raises(MemoryExhausted, match="TENSORHUB_CACHE_DISK_BYTES"):
        store.create(2 * MIB, store.head_of(LAYOUT))


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = disk(tmp_path)
    with files_no_longer_than(MIB), pytest.raises(MemoryExhausted, match=r"the disk has \d+ bytes free; make room"):
        store.create(2 * MIB, store.head_of(LAYOUT))
    assert (files(store), store.total_bytes) == ([], 0)


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


def test_an_opened_file_counts_with_its_head(tmp_path: Path) -> None:
    store = disk(tmp_path)
    segment: Segment = store.create(MIB, store.head_of(LAYOUT))
    assert store.total_bytes == segment.file_bytes == MIB + segment.origin
    store.close()
    again = disk(tmp_path)
    opened = again.open(segment.name)
    assert (opened.origin, opened.nbytes, again.total_bytes) == (segment.origin, MIB, segment.file_bytes)
