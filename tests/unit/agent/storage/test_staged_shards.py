"""A staged shard's two segments: which is live stands in one manifest, so a crash leaves one or the other, whole."""

from pathlib import Path
from typing import Any

import pytest

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import SaveManifest
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.memory_region import host
from tensorhub_agent.storage.adoption import AdoptedShard, adopt
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout.layout import TensorEntry, layout_digest, layout_of

KEY = ShardKey("policy", "rollout", 0)
LAYOUT = layout_of([TensorEntry("w", "uint8", 1, (5000,), (5000,), (0,))])


def store(tmp_path: Path, bytes_max: int = 1 << 20) -> SegmentStore:
    return SegmentStore(tmp_path, "tensorhub-hub-a-", bytes_max)


class Staged:
    """A staged shard, and the bytes and manifests of its two segments."""

    def __init__(self, folder: Path, pool: CopyPool, place: StoredShard, shards: JobShardStore) -> None:
        self.folder, self.pool, self.place, self.shards = folder, pool, place, shards

    async def stand(self, version: int, *, swap: bool) -> None:
        """Let a version's bytes stand in the live or the spare segment, and say so."""
        view = host((self.place.target if swap else self.place.segment).view)
        view[:5000] = bytes([version]) * 5000
        digests = await self.pool.digest(view, Spans.of(self.place.table)).result()
        facts: dict[str, Any] = {"version": version, "root": root_digest(digests), "digests": digests, "swap": swap}
        self.shards.save(SaveManifest(key=KEY, state="ready", partial=False, **facts))

    async def taken_back(self) -> list[AdoptedShard]:
        return (await adopt(store(self.folder), self.pool))[0]


@pytest.fixture
async def staged(tmp_path: Path, pool: CopyPool) -> Staged:
    shards, digest = JobShardStore("run-7", store(tmp_path)), layout_digest(LAYOUT)
    place = await shards.make(KEY, 1, LAYOUT, digest, spot=False, incarnation=1, install="staged")
    return Staged(tmp_path, pool, place, shards)


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.iterdir())


@pytest.mark.parametrize("swaps", range(4))
async def test_the_next_run_takes_back_the_segment_that_is_live(staged: Staged, swaps: int) -> None:
    """A swap that the manifest does not say did not happen, however much of the next version stands beside it."""
    await staged.stand(1, swap=False)
    for number in range(swaps):
        await staged.stand(number + 2, swap=True)
    place = staged.place
    host(place.target.view)[: 2500 * (1 + swaps % 2)] = bytes([99]) * 2500 * (1 + swaps % 2)
    (found,) = await staged.taken_back()
    assert (found.whole, found.manifest.version, found.segment.name) == (True, swaps + 1, place.segment.name)
    assert bytes(found.segment.view[:5000]) == bytes([swaps + 1]) * 5000
    assert found.spare is not None
    assert found.spare.name == place.target.name
    again = JobShardStore("run-7", store(staged.folder))
    assert again.adopt(found, store(staged.folder)).inode == place.inode


@pytest.mark.parametrize("how", ["freed", "its spare segment is gone"])
async def test_a_shard_goes_with_both_segments(staged: Staged, how: str) -> None:
    await staged.stand(2, swap=True)
    if how == "freed":
        staged.shards.free(KEY)
    else:
        target = staged.place.target
        assert isinstance(target, Segment)
        target.path.unlink()
        assert await staged.taken_back() == []
    assert left(staged.folder) == []


async def test_twice_the_memory_is_asked_for_at_once_and_nothing_is_left_without_it(tmp_path: Path) -> None:
    shards = JobShardStore("run-7", store(tmp_path, bytes_max=12_000))
    with pytest.raises(MemoryExhausted):
        await shards.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, install="staged")
    assert left(tmp_path) == []
    await shards.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1)
