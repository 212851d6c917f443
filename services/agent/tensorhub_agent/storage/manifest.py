"""The manifest of a shard: the file beside its segment that says what the bytes are.

The manifest of `<segment>` is `<segment>.json`. It is written whole under another name and then renamed, so a reader
finds the old one or the new one. It is no promise about the bytes: an agent may die between two writes, so
`storage/adoption.py` believes only what it has hashed again.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import zstandard

from tensorhub_agent.storage.segments import (
    MANIFEST_SUFFIX,
    SEGMENT_MODE,
    TEMPORARY_SUFFIX,
    Segment,
    SegmentStore,
)
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import Layout, encoded, layout_of
from tensorhub_common.protocol.decoding import MALFORMED

MANIFEST_VERSION: Final = 1
"""Raised when the meaning of a field changes. A segment whose manifest has a higher version is set aside: the release
that wrote it takes it back. One of a lower version is given up, and filled anew."""

MANIFEST_BYTES_MAX: Final = 256 * 1024 * 1024
LAYOUT_BYTES_MAX: Final = 1024 * 1024 * 1024
"""An uncompressed layout has at most this many bytes: a million tensors with long names."""

SegmentState = Literal["empty", "filling", "ready"]


class _Outline(msgspec.Struct, frozen=True):
    """What a manifest of every version has."""

    manifest_version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored in a segment. A field that this release does not know is ignored."""

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
    """All of the above is about the bytes in the spare segment, and `segment` is the spare one."""


@dataclass(frozen=True, slots=True)
class UnusableManifest:
    """No manifest of ours, and why."""

    reason: str
    passes: bool = False
    """It could not be read now, and may be one of ours."""


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
    """Return the path of the manifest of a segment."""
    return store.shm_dir / f"{segment}{MANIFEST_SUFFIX}"


def save(store: SegmentStore, manifest: Manifest) -> None:
    """Write the manifest of a segment. Raises `MemoryExhausted` when there is no room; the old one is kept then."""
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
    """Write a new file of this process; one that a killed process left is removed first."""
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
