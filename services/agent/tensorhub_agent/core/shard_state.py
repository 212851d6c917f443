"""A shard's memory: where it belongs, what it is at the moment, and what it holds. Pure.

Invariant: once a shard is in its core, these facts change through methods of `ShardCore` alone, and `set_memory` saves
the manifest before anything later is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tensorhub_agent.primitives.ids import ShardKey


class MemoryState(StrEnum):
    """What the segment is, as the agent knows it."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class ShardContents:
    """What stands in the memory."""

    memory: MemoryState = MemoryState.EMPTY
    partial: bool = False
    version: int | None = None
    root: str | None = None
    digests: bytes = b""
    kept: tuple[int, str, bytearray, bytes] | None = None
    """Of a read that failed: its version and root, the pieces that are verified, and all digests."""
    lent: bool = False
    """A process may have the memory mapped: it must not be written before a probe has found that none does."""
    spare_lent: bool = False
    """The same of a staged shard's spare memory."""


@dataclass(slots=True)
class ShardSpec:
    """Where a shard belongs; what does not change while it is registered."""

    key: ShardKey
    shards: int
    spot: bool
    layout: str
    nbytes: Sequence[int]
    """Bytes of each canonical piece."""
    staged: bool = False
    """It has spare memory of the same size. Reads go there, and what stands here is untouched until the swap."""
    mapped: bool = False
    """It has no memory: its worker maps a holder's, and shows the next version's only when all shards have theirs."""
    device: str = ""
    """The UUID of the GPU whose memory it has or maps; empty: the host's."""

    @property
    def swaps(self) -> bool:
        """Whether what it holds stands until all shards of its replica can swap to the next version."""
        return self.staged or self.mapped

    @property
    def install(self) -> str:
        """How its worker has called that."""
        return "mapped" if self.mapped else "staged" if self.staged else "in-place"
