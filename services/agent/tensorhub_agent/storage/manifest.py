"""Manifests: what an agent that restarts must know to take its segments back.

Beside each segment stands `<segment>.json`. It is written whole under another name and then renamed, so a reader finds
the old one or the new one. It is no promise about the bytes: an agent may die between two writes, so adoption believes
only what it has hashed again.

Always true of what `adopt` returns:
- `whole` shards hold exactly the bytes of their manifest's root; every other comes back as empty, and as partial if
  something was written into it.
- A segment without a manifest that fits it is gone, and so is everything else with a name of this agent's segments.
- What has a manifest and can't be taken back now, because there are too many, or no memory or descriptor for it, is set
  aside: it is left where it stands, so that a later run can take it back.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import zstandard

from tensorhub_agent.compute.pool import CopyPool, Spans
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.storage.segments import (
    MANIFEST_SUFFIX,
    SEGMENT_MODE,
    TEMPORARY_SUFFIX,
    ForeignSegment,
    Segment,
    SegmentBusy,
    SegmentStore,
)
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import Layout, encoded, layout_digest, layout_of, pieces, segment_bytes
from tensorhub_common.protocol.decoding import MALFORMED

MANIFEST_VERSION: Final = 1
"""Raised when what stands in a field means something else than before. A segment whose manifest has a higher version is
set aside: the release that wrote it takes it back. One of a lower version is given up, and filled anew."""

MANIFEST_BYTES_MAX: Final = 256 * 1024 * 1024
LAYOUT_BYTES_MAX: Final = 1024 * 1024 * 1024
"""A layout takes at most so many bytes when it is uncompressed: a million tensors with long names."""

_log: Final = logging.getLogger(__name__)

SegmentState = Literal["empty", "filling", "ready"]


class _Outline(msgspec.Struct, frozen=True):
    """What a manifest of every version has."""

    manifest_version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a segment. A field that this release does not know is passed over."""

    manifest_version: int = MANIFEST_VERSION
    incarnation: int
    """Of the agent that wrote this."""
    job: str
    model: str
    replica: str
    shard: int
    shards: int
    spot: bool
    layout: bytes
    """As `pack_layout` makes it."""
    layout_digest: str
    segment: str
    nbytes: int
    state: SegmentState
    partial: bool
    """Some of it was overwritten since it was last whole, so it can't be published as it is."""
    version: int | None = None
    root: str | None = None
    digests: bytes | None = None
    """Of all pieces, one after another."""
    spare: str | None = None
    """A staged shard's other segment, of the same size. It has no manifest of its own."""
    swapped: bool = False
    """All of the above is said of what stands in the spare segment, and `segment` is the spare one."""


@dataclass(frozen=True, slots=True)
class UnusableManifest:
    """No manifest of ours, and why."""

    reason: str
    passes: bool = False
    """It could not be read now, and may be one of ours."""


@dataclass(frozen=True, slots=True)
class AdoptedShard:
    """A segment that was taken back."""

    manifest: Manifest
    segment: Segment
    """In which the shard stands."""
    layout: Layout
    whole: bool
    spare: Segment | None = None


@dataclass(frozen=True, slots=True)
class SetAsideShard:
    """A shard whose segments were left where they stand, and why they were not taken back."""

    manifest: Manifest
    reason: str


class AdoptionPolicy:
    """How many shards that were left may be taken back: all, unless a kind of this says otherwise."""

    def refusal(self, manifest: Manifest) -> str | None:  # noqa: ARG002 (for kinds of this)
        """Say why this one may not be taken back now, or None."""
        return None

    def take(self, manifest: Manifest) -> None:
        """Note that it was taken back."""


def pack_layout(layout: Layout) -> bytes:
    """Return the layout as zstd-compressed MessagePack."""
    return zstandard.ZstdCompressor().compress(encoded(layout))


def unpack_layout(packed: bytes) -> Layout:
    """Turn `pack_layout` back. Raises `LayoutMismatch` when it is none, or one that is not well formed."""
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= LAYOUT_BYTES_MAX:
            raise LayoutMismatch(f"a layout takes more than {LAYOUT_BYTES_MAX} bytes; use more shards")
        layout = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packed), type=Layout)
    except (zstandard.ZstdError, *MALFORMED) as why:
        raise LayoutMismatch(f"the layout can't be read ({why}); send it as zstd-compressed MessagePack") from why
    checked = layout_of(layout.tensors)
    if checked != layout:
        raise LayoutMismatch("the layout's tensors are not sorted by name; build it with layout_of")
    return layout


def manifest_path(store: SegmentStore, segment: str) -> Path:
    """Return where the manifest of a segment stands."""
    return store.shm_dir / f"{segment}{MANIFEST_SUFFIX}"


def save(store: SegmentStore, manifest: Manifest) -> None:
    """Write the manifest of a segment. Raises `MemoryExhausted` when there is no room; the old one stays then."""
    # Plain strings and calls: an agent does this at every change of a shard, in its event loop.
    path = f"{store.shm_dir}/{manifest.segment}{MANIFEST_SUFFIX}"
    temporary = path + TEMPORARY_SUFFIX
    try:
        _write_new(temporary, msgspec.json.encode(manifest))
        os.replace(temporary, path)  # noqa: PTH105 (see above)
    except OSError as why:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise MemoryExhausted(
            f"the manifest of {manifest.segment} can't be written ({why.strerror}): make room in {store.shm_dir}"
        ) from why


def _write_new(path: str, data: bytes) -> None:
    """Write a file that nobody else can have made; one that a killed process left is taken away first."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, SEGMENT_MODE)
    except FileExistsError:
        os.unlink(path)  # noqa: PTH108
        fd = os.open(path, flags, SEGMENT_MODE)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def load(store: SegmentStore, segment: str) -> Manifest | UnusableManifest:
    """Read the manifest of a segment."""
    path = manifest_path(store, segment)
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            return UnusableManifest(f"it is larger than {MANIFEST_BYTES_MAX} bytes")
        version = msgspec.json.decode(data, type=_Outline).manifest_version
        if version > MANIFEST_VERSION:
            return UnusableManifest(
                f"it has version {version}, and this agent reads {MANIFEST_VERSION}: run the newer release again",
                passes=True,
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as why:
        return UnusableManifest(f"it can't be read: {why.strerror}", passes=not isinstance(why, FileNotFoundError))
    except MALFORMED as why:
        return UnusableManifest(f"it is no manifest: {why}"[:500])
    if manifest.manifest_version != MANIFEST_VERSION:
        return UnusableManifest(f"it has version {manifest.manifest_version}, and this agent reads {MANIFEST_VERSION}")
    if manifest.segment != segment:
        return UnusableManifest(f"it speaks of segment {manifest.segment}")
    return manifest


def remove(store: SegmentStore, manifest: Manifest, *segments: Segment) -> None:
    """Remove a shard's segments; the manifest first, since a segment without one is removed by the next run."""
    manifest_path(store, manifest.segment).unlink(missing_ok=True)
    for segment in segments:
        store.remove(segment)


async def adopt(
    store: SegmentStore, pool: CopyPool, room: AdoptionPolicy | None = None
) -> tuple[list[AdoptedShard], list[SetAsideShard]]:
    """Take back the segments that an earlier run left, and remove everything else that has a name of this agent's.

    What was ready is hashed again, about 0.03 s a GiB; bytes that are not those of the root are empty and partial.
    What has no room is set aside. Shards that hold a version are taken first, and among equals those whose manifests
    are older.
    """
    room = room or AdoptionPolicy()
    adopted: list[AdoptedShard] = []
    aside: list[SetAsideShard] = []
    unread = False
    for name in _worth_most_first(store):
        # Spare segments have no manifest: the shards that they belong to have taken them by then.
        if store.held(name):
            continue
        found = await _adopt(store, name, pool, room)
        if isinstance(found, UnusableManifest) and found.passes:
            unread = True
            store.set_aside(name)
            _log.error("segment %s is set aside, for its manifest can't be had: %s", name, found.reason)
        elif isinstance(found, UnusableManifest) and unread and not manifest_path(store, name).exists():
            # It may be the spare segment of a shard whose manifest could not be read.
            store.set_aside(name)
        elif isinstance(found, UnusableManifest):
            _log.warning("segment %s is removed, for its manifest does not serve: %s", name, found.reason)
        elif isinstance(found, SetAsideShard):
            aside.append(found)
            _set_aside(store, found)
        else:
            adopted.append(found)
            room.take(found.manifest)
    for name in store.stray():
        store.remove_stray(name)
    return adopted, aside


def _worth_most_first(store: SegmentStore) -> list[str]:
    """Return the names of what was left: what holds a version, then what was written into, then what is empty."""
    ranks: dict[str, tuple[int, int, str]] = {}
    for name in store.left():
        manifest, saved_at = load(store, name), 0
        with contextlib.suppress(OSError):
            saved_at = manifest_path(store, name).stat().st_mtime_ns
        if isinstance(manifest, UnusableManifest):
            # Behind a manifest that could not be read comes what has none, and may be its spare segment.
            rank = 3 if manifest.passes else 4
        elif manifest.state == "ready" and not manifest.partial:
            rank = 0
        else:
            rank = 1 if manifest.partial or manifest.state != "empty" else 2
        ranks[name] = (rank, saved_at, name)
    return sorted(ranks, key=ranks.__getitem__)


def _set_aside(store: SegmentStore, aside: SetAsideShard) -> None:
    manifest = aside.manifest
    for segment in (manifest.segment, manifest.spare):
        if segment is not None:
            store.set_aside(segment)
    _log.error(
        "shard %d of %s/%s of job %s is set aside: its memory stays in %s, and is taken back when the agent starts "
        "again and can: %s",
        manifest.shard,
        manifest.model,
        manifest.replica,
        manifest.job,
        manifest_path(store, manifest.segment).with_suffix(""),
        aside.reason,
    )


def remove_aside(store: SegmentStore, aside: SetAsideShard) -> None:
    """Remove what was set aside."""
    manifest = aside.manifest
    manifest_path(store, manifest.segment).unlink(missing_ok=True)
    for segment in (manifest.segment, manifest.spare):
        if segment is not None:
            store.remove_aside(segment)


async def _adopt(
    store: SegmentStore, name: str, pool: CopyPool, room: AdoptionPolicy
) -> AdoptedShard | SetAsideShard | UnusableManifest:
    """Take back the segment in which a shard stands, with its spare one if it has one."""
    manifest = load(store, name)
    if isinstance(manifest, UnusableManifest):
        return manifest
    refusal = room.refusal(manifest)
    if refusal is not None:
        return SetAsideShard(manifest, refusal)
    opened: list[Segment] = []
    try:
        layout = _open(store, manifest, opened)
        live, spare = opened[0], opened[1] if len(opened) > 1 else None
        if manifest.swapped and spare is not None:
            live, spare = spare, live
        whole = await _is_whole(manifest, live, layout, pool)
    except (LayoutMismatch, ForeignSegment) as why:
        for segment in opened:
            store.remove(segment)
        return UnusableManifest(str(why))
    except Exception as why:  # noqa: BLE001 (one shard must not keep the agent from its others)
        # Whatever it is, it is this shard's alone, and says nothing of what stands in its memory.
        if not isinstance(why, MemoryExhausted | SegmentBusy):
            _log.exception("segment %s can't be taken back", name)
        for segment in opened:
            store.let_go(segment)
        return SetAsideShard(manifest, str(why) or type(why).__name__)
    if not whole:
        touched = manifest.partial or manifest.state != "empty"
        manifest = msgspec.structs.replace(
            manifest, state="empty", partial=touched, version=None, root=None, digests=None
        )
        with contextlib.suppress(MemoryExhausted):
            # Without room the old one stays, and the next run comes to the same end by hashing once more.
            save(store, manifest)
    return AdoptedShard(manifest, live, layout, whole, spare)


def _open(store: SegmentStore, manifest: Manifest, opened: list[Segment]) -> Layout:
    """Open a shard's segments, into `opened`, if they and its manifest fit together; return its layout."""
    layout = unpack_layout(manifest.layout)
    if layout_digest(layout) != manifest.layout_digest:
        raise ForeignSegment("its layout has another digest than it says")
    for each in (manifest.segment, manifest.spare):
        if each is not None:
            opened.append(store.open(each))
            _check_size(opened[-1], manifest, layout)
            store.check_head(opened[-1], layout)
    return layout


def _check_size(segment: Segment, manifest: Manifest, layout: Layout) -> None:
    if not segment.nbytes == manifest.nbytes >= segment_bytes(layout):
        raise ForeignSegment(f"the segment has {segment.nbytes} bytes, and it says {manifest.nbytes}")


async def _is_whole(manifest: Manifest, segment: Segment, layout: Layout, pool: CopyPool) -> bool:
    if manifest.state != "ready" or manifest.partial or manifest.root is None or manifest.digests is None:
        return False
    if root_digest(manifest.digests) != manifest.root:
        return False
    return await pool.digest(segment.view, Spans.of(pieces(layout))).result() == manifest.digests
