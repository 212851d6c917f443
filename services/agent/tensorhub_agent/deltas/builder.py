"""Making deltas at the publisher: each publication is compared with the one before it, after `publish` has returned.

What was published before is gone from the shard's memory by then, so a copy of it is kept, the *shadow*: a segment of
its own, on the agent's account. A patch that was made is applied to the shadow too, which so follows the publications
for little more than what changes. All of it is done in chores of the copy pool: a read never waits for one, nor does
`unpublish`.

Invariants:
- A patch counts only if the memory was published from before it was read until after; what was read of memory that had
  been taken back meanwhile is dropped, and so is a copy that was made of it.
- Of every piece in the shadow it is known which digest it has, or that it is not known.
- One publication of a shard is worked on at a time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.encodings.columns import unit_of
from tensorhub_agent.encodings.patch import apply, make
from tensorhub_agent.leases.delta_store import Delta, DeltaStore
from tensorhub_agent.primitives.digests import digest_at
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.runtime.supervision import Supervisor

CHORE_BYTES: Final = 4 * 1024 * 1024
"""A chore takes about so much at a time: some milliseconds, for which a job may have to wait."""

CHORE_PIECES_MAX: Final = 256
"""The most pieces of a chunk, where they are tiny."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PublishedMemory:
    """What a shard has published: `digests` of its pieces, one after another."""

    segment: Segment
    table: PieceTable
    root: str
    digests: bytes

    def groups(self) -> Iterator[range]:
        """Cut the pieces into chores."""
        first = nbytes = 0
        for piece, size in enumerate(self.table.nbytes):
            if piece > first and (nbytes + size > CHORE_BYTES or piece - first >= CHORE_PIECES_MAX):
                yield range(first, piece)
                first, nbytes = piece, 0
            nbytes += size
        yield range(first, len(self.table))

    def piece(self, view: memoryview, piece: int) -> memoryview:
        """Return the memory of a piece."""
        at = self.table.at[piece]
        return view[at : at + self.table.nbytes[piece]]

    def unit(self, piece: int) -> int:
        """Return the unit in which a piece is compared."""
        return unit_of(self.table.layout.tensors[self.table.tensor[piece]].itemsize)


@dataclass(slots=True, eq=False)
class _Shadow:
    """A copy of what a shard published last."""

    segment: Segment
    digests: list[bytes | None]
    """What each piece in it hashes to; None: not known."""


@dataclass(slots=True, eq=False)
class _Publisher:
    """A shard that publishes."""

    current: PublishedMemory | None = None
    """What is published just now; None while the memory may change."""
    last: PublishedMemory | None = None
    """What was published last."""
    shadow: _Shadow | None = None
    is_warned: bool = False
    """There was no memory for a shadow, or for a delta; it was said once."""
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Group:
    """What one chore has found out: patches to apply to the shadow, and pieces to copy there."""

    patches: dict[int, bytes] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)


class DeltaBuilder:
    """Makes the deltas of all shards that publish on this agent. Its methods belong to the event loop."""

    def __init__(self, pool: CopyPool, store: SegmentStore, book: DeltaStore, made: Callable[[], None]) -> None:
        """Keep deltas in `book` and shadows in `store`; `made` is called when there is a new delta."""
        self._pool, self._store, self._book, self._made = pool, store, book, made
        self._publishers: dict[Hashable, _Publisher] = {}
        # Without a delta readers read pieces, so a fault costs nothing else.
        self._work = Supervisor("deltas", on_fault=lambda _: None)
        self._leaving = self._work.group()

    def published(self, shard: Hashable, publication: PublishedMemory) -> None:
        """Begin to compare what is published now with what was before; it goes on in the background."""
        publisher = self._publishers.setdefault(shard, _Publisher())
        last, publisher.current, publisher.last = publisher.last, publication, publication
        delta = None
        if publisher.shadow is not None and last is not None and last.root != publication.root:
            delta = self._book.begin(shard, last.root, publication.root, len(publication.table))
        work = self._follow(publisher, publisher.task, last, publication, delta)
        publisher.task = self._work.start(work, "comparing two publications")

    def follows(self, shard: Hashable) -> bool:
        """Tell whether the next publication of a shard will be compared with one before it."""
        publisher = self._publishers.get(shard)
        return publisher is not None and publisher.shadow is not None

    def withdrawn(self, shard: Hashable) -> None:
        """The memory may change from now on: what is being read of it does not count."""
        if (publisher := self._publishers.get(shard)) is not None:
            publisher.current = None

    def freed(self, shard: Hashable) -> None:
        """The shard is gone: forget its deltas and its shadow."""
        publisher = self._publishers.pop(shard, None)
        self._book.forget(shard)
        if publisher is not None:
            publisher.current = None
            self._leaving.start(self._free(publisher), "removing what publications are compared with")

    async def _free(self, publisher: _Publisher) -> None:
        if publisher.task is not None:
            await asyncio.gather(publisher.task, return_exceptions=True)
        if publisher.shadow is not None:
            await asyncio.to_thread(self._store.remove, publisher.shadow.segment)

    async def stop(self) -> None:
        """End everything; nothing is read any more when this returns, and no shadow is left behind."""
        for shard in list(self._publishers):
            self.freed(shard)
        await self._leaving.ended()

    async def settled(self) -> None:
        """Wait until everything that is published has been followed."""
        tasks = [each.task for each in self._publishers.values() if each.task is not None]
        await asyncio.gather(*tasks)

    # One publication.

    async def _follow(
        self,
        publisher: _Publisher,
        before: "asyncio.Task[None] | None",
        last: PublishedMemory | None,
        publication: PublishedMemory,
        delta: Delta | None,
    ) -> None:
        began = time.monotonic()
        try:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            shadow = publisher.shadow or await self._new_shadow(publisher, publication)
            if shadow is not None:
                await self._compare(publisher, shadow, last, publication, delta)
        finally:
            if delta is not None:
                self._book.end(delta)
                self._made()
                took_s, of = time.monotonic() - began, sum(publication.table.nbytes)
                _log.debug("a delta of %d bytes for a publication of %d was made in %.2f s", delta.nbytes, of, took_s)

    async def _new_shadow(self, publisher: _Publisher, publication: PublishedMemory) -> _Shadow | None:
        if publisher.current is not publication:
            return None
        try:
            segment = await asyncio.to_thread(self._store.create, publication.segment.nbytes)
        except MemoryExhausted as why:
            _warn(publisher, f"no deltas are made, for there is no memory for a copy of what is published: {why}")
            return None
        publisher.shadow = _Shadow(segment, [None] * len(publication.table))
        return publisher.shadow

    async def _compare(
        self,
        publisher: _Publisher,
        shadow: _Shadow,
        last: PublishedMemory | None,
        publication: PublishedMemory,
        delta: Delta | None,
    ) -> None:
        for pieces in publication.groups():
            if publisher.current is not publication:
                return
            group = _Group()
            compared = _stale(pieces, shadow, publication)
            # A piece that will not be offered is not compared; the shadow follows by copies alone.
            wanted = delta is not None and last is not None
            known = [piece for piece in compared if wanted and last is not None and _stands(shadow, last, piece)]
            await self._pool.background(lambda: _make(known, shadow, publication, group))  # noqa: B023 (awaited here)
            if publisher.current is not publication:
                return
            group.copies += [piece for piece in compared if piece not in group.patches]
            if delta is not None and last is not None and not self._put(delta, pieces, group, last, publication):
                delta = None
                _warn(
                    publisher, "a delta takes more than TENSORHUB_DELTA_BYTES, and is dropped: readers read all of it"
                )
            for piece in (*group.patches, *group.copies):
                shadow.digests[piece] = None
            await self._pool.background(lambda: _bring(group, shadow, publication))  # noqa: B023 (awaited here)
            trusted: Sequence[int] = [*group.patches]
            if publisher.current is publication:
                trusted = [*group.patches, *group.copies]
            for piece in trusted:
                shadow.digests[piece] = digest_at(publication.digests, piece)

    def _put(
        self, delta: Delta, pieces: range, group: _Group, last: PublishedMemory, publication: PublishedMemory
    ) -> bool:
        """Keep the patches of some pieces; False: there is no room for such a delta."""
        is_kept = True
        for piece in pieces:
            is_equal = digest_at(last.digests, piece) == digest_at(publication.digests, piece)
            is_kept = self._book.put(delta, piece, b"" if is_equal else group.patches.get(piece))
        return is_kept


def _warn(publisher: _Publisher, words: str) -> None:
    """Say once of a publisher that it has too little memory."""
    if not publisher.is_warned:
        publisher.is_warned = True
        _log.warning(words)


def _stale(pieces: range, shadow: _Shadow, publication: PublishedMemory) -> list[int]:
    """Return those that are not in the shadow as they are published."""
    return [piece for piece in pieces if not _stands(shadow, publication, piece)]


def _stands(shadow: _Shadow, publication: PublishedMemory, piece: int) -> bool:
    return shadow.digests[piece] == digest_at(publication.digests, piece)


# In a thread of the pool.


def _make(pieces: Sequence[int], shadow: _Shadow, publication: PublishedMemory, group: _Group) -> None:
    for piece in pieces:
        old = publication.piece(shadow.segment.view, piece)
        patch = make(old, publication.piece(publication.segment.view, piece), publication.unit(piece))
        if patch is not None:
            group.patches[piece] = patch


def _bring(group: _Group, shadow: _Shadow, publication: PublishedMemory) -> None:
    view = shadow.segment.view
    for piece, patch in group.patches.items():
        apply(patch, publication.piece(view, piece), publication.unit(piece))
    for piece in group.copies:
        # By numpy, which lets go of the GIL; slice assignment between memoryviews doesn't.
        source = publication.piece(publication.segment.view, piece)
        np.copyto(np.frombuffer(publication.piece(view, piece), np.uint8), np.frombuffer(source, np.uint8))
