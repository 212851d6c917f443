"""What an agent that starts believes of the memory that an earlier run left.

Invariants of what `adopt` returns:
- `whole` shards hold exactly the bytes of their manifest's root. Every other shard comes back as empty, and as partial
  if something was written into it.
- A segment without a manifest that fits it is removed, and so is every other file named as this agent's segments are.
- A shard with a manifest that can't be taken back now, because there are too many, or no memory or descriptor for it,
  is set aside: its files are left where they are, so that a later run can take it back.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.command_sequencer import SHARDS_MAX
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.manifest import Manifest, UnusableManifest, load, manifest_path, save, unpack_layout
from tensorhub_agent.storage.segments import ForeignSegment, Segment, SegmentBusy, SegmentStore
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import Layout, layout_digest, pieces, segment_bytes

_log: Final = logging.getLogger(__name__)


def key_of(manifest: Manifest) -> ShardKey:
    """Return the shard that a manifest is about."""
    return ShardKey(manifest.model, manifest.replica, manifest.shard)


@dataclass(frozen=True, slots=True)
class AdoptedShard:
    """A segment that was taken back."""

    manifest: Manifest
    segment: Segment
    """The live one."""
    layout: Layout
    whole: bool
    spare: Segment | None = None


@dataclass(frozen=True, slots=True)
class SetAsideShard:
    """A shard whose segments were left where they are, and why they were not taken back."""

    manifest: Manifest
    reason: str


class AdoptionPolicy:
    """How many shards that were left may be taken back: all, unless a kind of this says otherwise."""

    def refusal(self, manifest: Manifest) -> str | None:  # noqa: ARG002 (for kinds of this)
        """Say why this one may not be taken back now, or None."""
        return None

    def take(self, manifest: Manifest) -> None:
        """Note that it was taken back."""


class LimitedAdoption(AdoptionPolicy):
    """As many jobs, and as many shards of each, as an agent serves; and one memory of each shard."""

    def __init__(self, jobs_max: int) -> None:
        """Begin with no shard taken back."""
        self._jobs_max = jobs_max
        self._taken: dict[str, set[ShardKey]] = {}

    def refusal(self, manifest: Manifest) -> str | None:
        """See `AdoptionPolicy.refusal`."""
        job = manifest.job
        if job not in self._taken and len(self._taken) >= self._jobs_max:
            return f"this agent serves {self._jobs_max} jobs, which is the limit"
        keys = self._taken.get(job, set())
        if key_of(manifest) in keys:
            return "other memory of the same shard was taken back"
        if len(keys) >= SHARDS_MAX:
            return f"this agent has {SHARDS_MAX} shards of job {job}, which is the limit"
        return None

    def take(self, manifest: Manifest) -> None:
        """See `AdoptionPolicy.take`."""
        self._taken.setdefault(manifest.job, set()).add(key_of(manifest))


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
    for name in _most_valuable_first(store):
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


def _most_valuable_first(store: SegmentStore) -> list[str]:
    """Return the segments that were left: those with a version, then those that were written into, then empty ones."""
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
    """Take back the segment of a shard, with its spare one if it has one."""
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
        # The error concerns this shard alone, and says nothing about the bytes in its memory.
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
