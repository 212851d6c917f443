"""Mappings of others' segments: shared, bounded, and closed once nobody reads them."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tensorhub_agent.storage.mapping_cache import Mapping, MappingCache
from tensorhub_agent.storage.segments import ForeignSegment, Segment, SegmentStore, segment_prefix

GIVE_UP_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    store = SegmentStore(tmp_path, segment_prefix("hub1", "node-0"), 1 << 30)
    yield store
    store.close()


@pytest.fixture
async def cache() -> AsyncIterator[MappingCache]:
    cache = MappingCache(2)
    yield cache
    cache.close()
    await asyncio.get_running_loop().shutdown_default_executor()


def open_files(store: SegmentStore) -> int:
    """Return how many descriptors of this store's files there are; what else a test's process holds may come and go."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += str(descriptor.readlink()).startswith(str(store.shm_dir))
    return count


async def until_open_files(store: SegmentStore, expected: int) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while open_files(store) != expected:  # noqa: ASYNC110 (there is nothing to be told by)
            await asyncio.sleep(0.001)


async def test_the_second_user_gets_the_same_mapping(store: SegmentStore, cache: MappingCache) -> None:
    segment = store.create(1)
    first = cache.acquire(segment.name, segment.open_readonly(), segment.nbytes)
    before = open_files(store)
    assert cache.acquire(segment.name, segment.open_readonly(), segment.nbytes) is first
    assert open_files(store) == before
    segment.view[3] = 9
    assert first.view[3] == 9
    assert first.view.readonly
    cache.release(first)
    cache.release(first)
    assert cache.acquire(segment.name, segment.open_readonly(), segment.nbytes) is first
    cache.release(first)
    anew = store.create(1)
    anew.view[0] = 1
    other = cache.acquire(segment.name, anew.open_readonly(), anew.nbytes)
    assert (first.view[0], other.view[0]) == (0, 1), "one that was made anew under the name is another one"


async def test_the_least_recently_used_go_and_never_one_in_use(store: SegmentStore, cache: MappingCache) -> None:
    created = [store.create(1) for _ in range(5)]
    before = open_files(store)

    def acquire(segment: Segment) -> None:
        held[segment.name] = cache.acquire(segment.name, segment.open_readonly(), segment.nbytes)

    held: dict[str, Mapping] = {}
    for segment in created:
        acquire(segment)
    assert len(cache) == 5, "mappings in use count beside the bound"
    for segment in created[:4]:
        cache.release(held[segment.name])
    assert len(cache) == 3
    assert held[created[4].name].view[0] == 0
    kept = held[created[3].name]
    acquire(created[3])
    assert held[created[3].name] is kept
    gone = held[created[0].name]
    acquire(created[0])
    assert held[created[0].name] is not gone
    for segment in created:
        store.remove(segment)
    for number in (0, 3, 4):
        cache.release(held[created[number].name])
    assert len(cache) == 0
    await until_open_files(store, before - 5)


async def test_a_removed_segment_is_not_kept_alive(store: SegmentStore, cache: MappingCache) -> None:
    segment = store.create(1)
    before = open_files(store)
    mapping = cache.acquire(segment.name, segment.open_readonly(), segment.nbytes)
    cache.release(mapping)
    cache.sweep()
    assert len(cache) == 1
    again = cache.acquire(segment.name, segment.open_readonly(), segment.nbytes)
    store.remove(segment)
    cache.sweep()
    assert len(cache) == 1, "somebody reads it"
    assert again.view[0] == 0
    cache.release(again)
    assert len(cache) == 0
    await until_open_files(store, before - 1)


async def test_what_is_no_segment_is_refused_and_its_descriptor_closed(
    store: SegmentStore, cache: MappingCache, tmp_path: Path
) -> None:
    segment = store.create(1)
    empty = tmp_path / "empty"
    empty.touch()
    before = open_files(store)
    with pytest.raises(ForeignSegment, match="its agent says 8192"):
        cache.acquire(segment.name, segment.open_readonly(), 2 * segment.nbytes)
    with pytest.raises(ForeignSegment, match="its agent says 0"):
        cache.acquire("empty", os.open(empty, os.O_RDONLY), 0)
    with pytest.raises(ForeignSegment, match="no file"):
        cache.acquire("null", os.open(os.devnull, os.O_RDONLY), 1)
    assert open_files(store) == before
