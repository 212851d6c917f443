"""The pieces that one source of a read is to bring and was not asked for yet. Pure.

Some can be asked for now, some once a half-filled source has them, and some once their fold is known.

Always true: whatever changes a source says so by `touch`, so that the read looks at those that an event concerned, and
at no others (`roster.py`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tensorhub_agent.primitives.ranges import count_of, mark, marked, merged, split, unmark
from tensorhub_common.protocol.plans import Range


@dataclass(slots=True, eq=False, kw_only=True)
class Portion:
    """What waits at one source."""

    queue: deque[Range] = field(default_factory=deque)
    """To be asked for next: it has them."""
    parked: list[Range] = field(default_factory=list)
    """To be asked for as soon as the source, a half-filled one, has them."""
    has: bytearray | None = None
    """Marks of what a half-filled source has; None: everything."""
    able: bytearray | None = None
    """Marks of what it has or will have, where its layout is another one than the reader's; None: everything."""
    partials: int = 0
    """So many units, the first ones, are partials: they come in batches of their own."""
    by_amax: bytearray | None = None
    """Marks of what it computes of parts of blocks; None: nothing."""
    unknown: bytearray | None = None
    """Marks of what can't be asked for so, since its fold is not known."""
    gated: list[Range] = field(default_factory=list)
    """To be asked for as soon as their fold is known: it waits for others."""
    fresh_gated: list[Range] = field(default_factory=list)
    """Those of them that were not looked at yet."""
    promised: bytearray | None = None
    """Marks of what such a source promises; None: whatever it lacks may be waited for."""

    def touch(self) -> None:
        """Have the read look at its source after this event."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """How many pieces have not been asked for yet."""
        return count_of(self.queue) + count_of(self.parked)

    def queued_bytes(self, sizes: Sequence[int]) -> int:
        """Return how much it is to be asked for yet."""
        return sum(sum(sizes[first : first + count]) for first, count in self.queue)

    def give(self, ranges: Iterable[Range]) -> None:
        """Let it bring these pieces, each as soon as it has it, and as it can be asked for it."""
        self.touch()
        waiting, ranges = self.apart(ranges)
        self.gated += waiting
        self.fresh_gated += waiting
        if self.has is None:
            self.queue.extend(ranges)
            return
        there, awaited = split(self.has, ranges)
        self.queue.extend(there)
        self.parked.extend(awaited)

    def apart(self, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
        """Divide pieces into those that wait for their fold and those that do not."""
        if self.by_amax is None or self.unknown is None:
            return [], list(ranges)
        computed, free = split(self.by_amax, ranges)
        waiting, known = split(self.unknown, computed)
        return waiting, merged([*free, *known]) if known else free

    def freed(self) -> None:
        """Ask for what has waited for folds that are known now."""
        if self.gated:
            self.touch()
            waiting, fresh = self.gated, self.fresh_gated
            self.gated, self.fresh_gated = [], []
            self.give(waiting)
            self.fresh_gated = fresh

    def unwoken(self) -> list[Range]:
        """Return the pieces that wait for folds and were not looked at; they are now."""
        self.touch()
        fresh, self.fresh_gated = self.fresh_gated, []
        return fresh

    def give_back(self, wanted: Iterable[Range]) -> list[Range]:
        """Take away what waits for its fold, of these."""
        self.touch()
        if not self.gated or self.unknown is None:
            return []
        marks = bytearray(len(self.unknown))
        mark(marks, wanted)
        taken, self.gated = split(marks, self.gated)
        return taken

    def promises(self, ranges: Iterable[Range]) -> None:
        """Take note of what it promises."""
        self.touch()
        if self.promised is not None:
            mark(self.promised, ranges)

    def retracts(self, ranges: Iterable[Range]) -> list[Range]:
        """Take note of what it promises no more; returns what was parked of that, which is not with it any more."""
        self.touch()
        if self.promised is None:
            return []
        gone = bytearray(len(self.promised))
        mark(gone, ranges)
        unmark(self.promised, ranges)
        given_up, self.parked = split(gone, self.parked)
        return given_up

    def let_go(self, wanted: int, which: bytearray | None) -> list[Range]:
        """Take so many waiting pieces away from it, the last ones first; with `which` only those that are marked."""
        self.touch()
        taken: list[Range] = []
        left: list[Range] = []
        for place in (self.parked, self.queue):
            left.clear()
            while place and wanted > 0:
                first, count = place.pop()
                able = [(first, count)] if which is None else marked(which, first, first + count)
                left += [] if which is None else split(which, [(first, count)])[1]
                for start, some in reversed(able):
                    part = min(some, wanted)
                    wanted -= part
                    taken += [(start + some - part, part)] if part else []
                    left += [(start, some - part)] if part < some else []
            place.extend(merged(left))
        return merged(taken)

    def let_all_go(self) -> list[Range]:
        """Take away all that waits."""
        self.touch()
        ranges = [*self.queue, *self.parked, *self.gated]
        for place in (self.queue, self.parked, self.gated, self.fresh_gated):
            place.clear()
        return ranges
