"""What happened in one seed, counted: that nothing wrong was found says something only where all of it happened."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of what the simulated trouble led to."""

    counted_on: int = 0
    """Leases that counted on promises,"""
    counted_on_units: int = 0
    """and those of them that were told of units."""
    left: Counter[str] = field(default_factory=Counter)
    """Why sources were left, and how often."""
    units: int = 0
    """What came by programs,"""
    relayed: int = 0
    """and of that from half-filled sources."""
    partials: int = 0
    """Partials of blocks that sources had parts of,"""
    scales: int = 0
    """and scales that were folded of such."""
    patched: int = 0
    """Pieces that were right after they were patched,"""
    mispatched: int = 0
    """and pieces that were not and came as they are."""

    def came(self, units: int, partials: int, *, relayed: bool) -> None:
        """Count a batch that came by a program."""
        self.units += units
        self.partials += partials
        self.relayed += units if relayed else 0
