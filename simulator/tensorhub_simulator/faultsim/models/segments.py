"""Segments with real bytes, and what the simulation knows about them that no process does: the truth.

A write says who writes, so that two writers of one byte, or a write into memory that must not change, is noticed at
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub_agent.core.effects import Keep, SaveManifest
from tensorhub_agent.core.shard_state import ShardSpec
from tensorhub_agent.primitives.digests import piece_digest
from tensorhub_common.layout.layout import PieceTable, segment_bytes
from tensorhub_simulator.engine.violation import Violation


class Segment:
    """The memory of one shard. `generation` counts the writes."""

    def __init__(self, table: PieceTable) -> None:
        """Begin all zero, as fresh shared memory does."""
        self.table, self.nbytes, self.at = table, table.nbytes, table.at
        self.data = bytearray(segment_bytes(table.layout))
        self.generation = 0
        self.writers: dict[int, object] = {}
        """Which source may write a byte now."""
        self.maps: set[str] = set()
        """Who has it mapped: nothing of it may change meanwhile."""
        self.is_asked_back = False
        """Whether its agent has told those that it waits for them."""

    def write(self, at: int, data: bytes) -> None:
        """Change bytes."""
        if self.maps:
            raise Violation("mapped memory", f"it is written while {sorted(self.maps)} have it mapped")
        self.data[at : at + len(data)] = data
        self.generation += 1

    def put(self, where: Sequence[int], data: bytes) -> None:
        """Change bytes that need not follow one another."""
        self.write(where[0] if where else 0, b"")
        for at, value in zip(where, data, strict=True):
            self.data[at] = value

    def get(self, where: Sequence[int]) -> bytes:
        """Return the present bytes there."""
        return bytes(self.data[at] for at in where)

    def piece(self, number: int) -> bytes:
        """Return the present bytes of one piece."""
        return bytes(self.data[self.at[number] : self.at[number] + self.nbytes[number]])

    def digests(self, pieces: Sequence[int] | None = None) -> bytes:
        """Return the digests of these pieces, or of all."""
        numbers = range(len(self.nbytes)) if pieces is None else pieces
        return b"".join(piece_digest(self.piece(number)) for number in numbers)


@dataclass(slots=True)
class ModelledShard:
    """A shard's segment, its spare one if it is staged, and the manifest beside them."""

    spec: ShardSpec
    segment: Segment
    manifest: SaveManifest | None = None
    spare: Segment | None = None
    unwritten: Keep | None = None
    """What the disk has not taken yet."""
    refused: int | None = None
    """The version of which it took no manifest."""

    @property
    def target(self) -> Segment:
        """Where reads write to."""
        return self.spare or self.segment

    def save(self, manifest: SaveManifest) -> None:
        """Write the manifest, and swap if it says so: one rename does both."""
        self.manifest, self.unwritten = manifest, None
        if manifest.swap and self.spare is not None:
            self.segment, self.spare = self.spare, self.segment
