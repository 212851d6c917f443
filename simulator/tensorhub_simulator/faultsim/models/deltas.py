"""Deltas in the simulation: what an agent remembers of the versions that stood in its shards, and what changed.

Production makes patches of memory that is published, and keeps them; here the bytes themselves are remembered, and a
patch is made when it is asked for. What is done with it is the same: it overwrites what stands at the reader, whatever
that is, and the digest of the outcome judges it. So a patch for other bytes than stand there is played as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.core.effects import SaveManifest
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_simulator.faultsim.models.segments import Segment

VERSIONS_MAX: Final = 3
"""This many versions of a shard are remembered."""


@dataclass(frozen=True, slots=True)
class Overwrites:
    """What to change in `nbytes` bytes: offsets and values."""

    nbytes: int
    values: tuple[tuple[int, int], ...]

    def over(self, old: bytes) -> bytes:
        """Return the old bytes, overwritten."""
        new = bytearray(old)
        for at, value in self.values:
            new[at] = value
        return bytes(new)


@dataclass(frozen=True, slots=True)
class Delta:
    """From one version's bytes to another's."""

    old: bytes
    new: bytes

    def part(self, where: Sequence[int]) -> Overwrites:
        """Return what changed there."""
        changed = ((n, self.new[at]) for n, at in enumerate(where) if self.old[at] != self.new[at])
        return Overwrites(len(where), tuple(changed))


class Deltas:
    """What one process remembers."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._stood: dict[ShardKey, dict[str, bytes]] = {}

    def stands(self, saved: SaveManifest, segment: Segment) -> None:
        """A shard's memory is something else now."""
        if saved.state == MemoryState.READY and saved.root and saved.digests:
            stood = self._stood.setdefault(saved.key, {})
            stood.pop(saved.root, None)
            stood[saved.root] = bytes(segment.data)
            for old in list(stood)[:-VERSIONS_MAX]:
                del stood[old]

    def between(self, key: ShardKey, base: str, root: str | None) -> Delta | None:
        """Return the delta that leads from one version to the other, if both are remembered."""
        stood = self._stood.get(key, {})
        return Delta(stood[base], stood[root]) if base in stood and root in stood else None
