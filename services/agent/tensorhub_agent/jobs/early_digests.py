"""Digests of what a worker still copies into a shard's memory: pieces are hashed as soon as they have come.

A worker whose tensors are on a GPU copies them to hub memory at each publish, and says how far it has come (`Copied`).
What has come is hashed while the rest does, so a publish takes as long as the slower of the two.

What a worker says here is a hint, for which nothing waits: where one is lost, late or of another copy, the memory is
hashed once the call is here, as it is without hints.

Invariants:
- Digests count only for a publication of the same copy over the same connection, when all of the copy has come: the
  worker has promised to leave those bytes alone.
- Any other call on the shard drops them.
"""

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.device_segments import AnySegment
from tensorhub_agent.storage.shard_store import JobShardStore
from tensorhub_common.errors import TensorHubError
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.runtime.supervision import Supervisor


class CopyName(NamedTuple):
    """Which copy of which worker."""

    session: int
    copy: int


@dataclass(slots=True, eq=False)
class _Copy:
    """One copy, and what of it is hashed."""

    name: CopyName
    segment: AnySegment
    table: PieceTable
    came: int = 0
    """How many pieces are in the memory."""
    digests: list[bytes] = field(default_factory=list)
    hashed: int = 0
    hashing: asyncio.Task[None] | None = None
    is_published: bool = False
    """The publication that names it has come."""
    is_dropped: bool = False


class EarlyDigests:
    """The copies under way to the shards of one job: at most one for each."""

    def __init__(self, store: JobShardStore, pool: CopyPool, work: Supervisor) -> None:
        """Begin with none."""
        self._store, self._pool, self._work = store, pool, work
        self._copies: dict[ShardKey, _Copy] = {}

    def came(self, key: ShardKey, name: CopyName, nbytes: int) -> None:
        """The first `nbytes` of a shard's memory are there."""
        stored = self._store.shards.get(key)
        if stored is None:
            return
        copy = self._copies.get(key)
        if copy is None or copy.name != name:
            self.drop(key)
            copy = self._copies[key] = _Copy(name, stored.segment, stored.table)
        copy.came = max(copy.came, _pieces_within(copy.table, nbytes))
        if copy.hashing is None and copy.hashed < copy.came:
            copy.hashing = self._work.start(self._hash(copy), "hashing what a copy has brought")

    def called(self, key: ShardKey, name: CopyName | None) -> None:
        """A call on a shard begins. `name` is the copy that a publication names; None: it is any other call."""
        copy = self._copies.get(key)
        if copy is None:
            return
        if copy.name == name:
            copy.is_published = True
        else:
            self.drop(key)

    def drop(self, key: ShardKey) -> None:
        """Have no digests of what is copied to a shard."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            copy.is_dropped = True

    async def of(self, key: ShardKey) -> bytes | None:
        """Return the digests of all pieces of what is being published, one after another; None: they are not here."""
        copy = self._copies.pop(key, None)
        stored = self._store.shards.get(key)
        is_this = copy is not None and stored is not None and copy.segment is stored.segment
        if copy is None or not is_this or not copy.is_published:
            return None
        if copy.hashing is not None:
            await asyncio.wait({copy.hashing})
        return b"".join(copy.digests) if copy.hashed == len(copy.table) else None

    async def _hash(self, copy: _Copy) -> None:
        try:
            while copy.hashed < copy.came and not copy.is_dropped:
                count = copy.came - copy.hashed
                spans = Spans.of(copy.table, [(copy.hashed, count)])
                copy.digests.append(await self._pool.digest(copy.segment.view, spans).result())
                copy.hashed += count
        except TensorHubError:
            # The pool is full or closes. The publication finds a part of the digests, and so has all of them made.
            copy.is_dropped = True
        finally:
            copy.hashing = None


def _pieces_within(table: PieceTable, nbytes: int) -> int:
    """Return how many pieces are whole within the first `nbytes` of the memory."""
    begun = bisect_right(table.at, nbytes - 1)
    is_whole = begun and table.at[begun - 1] + table.nbytes[begun - 1] <= nbytes
    return begun if is_whole else max(0, begun - 1)
