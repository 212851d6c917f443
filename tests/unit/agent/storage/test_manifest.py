"""What an agent leaves beside each segment, and what the next run takes back of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.storage import manifest as manifests
from tensorhub_agent.storage.adoption import AdoptedShard, adopt
from tensorhub_agent.storage.manifest import (
    Manifest,
    UnusableManifest,
    load,
    manifest_path,
    pack_layout,
    save,
    unpack_layout,
)
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of, pieces, segment_bytes

PREFIX = segment_prefix("hub1", "node-0")
BYTES_MAX = 1 << 30
LAYOUT = layout_of(
    TensorEntry(name, "float32", 4, shape, shape, (0,) * len(shape))
    for name, shape in {"embed": (300, 40), "norm": (40,), "scale": ()}.items()
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    store = SegmentStore(tmp_path, PREFIX, BYTES_MAX)
    yield store
    store.close()


def manifest_of(segment: Segment, layout: Layout = LAYOUT, **more: Any) -> Manifest:
    facts: dict[str, Any] = {
        "incarnation": 3,
        "job": "run-7",
        "model": "policy",
        "replica": "trainer",
        "shard": 0,
        "shards": 2,
        "spot": False,
        "layout": pack_layout(layout),
        "layout_digest": layout_digest(layout),
        "segment": segment.name,
        "nbytes": segment.nbytes,
        "state": "empty",
        "partial": False,
    }
    return Manifest(**(facts | more))


async def left_ready(store: SegmentStore, pool: CopyPool) -> Manifest:
    """Leave a published segment, as an agent that ends does."""
    segment = store.create(segment_bytes(LAYOUT))
    segment.view[:] = np.random.default_rng(1).bytes(segment.nbytes)
    digests = await pool.digest(segment.view, Spans.of(pieces(LAYOUT))).result()
    manifest = manifest_of(segment, state="ready", version=12, root=root_digest(digests), digests=digests)
    save(store, manifest)
    store.close()
    return manifest


def next_run(store: SegmentStore) -> SegmentStore:
    store.close()
    return SegmentStore(store.shm_dir, PREFIX, BYTES_MAX)


async def taken_back(store: SegmentStore, pool: CopyPool) -> AdoptedShard:
    """Return the one shard that the next run takes back."""
    (adopted,), aside = await adopt(next_run(store), pool)
    assert aside == []
    return adopted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_manifest_comes_back_as_it_was_saved_and_is_replaced(store: SegmentStore) -> None:
    manifest = manifest_of(store.create(1), state="ready", version=1, root="ab", digests=b"\x00\xff" * 8)
    # What a killed process left.
    (store.shm_dir / f"{manifest.segment}.json.tmp").write_bytes(b"half a manif")
    for saved in (manifest, msgspec.structs.replace(manifest, state="filling")):
        save(store, saved)
        assert load(store, manifest.segment) == saved
    assert manifest_path(store, manifest.segment).stat().st_mode & 0o777 == 0o600
    assert names(store.shm_dir) == [manifest.segment, manifest.segment + ".json"]


def test_without_room_the_old_manifest_stays(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(store.create(1))
    save(store, manifest)

    def full(_path: str, _to: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorhub_agent.storage.manifest.os.replace", full)
    with pytest.raises(MemoryExhausted, match="make room in"):
        save(store, msgspec.structs.replace(manifest, state="filling"))
    assert load(store, manifest.segment) == manifest
    assert names(store.shm_dir) == [manifest.segment, manifest.segment + ".json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"manifest_version": 99}, "version 99"),
        ({"segment": "another.seg"}, "speaks of segment another.seg"),
        ({"state": "draining"}, "no manifest"),
        ({"state": 5}, "no manifest"),
    ],
)
def test_a_foreign_manifest_is_told_from_ours(store: SegmentStore, change: dict[str, Any], reason: str) -> None:
    manifest = manifest_of(store.create(1))
    told = msgspec.to_builtins(manifest) | change
    manifest_path(store, manifest.segment).write_bytes(msgspec.json.encode(told))
    found = load(store, manifest.segment)
    assert isinstance(found, UnusableManifest)
    assert reason in found.reason


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_broken_manifest_is_no_exception(store: SegmentStore, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = store.create(1)
    assert isinstance(load(store, segment.name), UnusableManifest)
    manifest_path(store, segment.name).write_bytes(data)
    assert isinstance(load(store, segment.name), UnusableManifest)
    save(store, manifest_of(segment))
    monkeypatch.setattr(manifests, "MANIFEST_BYTES_MAX", 100)
    found = load(store, segment.name)
    assert isinstance(found, UnusableManifest)
    assert "larger than 100 bytes" in found.reason


def test_what_is_no_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpack_layout(pack_layout(LAYOUT)) == LAYOUT
    unsorted = Layout(tuple(reversed(LAYOUT.tensors)))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(msgspec.msgpack.encode(LAYOUT))
    for packed in (b"", b"nonsense", zstandard.compress(b"nonsense"), pack_layout(unsorted), streamed):
        with pytest.raises(LayoutMismatch):
            unpack_layout(packed)
    monkeypatch.setattr(manifests, "LAYOUT_BYTES_MAX", 10)
    with pytest.raises(LayoutMismatch, match="more than 10 bytes"):
        unpack_layout(pack_layout(LAYOUT))


async def test_what_was_ready_and_is_whole_comes_back_ready(store: SegmentStore, pool: CopyPool) -> None:
    manifest = await left_ready(store, pool)
    again = next_run(store)
    (adopted,), _ = await adopt(again, pool)
    assert adopted.whole
    assert (adopted.manifest, adopted.layout) == (manifest, LAYOUT)
    assert again.held(manifest.segment)
    assert again.account.total_bytes == adopted.segment.nbytes
    manifests.remove(again, adopted.manifest, adopted.segment)
    assert names(store.shm_dir) == []


@pytest.mark.parametrize("piece", [0, 1, 2])
async def test_a_changed_byte_makes_it_empty_and_partial(store: SegmentStore, pool: CopyPool, piece: int) -> None:
    manifest = await left_ready(store, pool)
    path = store.shm_dir / manifest.segment
    data = bytearray(path.read_bytes())
    data[pieces(LAYOUT).at[piece]] ^= 1
    path.write_bytes(data)
    adopted = await taken_back(store, pool)
    assert not adopted.whole
    left = adopted.manifest
    assert (left.state, left.partial, left.version, left.root, left.digests) == ("empty", True, None, None, None)
    assert load(store, manifest.segment) == left


@pytest.mark.parametrize(
    "change", [{"root": "0" * 32}, {"digests": b"short"}, {"digests": None}, {"root": None}, {"partial": True}]
)
async def test_what_its_own_manifest_does_not_vouch_for_is_not_whole(
    store: SegmentStore, pool: CopyPool, change: dict[str, Any]
) -> None:
    save(store, msgspec.structs.replace(await left_ready(store, pool), **change))
    adopted = await taken_back(store, pool)
    assert (adopted.whole, adopted.manifest.state, adopted.manifest.partial) == (False, "empty", True)


@pytest.mark.parametrize(
    ("state", "partial", "then"),
    [("empty", False, False), ("empty", True, True), ("filling", False, True), ("filling", True, True)],
)
async def test_what_was_not_ready_comes_back_empty(
    store: SegmentStore, pool: CopyPool, *, state: str, partial: bool, then: bool
) -> None:
    """What a newer release has added is passed over: an agent that was rolled back takes its memory back."""
    manifest = manifest_of(store.create(segment_bytes(LAYOUT)), state=state, partial=partial)
    told = {**msgspec.to_builtins(manifest), "later": 1}
    manifest_path(store, manifest.segment).write_bytes(msgspec.json.encode(told))
    adopted = await taken_back(store, pool)
    assert not adopted.whole
    assert adopted.manifest == msgspec.structs.replace(manifest, state="empty", partial=then)


async def test_a_layout_of_no_bytes_is_whole(store: SegmentStore, pool: CopyPool) -> None:
    segment = store.create(0)
    save(store, manifest_of(segment, layout_of([]), state="ready", version=1, root=root_digest(b""), digests=b""))
    assert (await taken_back(store, pool)).whole


async def test_a_manifest_of_a_higher_version_is_left_to_the_release_that_wrote_it(
    store: SegmentStore, pool: CopyPool, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of(store.create(segment_bytes(LAYOUT)))
    # Nothing else need be in it that this release knows.
    manifest_path(store, manifest.segment).write_bytes(b'{"manifest_version":99,"novelty":1}')
    again = next_run(store)
    assert await adopt(again, pool) == ([], [])
    assert "version 99, and this agent reads 1: run the newer release again" in caplog.text
    assert names(store.shm_dir) == [manifest.segment, manifest.segment + ".json"]


async def test_everything_without_a_good_manifest_is_removed(store: SegmentStore, pool: CopyPool) -> None:
    kept = await left_ready(store, pool)
    lost = [store.create(segment_bytes(LAYOUT)) for _ in range(5)]
    save(store, manifest_of(lost[1], nbytes=1))
    save(store, manifest_of(lost[2], layout_digest="0" * 64))
    save(store, msgspec.structs.replace(manifest_of(lost[3]), layout=b"nonsense"))
    big = layout_of([TensorEntry("big", "uint8", 1, (1 << 20,), (1 << 20,), (0,))])
    save(store, manifest_of(lost[4], big))
    store.close()
    (store.shm_dir / f"{PREFIX}00000000.seg.json").write_bytes(b"{}")
    (store.shm_dir / f"{PREFIX}00000000.seg.json.tmp").write_bytes(b"{}")
    (store.shm_dir / "somebody.else").touch()
    again = next_run(store)
    assert [adopted.manifest for adopted in (await adopt(again, pool))[0]] == [kept]
    assert names(store.shm_dir) == ["somebody.else", kept.segment, kept.segment + ".json"]
    assert again.account.total_bytes == kept.nbytes
    assert await adopt(again, pool) == ([], []), "what is in use was adopted again"
