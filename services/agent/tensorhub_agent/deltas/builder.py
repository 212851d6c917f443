"""Making deltas at the publisher: each publication is compared with the one before it, after `publish` has returned.

What was published before is gone from the shard's memory by then, so a copy of it is kept, the *shadow*: a segment of
the host's memory of its own, on the agent's account. It follows the publications (`shadow.follow`). All of this is done
in chores of the copy pool: a read never waits for one, nor does `unpublish`.

Invariants:
- A patch counts only if the memory was published from before it was read until after; what was read of memory that had
  been taken back meanwhile is dropped, and so is a copy that was made of it.
- Of every piece in the shadow it is known which digest it has, or that it is not known.
- One publication of a shard is worked on at a time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.deltas.shadow import Digests, Patches, PublishedMemory, Shadow, follow, patches_to
from tensorhub_agent.leases.delta_store import Delta, DeltaStore
from tensorhub_agent.primitives.digests import digest_at
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.runtime.supervision import Supervisor

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Publisher:
    """A shard that publishes."""

    current: PublishedMemory | None = None
    """What is published just now; None while the memory may change."""
    last: PublishedMemory | None = None
    """What was published last."""
    shadow: Shadow | None = None
    is_warned: bool = False
    """There was no memory for a shadow, or for a delta; it was said once."""
    task: "asyncio.Task[None] | None" = None


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
        except MemoryExhausted as why:
            _warn(publisher, f"a delta was not made to its end, for there is no memory to compare in: {why}")
        finally:
            if delta is not None:
                self._book.end(delta)
                self._made()
                took_s, of = time.monotonic() - began, sum(publication.table.nbytes)
                _log.debug("a delta of %d bytes for a publication of %d was made in %.2f s", delta.nbytes, of, took_s)

    async def _new_shadow(self, publisher: _Publisher, publication: PublishedMemory) -> Shadow | None:
        if publisher.current is not publication:
            return None
        try:
            segment = await asyncio.to_thread(self._store.create, publication.segment.nbytes)
        except MemoryExhausted as why:
            _warn(publisher, f"no deltas are made, for there is no memory for a copy of what is published: {why}")
            return None
        publisher.shadow = Shadow(segment, [None] * len(publication.table))
        return publisher.shadow

    async def _compare(
        self,
        publisher: _Publisher,
        shadow: Shadow,
        last: PublishedMemory | None,
        publication: PublishedMemory,
        delta: Delta | None,
    ) -> None:
        for pieces in publication.groups():
            if publisher.current is not publication:
                return
            compared, patches, known = _stale(pieces, shadow, publication), Patches(), Digests()
            # A piece that will not be offered is not compared; the shadow follows by copies alone.
            if delta is not None and last is not None:
                standing = [piece for piece in compared if _stands(shadow, last, piece)]
                await self._pool.background(lambda: patches.update(patches_to(publication, shadow, standing)))  # noqa: B023 (awaited here)
            if publisher.current is not publication:
                return
            if delta is not None and last is not None and not self._put(delta, pieces, patches, last, publication):
                delta = None
                _warn(
                    publisher, "a delta takes more than TENSORHUB_DELTA_BYTES, and is dropped: readers read all of it"
                )
            for piece in compared:
                shadow.digests[piece] = None
            await self._pool.background(lambda: known.update(follow(publication, shadow, compared, patches)))  # noqa: B023 (awaited here)
            for piece in compared:
                read = digest_at(publication.digests, piece) if publisher.current is publication else None
                shadow.digests[piece] = known.get(piece, read)

    def _put(
        self, delta: Delta, pieces: range, patches: Patches, last: PublishedMemory, publication: PublishedMemory
    ) -> bool:
        """Keep the patches of some pieces; False: there is no room for such a delta."""
        is_kept = True
        for piece in pieces:
            is_equal = digest_at(last.digests, piece) == digest_at(publication.digests, piece)
            is_kept = self._book.put(delta, piece, b"" if is_equal else patches.get(piece))
        return is_kept


def _warn(publisher: _Publisher, words: str) -> None:
    """Say once of a publisher that it has too little memory."""
    if not publisher.is_warned:
        publisher.is_warned = True
        _log.warning(words)


def _stale(pieces: range, shadow: Shadow, publication: PublishedMemory) -> list[int]:
    """Return those that are not in the shadow as they are published."""
    return [piece for piece in pieces if not _stands(shadow, publication, piece)]


def _stands(shadow: Shadow, publication: PublishedMemory, piece: int) -> bool:
    return shadow.digests[piece] == digest_at(publication.digests, piece)
