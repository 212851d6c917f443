"""How fast one source is, and how much it may have in flight. Pure.

Invariants:
- The rate comes from what the source has brought while something of it was in flight.
- A pause of the reader does not count as silence of a source.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large the batches are that a source is asked for."""

    memory_bytes: int = 32 * 1024 * 1024
    """Pieces of mapped memory are asked for in batches of about this: large enough for every copying thread."""
    wire_bytes: int = 8 * 1024 * 1024
    """The same between hosts: small enough to see progress, and several of them fill a wire."""
    wire_window_bytes: int = 1 << 40
    """A source over a wire has at most this much under way, where a read's window is larger."""
    least_bytes: int = 1024 * 1024
    """The slowest source is still asked for batches of this: smaller ones cost more than they tell."""

    def largest_bytes(self, *, reads_memory: bool) -> int:
        """Return how large a batch of a source's own memory, or over a wire, may be."""
        return self.memory_bytes if reads_memory else self.wire_bytes


DEFAULT_BATCHES: Final = BatchLimits()

BATCHES_MIN: Final = 2
"""A source always has this many batches in flight, whatever the others hold: one arrives while the next is asked."""

AHEAD_S: Final = 0.25
"""A source has at most as much in flight as it brings in this time: far more than a round trip, and little to lose."""

FADE: Final = 0.75
"""With each batch what was measured before counts this much less: about the last four batches make the rate."""

RELAY_S: Final = 0.01
"""While others read what is being filled, batches are as short as this: a piece is shown with its whole batch."""


@dataclass(slots=True)
class SourceRate:
    """The pace of one source."""

    reads_memory: bool = False
    """It is a source whose own memory is read."""
    is_far: bool = False
    """It stands in another site: others share the line, so that it begins with little."""
    limits: BatchLimits = DEFAULT_BATCHES
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes in a second, once something has come."""
        return self._bytes / self._seconds if self._bytes and self._seconds else None

    def record(self, nbytes: int, took_s: float) -> None:
        """Take note of bytes that came `took_s` after the last ones."""
        self._bytes = self._bytes * FADE + nbytes
        self._seconds = self._seconds * FADE + took_s

    def in_flight_limit(self, share_bytes: int) -> float:
        """Return how much may be under way beyond `BATCHES_MIN` batches, out of an equal share of the window."""
        rate = self.rate
        most = share_bytes if self.reads_memory else min(share_bytes, self.limits.wire_window_bytes)
        return 0 if rate is None else min(most, rate * AHEAD_S)

    def batch_bytes(self, share_bytes: int, *, relayed: bool = False) -> float:
        """Return how large its next batch should be; `relayed`: others wait for what it brings."""
        largest = max(min(self.limits.largest_bytes(reads_memory=self.reads_memory), share_bytes // BATCHES_MIN), 1)
        rate = self.rate
        if relayed:
            return min(largest, max(self.limits.least_bytes, (rate or 0.0) * RELAY_S))
        if rate is None:
            return min(largest, self.limits.least_bytes) if self.is_far else largest
        return min(largest, max(self.limits.least_bytes, rate * AHEAD_S / BATCHES_MIN))

    def remaining_s(self, nbytes: int, silent_s: float) -> float:
        """Return how long these bytes will take it yet, as far as can be known.

        Silence lowers the rate, and of whom nothing has come for some time nothing is expected for as long again.
        """
        if not self._bytes:
            return silent_s
        return max(nbytes * (self._seconds + silent_s) / self._bytes, silent_s)
