"""What the cores want of the memory in which a read's partials are folded; `amax_table` is that of production. Pure."""

from collections.abc import Sequence
from typing import Protocol

from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.ranges import Range


class AmaxTable(Protocol):
    """The largest magnitudes of a read's blocks, in its driver's memory: see `amax_table`."""

    partials: int
    """The first `partials` units are brought here, and not into the destination."""

    def batch_buffer(self, layout: str, partials: Sequence[Range]) -> tuple[MemoryRegion, StridedCopies]:
        """Return memory of its own for a batch of partials, and how they are brought into it."""

    def batch_arrived(self, source: int, partials: Sequence[Range], memory: MemoryRegion) -> None:
        """Take a batch that has come whole."""

    def fold(self, source: int, partials: Sequence[Range]) -> None:
        """Count what a source has said of these."""

    def forget(self, source: int) -> None:
        """Drop what a source has said that was not folded."""

    def write_scales(self, scales: Sequence[Range], destination: MemoryRegion) -> None:
        """Compute scales of folds that are known."""

    def amax(self, layout: str, units: Sequence[Range]) -> Sequence[bytes]:
        """Return by what a source of this layout computes each of these units."""
