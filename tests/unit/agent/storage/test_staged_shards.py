"""A staged shard's two segments: which is live stands in one manifest, so a crash leaves one or the other, whole."""

import asyncio
from pathlib import Path

import pytest

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import SaveManifest
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.adoption import AdoptedShard, adopt
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout.layout import TensorEntry, layout_digest, layout_of

KEY = ShardKey("policy", "rollout", 0)
LAYOUT = layout_of([TensorEntry("w", "uint8", 1, (5000,), (5000,), (0,))])


def store(tmp_path: Path, bytes_max: int = 1 << 20) -> SegmentStore:
    return SegmentStore(tmp_path, "tensorhub-hub-a-", bytes_max)


async def made(tmp_path: Path, *, staged: bool = True) -> tuple[JobShardStore, StoredShard]:
    shards = JobShardStore("run-7", store(tmp_path))
    digest = layout_digest(LAYOUT)
    return shards, await shards.make(
        KEY, 1, LAYOUT, digest, spot=False, incarnation=1, install="staged" if staged else "in-place"
    )


async def stand(shards: JobShardStore, place: StoredShard, version: int, *, swap: bool) -> None:
    """Let a version's bytes stand in the live or the spare segment, and say so."""
    segment = place.target if swap else place.segment
    segment.view[:5000] = bytes([version]) * 5000
    digests = await pool_digest(segment.view, place)
    shards.save(
        SaveManifest(
            key=KEY,
            state="ready",
            partial=False,
            version=version,
            root=root_digest(digests),
            digests=digests,
            swap=swap,
        )
    )


async def pool_digest(view: memoryview, place: StoredShard) -> bytes:
    pool = CopyPool(1)
    try:
        return await pool.digest(view, Spans.of(place.table)).result()
    finally:
        await asyncio.to_thread(pool.close)


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.iterdir())


async def adopted(tmp_path: Path) -> list[AdoptedShard]:
    pool = CopyPool(1)
    try:
        return (await adopt(store(tmp_path), pool))[0]
    finally:
        await asyncio.to_thread(pool.close)


@pytest.mark.parametrize("swaps", range(4))
async def test_the_next_run_takes_back_the_segment_that_is_live(tmp_path: Path, swaps: int) -> None:
    shards, place = await made(tmp_path)
    await stand(shards, place, 1, swap=False)
    for number in range(swaps):
        await stand(shards, place, number + 2, swap=True)
    # Killed while the next version was being filled beside it.
    place.target.view[:2500] = bytes([99]) * 2500
    (found,) = await adopted(tmp_path)
    assert found.whole
    assert found.manifest.version == swaps + 1
    assert bytes(found.segment.view[:5000]) == bytes([swaps + 1]) * 5000
    assert found.spare is not None
    assert found.spare.name == place.target.name
    again = JobShardStore("run-7", store(tmp_path))
    assert again.adopt(found, store(tmp_path)).inode == place.inode


async def test_a_swap_that_the_manifest_does_not_say_did_not_happen(tmp_path: Path) -> None:
    shards, place = await made(tmp_path)
    await stand(shards, place, 1, swap=False)
    place.target.view[:5000] = bytes([2]) * 5000
    (found,) = await adopted(tmp_path)
    assert (found.whole, found.manifest.version, found.segment.name) == (True, 1, place.segment.name)


async def test_a_shard_goes_with_both_segments(tmp_path: Path) -> None:
    shards, place = await made(tmp_path)
    await stand(shards, place, 2, swap=True)
    shards.free(KEY)
    assert left(tmp_path) == []


async def test_twice_the_memory_is_asked_for_at_once_and_nothing_is_left_without_it(tmp_path: Path) -> None:
    shards = JobShardStore("run-7", store(tmp_path, bytes_max=12_000))
    with pytest.raises(MemoryExhausted):
        await shards.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, install="staged")
    assert left(tmp_path) == []
    await shards.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1)


async def test_without_its_spare_segment_a_shard_is_given_up(tmp_path: Path) -> None:
    shards, place = await made(tmp_path)
    await stand(shards, place, 1, swap=False)
    place.target.path.unlink()
    assert await adopted(tmp_path) == []
    assert left(tmp_path) == []
