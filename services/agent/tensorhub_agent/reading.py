"""One source of a read, and the pieces that are with it: waiting, under way, or not confirmed yet. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_common.wire.transfer import Range, Share

BATCH_BYTES: Final = 32 * 1024 * 1024
"""Pieces are posted in batches of about this size: large enough to keep every copying thread busy."""

BATCH_PIECES_MAX: Final = 4096
"""A batch of tiny tensors has at most so many pieces."""

OPEN_S_MAX: Final = 2.0
"""A source that has not granted a lease and opened a transport within this is left out."""

FOREVER: Final = float("inf")


class SourcePhase(StrEnum):
    """How far one source is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(slots=True)
class Reading:
    """One source of the read. `since` is when it last made progress."""

    number: int
    share: Share
    phase: SourcePhase
    since: float
    queue: deque[Range] = field(default_factory=deque)
    flying: dict[int, tuple[tuple[Range, ...], int]] = field(default_factory=dict)
    unconfirmed: list[Range] = field(default_factory=list)
    confirming: bool = False
    doubted: bool = False
    """Its bytes were wrong, and it is being asked whether its lease held: a source that moved on is not at fault."""
    got_bytes: int = 0
    got_pieces: int = 0
    retried: int = 0
    """Of its pieces so many were asked for again, here or elsewhere."""
    lost: str = ""
    """Why it was left out before its end."""

    def patience_s(self, stall_s: float) -> float:
        """Return how long it may go on without progress."""
        if self.phase is SourcePhase.OPENING:
            return OPEN_S_MAX
        if self.phase is SourcePhase.OPEN and (self.flying or self.confirming):
            return stall_s
        return FOREVER

    @property
    def waiting(self) -> int:
        """How many pieces have not been asked for yet."""
        return sum(count for _, count in self.queue)

    @property
    def flying_bytes(self) -> int:
        """How much is under way."""
        return sum(nbytes for _, nbytes in self.flying.values())

    def places(self) -> Iterable[Iterable[Range]]:
        """Yield everything that is with this source."""
        yield self.queue
        yield self.unconfirmed
        for ranges, _ in self.flying.values():
            yield ranges

    def cut_batch(self, sizes: Sequence[int]) -> tuple[tuple[Range, ...], int]:
        """Take the next pieces out of the queue, about a batch of them; returns them and their bytes."""
        ranges: list[Range] = []
        nbytes = pieces = 0
        while self.queue and nbytes < BATCH_BYTES and pieces < BATCH_PIECES_MAX:
            first, count = self.queue.popleft()
            taken = 0
            while taken < count and nbytes < BATCH_BYTES and pieces < BATCH_PIECES_MAX:
                nbytes += sizes[first + taken]
                taken += 1
                pieces += 1
            ranges.append((first, taken))
            if taken < count:
                self.queue.appendleft((first + taken, count - taken))
        return tuple(ranges), nbytes

    def take_over(self, others: Iterable["Reading"]) -> None:
        """Take the later half of what the busiest of the others has not asked for yet."""
        busiest = max(others, key=lambda other: other.waiting)
        wanted = busiest.waiting // 2 if busiest is not self else 0
        while wanted > 0:
            first, count = busiest.queue.pop()
            taken = min(count, wanted)
            if taken < count:
                busiest.queue.append((first, count - taken))
            self.queue.appendleft((first + count - taken, taken))
            wanted -= taken
