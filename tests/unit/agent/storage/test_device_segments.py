"""Segments on a GPU: accounted, cleared, and there for as long as anybody has them."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.device_segments import DeviceSegment, DeviceSegmentStore, DeviceStores, HandedBackSegment
from tensorhub_agent.storage.mapped_descriptors import close_all
from tensorhub_agent.storage.mapping_cache import MappingCache
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_agent.storage.shard_store import ShardStores, StoredShard
from tensorhub_common.devices.device import DeviceError, DeviceUnavailable
from tensorhub_common.devices.fake import FakeDevice
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout.layout import TensorEntry, layout_of
from tensorhub_common.runtime import segment_locks

GRANULE = FakeDevice.granule_bytes


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(bytes_max=10 * GRANULE)


@pytest.fixture
def store(device: FakeDevice) -> DeviceSegmentStore:
    return DeviceSegmentStore(device, "tensorhub-h-a-", 4 * GRANULE)


def test_a_segment_is_whole_granules_of_zeros(store: DeviceSegmentStore) -> None:
    segment = store.create(GRANULE + 1)
    assert segment.nbytes == len(segment.view) == store.account.total_bytes == 2 * GRANULE
    assert ctypes.string_at(segment.view.address, segment.nbytes) == bytes(2 * GRANULE)
    assert segment.name.startswith("tensorhub-h-a-")
    assert store.create(0).nbytes == GRANULE


def test_the_limit_is_checked_before_the_device_is_asked(store: DeviceSegmentStore, device: FakeDevice) -> None:
    kept = store.create(3 * GRANULE)
    with pytest.raises(MemoryExhausted, match=r"take 6291456 of at most 8388608 bytes of GPU-fake-0; raise"):
        store.create(2 * GRANULE)
    assert store.account.total_bytes == 3 * GRANULE
    job = kept.view[:10]
    store.remove(kept)
    store.remove(kept)
    assert store.account.total_bytes == 0
    # What a job works on stays mapped until the job has ended.
    del kept
    assert ctypes.string_at(job.address, len(job)) == bytes(10)
    assert device.free_bytes() == 7 * GRANULE
    del job
    assert device.free_bytes() == 10 * GRANULE
    store.create(4 * GRANULE)


def test_what_the_device_refuses_leaves_nothing_on_the_account(device: FakeDevice) -> None:
    store = DeviceSegmentStore(device, "tensorhub-h-a-", 100 * GRANULE)
    with pytest.raises(MemoryExhausted, match="free"):
        store.create(11 * GRANULE)
    assert store.account.total_bytes == 0
    assert device.free_bytes() == 10 * GRANULE


def test_a_limit_of_zero_is_a_share_of_the_device(device: FakeDevice) -> None:
    assert DeviceSegmentStore(device, "p-", 0).account.bytes_max == 9 * GRANULE


def test_what_was_removed_stays_with_who_has_a_descriptor(store: DeviceSegmentStore) -> None:
    segment = store.create(GRANULE)
    ctypes.memset(segment.view.address, 7, GRANULE)
    fd = segment.open_readonly()
    store.remove(segment)
    other = FakeDevice()
    imported = other.import_memory(fd, GRANULE, readonly=True)
    os.close(fd)
    assert ctypes.string_at(imported.address, GRANULE) == b"\x07" * GRANULE


def test_who_is_lent_a_segment_holds_a_lock_that_outlives_its_descriptor_of_the_memory(
    store: DeviceSegmentStore,
) -> None:
    """And sees that the segment is asked back, until it is lent anew."""
    segment = store.create(GRANULE)
    assert not segment.is_lent()
    first, second = segment.open_lent(), segment.open_lent()
    reader = os.open(f"/proc/self/fd/{first[1]}", os.O_RDONLY)
    close_all(second)
    os.close(first[0])
    for is_wanted in (True, False, True):
        segment.ask_back(is_wanted=is_wanted)
        assert (segment.is_lent(), segment_locks.is_asked_back(reader)) == (True, is_wanted)
    close_all(segment.open_lent())
    assert not segment_locks.is_asked_back(reader), "what is published anew is not waited for"
    os.close(first[1])
    assert not segment.is_lent()
    os.close(reader)


def kept(segment: DeviceSegment, *, is_live: bool = True) -> HandedBackSegment:
    """Return what a worker has of a segment that it keeps."""
    return HandedBackSegment(segment.told, is_live, segment.open_writable(keeps=True))


def test_memory_that_a_worker_kept_is_taken_back_with_its_bytes_its_name_and_its_locks(
    store: DeviceSegmentStore, device: FakeDevice
) -> None:
    """What the process before has asked back is not asked back any more: that ended with it."""
    segment = store.create(GRANULE)
    ctypes.memset(segment.view.address, 7, GRANULE)
    handed, reader = kept(segment), segment.open_lent()
    told = segment.told
    segment.ask_back(is_wanted=True)
    store.close()
    del segment
    store = DeviceSegmentStore(device, "tensorhub-h-a-", 4 * GRANULE)
    back = store.take_back(handed, GRANULE)
    assert (back.told, back.nbytes, store.account.total_bytes) == (told, GRANULE, GRANULE)
    assert ctypes.string_at(back.view.address, GRANULE) == b"\x07" * GRANULE
    assert back.is_lent()
    assert not segment_locks.is_asked_back(reader[1])
    back.ask_back(is_wanted=True)
    assert segment_locks.is_asked_back(reader[1])
    store.remove(back)
    assert not segment_locks.is_asked_back(reader[1])
    back = store.take_back(handed, GRANULE)
    handed.close()
    assert back.is_lent()
    close_all(reader)
    assert not back.is_lent()
    store.remove(back)
    del back
    assert (store.account.total_bytes, device.free_bytes()) == (0, 10 * GRANULE)


def test_without_a_file_for_locks_the_memory_gets_one(store: DeviceSegmentStore) -> None:
    """An agent of an earlier release gave its worker none."""
    segment = store.create(GRANULE)
    handed = HandedBackSegment(segment.told, is_live=True, fds=segment.open_writable())
    back = store.take_back(handed, GRANULE)
    handed.close()
    lent = back.open_lent()
    assert back.is_lent()
    close_all(lent)


def test_what_can_not_be_taken_back_leaves_nothing(store: DeviceSegmentStore, tmp_path: Path) -> None:
    segment = store.create(GRANULE)
    handed, files = kept(segment), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a folder of the kernel's)
    with pytest.raises(DeviceError):
        store.take_back(handed, 2 * GRANULE)
    with pytest.raises(MemoryExhausted):
        store.take_back(handed, 4 * GRANULE)
    assert store.account.total_bytes == GRANULE
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208 (a folder of the kernel's)
    handed.close()


@pytest.mark.parametrize("lacks_spare", [False, True])
async def test_a_staged_shard_takes_back_both_its_segments_or_none(tmp_path: Path, *, lacks_spare: bool) -> None:
    layout = layout_of([TensorEntry("w", "float32", 4, (8,), (8,), (0,))])
    key = ShardKey("policy", "engine", 0)

    async def made(hands: Sequence[HandedBackSegment] = ()) -> StoredShard:
        stores = ShardStores(SegmentStore(tmp_path, "test-", 1 << 30), devices=DeviceStores("p-", 1 << 30))
        job = stores.of("run-7")
        return await job.make(
            key, 1, layout, "d", spot=False, incarnation=1, install="staged", device="GPU-fake-0", handed_back=hands
        )

    before = await made()
    assert isinstance(before.segment, DeviceSegment)
    assert isinstance(before.spare, DeviceSegment)
    hands = [kept(before.segment, is_live=False), kept(before.spare)][lacks_spare:]
    after = await made(hands)
    assert after.spare is not None
    numbers = (after.segment.told, after.spare.told)
    if lacks_spare:
        assert before.spare.told not in numbers
    else:
        assert numbers == (before.spare.told, before.segment.told)
    for each in hands:
        each.close()


async def test_the_agent_of_a_mapped_shard_needs_to_see_nothing_of_the_gpu(tmp_path: Path) -> None:
    stores = ShardStores(SegmentStore(tmp_path, "test-", 1 << 30), devices=DeviceStores("p-", 0))
    layout = layout_of([TensorEntry("w", "float32", 4, (8,), (8,), (0,))])
    key, device = ShardKey("policy", "engine", 0), "GPU-of-no-agent"
    job = stores.of("run-7")
    made = await job.make(key, 1, layout, "d", spot=False, incarnation=1, install="mapped", device=device)
    assert (made.segment.device, made.segment.nbytes) == ("", mmap.PAGESIZE)
    with pytest.raises(DeviceUnavailable):
        await job.make(key, 1, layout, "d", spot=False, incarnation=1, install="staged", device=device)


def test_segments_have_numbers_of_their_own(store: DeviceSegmentStore) -> None:
    first, second = store.create(1), store.create(1)
    assert first.told != second.told
    assert 0 not in (first.told, second.told)


def test_stores_are_made_by_the_name_of_a_gpu() -> None:
    stores = DeviceStores("p-", 0)
    assert stores.of("GPU-fake-1") is stores.of("GPU-fake-1")
    with pytest.raises(DeviceUnavailable, match="GPU-fake-0"):
        stores.of("GPU-fake-")


async def test_a_mapping_is_shared_while_in_use_and_gone_when_unused(store: DeviceSegmentStore) -> None:
    segment = store.create(GRANULE)
    ctypes.memset(segment.view.address, 7, GRANULE)
    cache = MappingCache()
    first = cache.acquire_any(segment.name, segment.open_readonly(), GRANULE, 0, "GPU-fake-2")
    second = cache.acquire_any(segment.name, segment.open_readonly(), GRANULE, 0, "GPU-fake-2")
    assert first is second
    assert first.view.readonly
    cache.release(first)
    assert len(cache) == 1
    cache.release(second)
    assert len(cache) == 0
