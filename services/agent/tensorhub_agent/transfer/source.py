"""One source of a read: its progress, its pieces under way, and its pieces that are not confirmed yet. Pure.

Of the pieces that the source is to bring and was not asked for yet, some can be asked for now, some once a half-filled
source has them, and some once their fold is known.

Invariant: every method that changes a source calls `mark_changed`, so the read looks at the sources that an event
concerned, and at no others (`role_index.py`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.primitives.ranges import (
    clear_marks,
    merge_ranges,
    ranges_of_marks,
    set_marks,
    split_by_marks,
    total_count,
)
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_agent.rates.link_rates import LinkMeter
from tensorhub_agent.rates.source_rate import SourceRate
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_common.protocol.plans import Share
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.protocol.worker import EncodedBytes, Encoding

BATCH_PIECES_MAX: Final = 4096
"""A batch of tiny tensors has at most this many pieces."""


class SourcePhase(StrEnum):
    """How far one source is."""

    OPENING = "opening"
    HELD = "held"
    """Its lease is there, and its transport is to be opened later."""
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Source:
    """One source of the read. `since` is when it last made progress, or was first asked for something."""

    number: int
    share: Share
    phase: SourcePhase
    last_progress_at: float
    queue: deque[Range] = field(default_factory=deque)
    """To be asked for next: it has them."""
    awaiting_source: list[Range] = field(default_factory=list)
    """To be asked for as soon as the source, a half-filled one, has them."""
    has: bytearray | None = None
    """Marks of what a half-filled source has; None: everything."""
    covered: bytearray | None = None
    """Marks of what it has or will have, where its layout is another one than the reader's; None: everything."""
    partials: int = 0
    """The number of units, the first ones, that are partials: they come in batches of their own."""
    by_amax: bytearray | None = None
    """Marks of what it computes of parts of blocks; None: nothing."""
    unknown: bytearray | None = None
    """Marks of what can't be asked for so, since its fold is not known."""
    awaiting_fold: list[Range] = field(default_factory=list)
    """To be asked for as soon as their fold is known: it waits for others."""
    new_awaiting_fold: list[Range] = field(default_factory=list)
    """Those of them that were not looked at yet."""
    promised: bytearray | None = None
    """Marks of what such a source promises; None: whatever it lacks may be waited for."""
    partials_outstanding: int = 0
    """The number of its partials that are under way, or wait for its word: the next ones come after that."""
    unpromised_until: float = NEVER
    """Until then pieces are parked that it has not promised."""
    limits: TransferLimits = DEFAULT_LIMITS
    is_readmitted: bool = False
    """It was left for silence before, and was needed again."""
    is_asked: bool = True
    """Whether it is being opened, or was. It waits for its turn before that."""
    is_inside: bool = True
    """Whether it has a transport, or gets one with its lease: a limited number may at a time."""
    shown_at: float | None = None
    """When a half-filled source had shown all that was parked here."""
    is_lost: bool = False
    """The log has lost its agent; its connection may stand."""
    last_new_at: float = 0.0
    """When a half-filled source was last seen to have something new, or was begun to be waited for."""
    in_flight: dict[int, tuple[tuple[Range, ...], int]] = field(default_factory=dict)
    """What is under way by batch, and its bytes."""
    in_flight_bytes: int = 0
    """All of that."""
    unconfirmed: list[Range] = field(default_factory=list)
    unconfirmed_bytes: int = 0
    early_bytes: int = 0
    """Of what is under way so much is known to have come."""
    confirming: bool = False
    confirming_early: int = 0
    """The number of runs of `unconfirmed` that are being asked about early, while more is brought."""
    checking_bytes: int = 0
    is_suspect: bool = False
    """Its bytes were wrong, and it is being asked whether its lease held: a source that moved on is not at fault."""
    got_bytes: int = 0
    """What has come of it and counts."""
    got_pieces: int = 0
    wasted_bytes: int = 0
    """What was asked of it and did not count in the end."""
    encoded: dict[Encoding, EncodedBytes] = field(default_factory=dict)
    """What came otherwise than as it is."""
    retried: int = 0
    """The number of its pieces that were asked for again, here or elsewhere."""
    lost: str = ""
    """Why it was left out before its end."""
    pace: SourceRate = field(init=False)
    meter: LinkMeter = field(default_factory=LinkMeter)
    """Of the link that its bytes come by."""
    touched: "dict[int, Source]" = field(default_factory=dict, repr=False)
    """Sources of its read that something has happened to, by number; the index takes them out."""
    roles: int = 0
    """What the index has it counted as, and what it has counted of it and when it looks at it at the latest."""
    counted_bytes: int = 0
    look_at: float = NEVER

    def __post_init__(self) -> None:
        """Begin to measure."""
        self.last_new_at = self.last_progress_at
        self.pace = SourceRate(reads_memory(self.share.transport), self.share.far, self.limits.batches)

    @property
    def is_live(self) -> bool:
        """Whether pieces may be given to it: it can be read from, or will be."""
        return self.phase in (SourcePhase.OPEN, SourcePhase.HELD, SourcePhase.OPENING) and not self.is_suspect

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked for pieces now."""
        return self.phase is SourcePhase.OPEN and not self.confirming

    @property
    def is_idle(self) -> bool:
        """Whether it could be asked for pieces, and there are none for it."""
        return self.is_ready and not self.queue and not self.in_flight and not self.awaiting_source

    @property
    def is_finished(self) -> bool:
        """Whether it has brought its part, and nothing of it is open."""
        return self.is_idle and not (self.unconfirmed or self.confirming_early or self.awaiting_fold or self.is_suspect)

    @property
    def waits_for_folds(self) -> bool:
        """Whether nothing can be asked of it before others have brought parts of blocks."""
        return bool(self.awaiting_fold) and self.is_idle and not (self.unconfirmed or self.confirming_early)

    @property
    def takeover_group(self) -> str | None:
        """The layout of those whose pieces it may take over; None: of whatever layout they are.

        Most sources of other layouts than the reader's have each their own.
        """
        return None if self.covered is None or self.share.crosses else self.layout

    @property
    def layout(self) -> str:
        """Its layout, as the program names it; empty in a read by pieces."""
        return self.share.layout or ""

    def remaining_s(self, now: float) -> float:
        """Return how long what is under way is expected to take yet."""
        return self.pace.remaining_s(self.in_flight_bytes - self.early_bytes, now - self.last_progress_at)

    def left_s(self, sizes: Sequence[int], now: float) -> float:
        """Return how long all that it is to bring is expected to take yet."""
        nbytes = self.queued_bytes(sizes) + self.in_flight_bytes - self.early_bytes
        return self.pace.remaining_s(nbytes, now - self.last_progress_at)

    def places(self) -> Iterable[Iterable[Range]]:
        """Yield everything that is with this source."""
        yield self.queue
        yield self.awaiting_source
        yield self.awaiting_fold
        yield self.unconfirmed
        for ranges, _ in self.in_flight.values():
            yield ranges

    # The pieces that it has not been asked for.

    @property
    def waiting(self) -> int:
        """How many pieces have not been asked for yet."""
        return total_count(self.queue) + total_count(self.awaiting_source)

    def queued_bytes(self, sizes: Sequence[int]) -> int:
        """Return how much it is to be asked for yet."""
        return sum(sum(sizes[first : first + count]) for first, count in self.queue)

    def give(self, ranges: Iterable[Range]) -> None:
        """Let it bring these pieces, each as soon as it has it, and as it can be asked for it."""
        self.mark_changed()
        waiting, ranges = self.apart(ranges)
        self.awaiting_fold += waiting
        self.new_awaiting_fold += waiting
        if self.has is None:
            self.queue.extend(ranges)
            return
        there, awaited = split_by_marks(self.has, ranges)
        self.queue.extend(there)
        self.awaiting_source.extend(awaited)

    def apart(self, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
        """Divide pieces into those that wait for their fold and those that do not."""
        if self.by_amax is None or self.unknown is None:
            return [], list(ranges)
        computed, free = split_by_marks(self.by_amax, ranges)
        waiting, known = split_by_marks(self.unknown, computed)
        return waiting, merge_ranges([*free, *known])

    def freed(self) -> None:
        """Ask for what has waited for folds that are known now."""
        if self.awaiting_fold:
            self.mark_changed()
            waiting, fresh = self.awaiting_fold, self.new_awaiting_fold
            self.awaiting_fold, self.new_awaiting_fold = [], []
            self.give(waiting)
            self.new_awaiting_fold = fresh

    def take_new_awaiting_fold(self) -> list[Range]:
        """Return the pieces that wait for folds and were not looked at; they are now."""
        self.mark_changed()
        fresh, self.new_awaiting_fold = self.new_awaiting_fold, []
        return fresh

    def give_back(self, wanted: Iterable[Range]) -> list[Range]:
        """Take away what waits for its fold, of these."""
        self.mark_changed()
        if not self.awaiting_fold or self.unknown is None:
            return []
        marks = bytearray(len(self.unknown))
        set_marks(marks, wanted)
        taken, self.awaiting_fold = split_by_marks(marks, self.awaiting_fold)
        return taken

    def promises(self, ranges: Iterable[Range]) -> None:
        """Take note of what it promises."""
        self.mark_changed()
        if self.promised is not None:
            set_marks(self.promised, ranges)

    def retracts(self, ranges: Iterable[Range]) -> list[Range]:
        """Take note of what it promises no more; returns what was parked of that, which is not with it any more."""
        self.mark_changed()
        if self.promised is None:
            return []
        gone = bytearray(len(self.promised))
        set_marks(gone, ranges)
        clear_marks(self.promised, ranges)
        given_up, self.awaiting_source = split_by_marks(gone, self.awaiting_source)
        return given_up

    def take_back(self, wanted: int, which: bytearray | None) -> list[Range]:
        """Take `wanted` waiting pieces away from it, the last ones first; with `which` only those that are marked."""
        self.mark_changed()
        taken: list[Range] = []
        left: list[Range] = []
        for place in (self.awaiting_source, self.queue):
            left.clear()
            while place and wanted > 0:
                first, count = place.pop()
                able = [(first, count)] if which is None else ranges_of_marks(which, first, first + count)
                left += [] if which is None else split_by_marks(which, [(first, count)])[1]
                for start, some in reversed(able):
                    part = min(some, wanted)
                    wanted -= part
                    taken += [(start + some - part, part)] if part else []
                    left += [(start, some - part)] if part < some else []
            place.extend(merge_ranges(left))
        return merge_ranges(taken)

    def take_all_back(self) -> list[Range]:
        """Take away all that waits."""
        self.mark_changed()
        ranges = [*self.queue, *self.awaiting_source, *self.awaiting_fold]
        for place in (self.queue, self.awaiting_source, self.awaiting_fold, self.new_awaiting_fold):
            place.clear()
        return ranges

    # How far it is.

    def mark_changed(self) -> None:
        """Have the read look at it after this event."""
        self.touched[self.number] = self

    def request_lease(self, now: float, *, inside: bool) -> None:
        """Its turn has come to be asked for a lease; `inside`: its transport is opened at once."""
        self.is_asked, self.is_inside, self.last_progress_at, self.last_new_at = True, inside, now, now
        self.mark_changed()

    def leased(self) -> None:
        """Its lease is there."""
        self.phase = SourcePhase.HELD
        self.mark_changed()

    def request_transport(self, now: float) -> None:
        """Its turn has come to have its transport opened."""
        self.phase, self.is_inside, self.last_progress_at, self.last_new_at = SourcePhase.OPENING, True, now, now
        self.mark_changed()

    def opens(self, now: float) -> None:
        """Its lease is there, and its transport."""
        self.phase, self.last_progress_at = SourcePhase.OPEN, now
        self.mark_changed()

    def closes(self, reason: str) -> None:
        """It is to be closed, or is, where it was never asked; `reason` is why before its end."""
        self.phase = SourcePhase.CLOSING if self.is_asked else SourcePhase.CLOSED
        self.lost = reason or self.lost
        self.mark_changed()

    def ends(self, now: float) -> None:
        """Nothing more can come from it."""
        self.phase = SourcePhase.CLOSED
        if self.in_flight:
            self.meter.ends(now)
        self.mark_changed()

    def begins(self, now: float) -> None:
        """It is expected from now on to bring something."""
        self.last_progress_at = self.last_new_at = now
        self.mark_changed()

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of the reader out of what it is silent for."""
        self.last_progress_at, self.last_new_at = (
            min(self.last_progress_at + late_s, now),
            min(self.last_new_at + late_s, now),
        )
        self.mark_changed()

    def mark_agent_lost(self) -> None:
        """The log has lost its agent."""
        self.is_lost = True
        self.mark_changed()

    # What is asked of it about its lease.

    def asks_to_confirm(self, now: float) -> None:
        """Ask whether the lease has held for all that came."""
        self.confirming, self.last_progress_at = True, now
        self.mark_changed()

    def mark_suspect(self) -> None:
        """Its bytes were wrong; ask whether its lease has held."""
        self.is_suspect = self.confirming = True
        self.mark_changed()

    def has_answered(self, now: float) -> None:
        """It has said whether its lease held."""
        self.confirming, self.last_progress_at = False, now
        self.mark_changed()

    # What happens to its pieces.

    def fills(self, pieces: int, there: Iterable[Range], now: float, *, promises: bool) -> None:
        """Take note that it is half-filled: it has some of the pieces, and perhaps promises others."""
        self.mark_changed()
        self.has = bytearray(pieces)
        self.promised = bytearray(pieces) if promises else None
        set_marks(self.has, there)
        given = list(self.queue)
        self.queue.clear()
        self.give(given)
        self.last_new_at = now

    def available(self, ranges: Iterable[Range], now: float) -> None:
        """Take note of what a half-filled source has now, or of its word that it lives."""
        self.mark_changed()
        if self.has is None:
            return
        if not self.in_flight:
            self.last_progress_at = now
        before = self.has.count(1)
        set_marks(self.has, ranges)
        if self.has.count(1) > before:
            self.last_new_at = now
            there, self.awaiting_source = split_by_marks(self.has, self.awaiting_source)
            self.queue.extend(there)
            if there and not self.awaiting_source:
                self.shown_at = now

    def give_up_unpromised(self, now: float) -> list[Range]:
        """Give up and return the pieces that were parked without a promise for `unpromised_wait_s`."""
        self.mark_changed()
        hopeless = split_by_marks(self.promised, self.awaiting_source)[1] if self.promised is not None else []
        if not hopeless or self.phase is not SourcePhase.OPEN:
            self.unpromised_until = NEVER
        elif self.unpromised_until == NEVER:
            self.unpromised_until = now + self.limits.unpromised_wait_s
        elif now >= self.unpromised_until and self.promised is not None:
            self.awaiting_source = split_by_marks(self.promised, self.awaiting_source)[0]
            return hopeless
        return []

    def of_use(self, loose: list[Range]) -> list[Range]:
        """Take out of what is loose, and return, what a half-filled source has or promises."""
        found: list[Range] = []
        for marks in (self.has, self.promised):
            if marks is not None and loose:
                there, loose[:] = split_by_marks(marks, loose)
                found.extend(there)
        return found

    def cut_batch(self, sizes: Sequence[int], share_bytes: int, *, relayed: bool) -> tuple[tuple[Range, ...], int]:
        """Take the next pieces out of the queue, about a batch of them; returns them and their bytes."""
        self.mark_changed()
        largest = self.pace.batch_bytes(share_bytes, relayed=relayed)
        ranges: list[Range] = []
        nbytes = pieces = 0
        while self.queue and nbytes < largest and pieces < BATCH_PIECES_MAX:
            first, count = self.queue.popleft()
            if ranges and (first < self.partials) != (ranges[0][0] < self.partials):
                self.queue.appendleft((first, count))
                break
            taken = 0
            while taken < count and nbytes < largest and pieces < BATCH_PIECES_MAX:
                if taken and first + taken == self.partials:
                    break
                nbytes += sizes[first + taken]
                taken += 1
                pieces += 1
            ranges.append((first, taken))
            if taken < count:
                self.queue.appendleft((first + taken, count - taken))
        return tuple(ranges), nbytes

    def asked(self, batch: int, ranges: tuple[Range, ...], nbytes: int, now: float) -> None:
        """Take note of a batch that is under way; with the first one its patience begins."""
        self.mark_changed()
        if not self.in_flight:
            self.last_progress_at, self.early_bytes = now, 0
            self.meter.begins(now)
        self.in_flight[batch] = (ranges, nbytes)
        self.in_flight_bytes += nbytes
        self.partials_outstanding += total_count(ranges) if ranges[0][0] < self.partials else 0

    def progressed(self, nbytes: int, now: float) -> None:
        """Take note of bytes that came within a batch: never more than are under way, so no word counts for ever."""
        came = min(nbytes, self.in_flight_bytes - self.early_bytes)
        if came > 0:
            self.early_bytes += came
            self.pace.record(came, now - self.last_progress_at)
            self.meter.came(came)
            self.last_progress_at = now
            self.mark_changed()

    def answered(self, batch: int, now: float) -> tuple[tuple[Range, ...], int]:
        """Take a batch out of what is under way; returns its pieces and bytes."""
        self.mark_changed()
        ranges, nbytes = self.in_flight.pop(batch)
        self.in_flight_bytes -= nbytes
        late_bytes = max(nbytes - self.early_bytes, 0)
        self.pace.record(late_bytes, now - self.last_progress_at)
        self.meter.came(late_bytes)
        if not self.in_flight:
            self.meter.ends(now)
        self.early_bytes = max(self.early_bytes - nbytes, 0)
        self.last_progress_at = now
        return ranges, nbytes

    def decoded(self, encoded: Sequence[EncodedBytes], now: float) -> None:
        """Note what came otherwise than as it is. Of the link it tells nothing."""
        if encoded:
            self.meter.forget(now)
        for each in encoded:
            before = self.encoded.get(each.how)
            self.encoded[each.how] = each if before is None else _sum(before, each)

    def got(self, pieces: int, nbytes: int) -> None:
        """Count what counts."""
        self.got_pieces += pieces
        self.got_bytes += nbytes

    def wasted(self, pieces: int, nbytes: int) -> None:
        """Count what is asked for again."""
        self.retried += pieces
        self.wasted_bytes += nbytes

    def check_early(self) -> None:
        """Ask about what has come so far: others wait for it."""
        self.mark_changed()
        self.confirming_early, self.checking_bytes = len(self.unconfirmed), self.unconfirmed_bytes

    def confirmed(self) -> list[Range]:
        """Count what waited for the source's word when it was asked, and return it."""
        self.mark_changed()
        runs = self.confirming_early or len(self.unconfirmed)
        nbytes = self.checking_bytes if self.confirming_early else self.unconfirmed_bytes
        ranges, self.unconfirmed = self.unconfirmed[:runs], self.unconfirmed[runs:]
        self.got(total_count(ranges), nbytes)
        self.unconfirmed_bytes -= nbytes
        self.confirming_early = 0
        self.partials_outstanding -= total_count(each for each in ranges if each[0] < self.partials)
        return ranges

    def give_up(self) -> list[Range]:
        """Return everything that is with it: nothing more comes."""
        self.mark_changed()
        ranges = [*self.take_all_back(), *self.unconfirmed]
        asked = total_count(self.unconfirmed)
        for batch, _ in self.in_flight.values():
            ranges.extend(batch)
            asked += total_count(batch)
        self.wasted(asked, self.in_flight_bytes + self.unconfirmed_bytes)
        self.in_flight.clear()
        self.unconfirmed, self.in_flight_bytes, self.unconfirmed_bytes = [], 0, 0
        return ranges


def _sum(before: EncodedBytes, more: EncodedBytes) -> EncodedBytes:
    """Return both as one; the later reason stands for both."""
    return EncodedBytes(
        how=more.how,
        nbytes=before.nbytes + more.nbytes,
        wire_bytes=before.wire_bytes + more.wire_bytes,
        why=more.why,
    )
