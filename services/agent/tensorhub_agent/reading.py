"""One source of a read, and the pieces that are with it: waiting, under way, or not confirmed yet. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.meter import Meter
from tensorhub_agent.pace import Pace
from tensorhub_agent.ranges import count_of, mark, marked, merged, split, unmark
from tensorhub_common.wire.transfer import Range, Share
from tensorhub_common.wire.worker import Encoded, How

BATCH_PIECES_MAX: Final = 4096
"""A batch of tiny tensors has at most so many pieces."""

OPEN_S_MAX: Final = 2.0
"""A source that has not granted a lease and opened a transport within this is left out."""

OPENING_MAX: Final = 32
"""So many sources are being opened at a time. Of a thousand at once, each with its handshake, most would be late."""

CROSSER_OPEN_S_MAX: Final = 10.0
"""Nor one of the reader's group within this, which has to open a source in another site first; nor that one: where it
is left its part crosses to another reader."""

WAITING_SILENT_S: Final = 3.0
"""A half-filled source of which pieces are awaited says at least with each renewal that it lives: three of them."""

CROSSER_SILENT_S: Final = 30.0
"""One of the reader's group may be silent for longer, as long as the log has not lost its agent: to leave it means to
bring its part over once more. The connection of one that is killed ends at once, and one that is stopped is lost."""

CROSSER_STARVED_S: Final = 60.0
"""Such a one may have nothing new for so long: what it promises it has under way, and gives up by itself."""

FAR_BPS_MIN: Final = 500_000
"""A source in another site is given so long as this takes for what is under way: the transport brings all of that side
by side, so that the first of it may come with the last."""

FAR_SILENT_S: Final = 30.0
"""But not longer. One that is stopped is lost to the log long before, and then the bounds of any source count."""

STARVED_TIMES: Final = 2
"""A half-filled source may have nothing new for so many times `stall_s`: it may have to leave its own source first."""

HOPE_S: Final = 5.0
"""A piece that its source has not promised is awaited for so long: it may have to open a source of its own first, or to
hear that it has inherited the piece, on a busy machine."""

FOREVER: Final = float("inf")


class SourcePhase(StrEnum):
    """How far one source is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(slots=True)
class Reading:
    """One source of the read. `since` is when it last made progress, or was first asked for something."""

    number: int
    share: Share
    phase: SourcePhase
    since: float
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
    owed: int = 0
    """So many partials of it are under way, or wait for its word: the next ones come after that."""
    promised: bytearray | None = None
    """Marks of what such a source promises; None: whatever it lacks may be waited for."""
    hopes_until: float = FOREVER
    """Until then pieces are parked that it has not promised."""
    stream: int = 0
    """Which of the sessions that carry one share."""
    is_asked: bool = True
    """Whether it is being opened, or was. It waits for its turn before that."""
    shown_at: float | None = None
    """When a half-filled source had shown all that was parked here."""
    is_lost: bool = False
    """The log has lost its agent; its connection may stand."""
    fed: float = 0.0
    """When a half-filled source was last seen to have something new, or was begun to be waited for."""
    flying: dict[int, tuple[tuple[Range, ...], int]] = field(default_factory=dict)
    """What is under way by batch, and its bytes."""
    flying_bytes: int = 0
    """All of that."""
    unconfirmed: list[Range] = field(default_factory=list)
    unconfirmed_bytes: int = 0
    early_bytes: int = 0
    """Of what is under way so much is known to have come."""
    confirming: bool = False
    checking: int = 0
    """So many runs of `unconfirmed` are being asked about early, while more is brought."""
    checking_bytes: int = 0
    doubted: bool = False
    """Its bytes were wrong, and it is being asked whether its lease held: a source that moved on is not at fault."""
    slow: bool = False
    """It is closed because another one is expected to bring its pieces sooner."""
    got_bytes: int = 0
    """What has come of it and counts."""
    got_pieces: int = 0
    wasted_bytes: int = 0
    """What was asked of it and did not count in the end."""
    encoded: dict[How, tuple[int, int]] = field(default_factory=dict)
    """What came otherwise than as it is: the bytes that stand there by it, and those that came for them."""
    retried: int = 0
    """Of its pieces so many were asked for again, here or elsewhere."""
    lost: str = ""
    """Why it was left out before its end."""
    pace: Pace = field(init=False)
    meter: Meter = field(default_factory=Meter)
    """Of the link that its bytes come by."""

    def __post_init__(self) -> None:
        """Begin to measure."""
        self.fed = self.since
        self.pace = Pace(self.share.transport, self.share.far)

    @property
    def is_live(self) -> bool:
        """Whether pieces may be given to it: it can be read from, or will be."""
        return self.phase in (SourcePhase.OPENING, SourcePhase.OPEN) and not self.doubted

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked for pieces now."""
        return self.phase is SourcePhase.OPEN and not self.confirming

    @property
    def is_idle(self) -> bool:
        """Whether it could be asked for pieces, and there are none for it."""
        return self.is_ready and not self.queue and not self.flying and not self.parked

    @property
    def waiting(self) -> int:
        """How many pieces have not been asked for yet."""
        return count_of(self.queue) + count_of(self.parked)

    def queued_bytes(self, sizes: Sequence[int]) -> int:
        """Return how much it is to be asked for yet."""
        return sum(sum(sizes[first : first + count]) for first, count in self.queue)

    def due(self, stall_s: float) -> float:
        """Return until when it may go on as it does, without progress or without anything new."""
        if self.phase is SourcePhase.OPEN and self.parked and not self.queue and not self.flying:
            if not self.share.crosses:
                return min(self.since + WAITING_SILENT_S, self.fed + STARVED_TIMES * stall_s)
            silent_s = WAITING_SILENT_S if self.is_lost else CROSSER_SILENT_S
            return min(self.since + silent_s, self.fed + CROSSER_STARVED_S)
        return self.since + self._patience_s(stall_s)

    def _patience_s(self, stall_s: float) -> float:
        if self.phase is SourcePhase.OPENING:
            if not self.is_asked:
                return FOREVER
            is_worth_it = (self.share.crosses or self.share.far) and not self.is_lost
            return CROSSER_OPEN_S_MAX if is_worth_it else OPEN_S_MAX
        if self.phase is not SourcePhase.OPEN:
            return FOREVER
        is_awaited = bool(self.flying) or self.confirming or bool(self.checking)
        if is_awaited and self.share.crosses and not self.is_lost:
            return CROSSER_SILENT_S
        if is_awaited and self.share.far and not self.is_lost:
            return min(FAR_SILENT_S, stall_s + (self.flying_bytes + self.unconfirmed_bytes) / FAR_BPS_MIN)
        if self.confirming or (self.checking and not self.flying):
            return stall_s
        return self.pace.patience_s(self.flying_bytes, stall_s) if self.flying else FOREVER

    def remaining_s(self, now: float) -> float:
        """Return how long what is under way is expected to take yet."""
        return self.pace.remaining_s(self.flying_bytes - self.early_bytes, now - self.since)

    def left_s(self, sizes: Sequence[int], now: float) -> float:
        """Return how long all that it is to bring is expected to take yet."""
        nbytes = self.queued_bytes(sizes) + self.flying_bytes - self.early_bytes
        return self.pace.remaining_s(nbytes, now - self.since)

    def places(self) -> Iterable[Iterable[Range]]:
        """Yield everything that is with this source."""
        yield self.queue
        yield self.parked
        yield self.gated
        yield self.unconfirmed
        for ranges, _ in self.flying.values():
            yield ranges

    # What happens to its pieces.

    def give(self, ranges: Iterable[Range]) -> None:
        """Let it bring these pieces, each as soon as it has it, and as it can be asked for it."""
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
            waiting, fresh = self.gated, self.fresh_gated
            self.gated, self.fresh_gated = [], []
            self.give(waiting)
            self.fresh_gated = fresh

    def give_back(self, wanted: Iterable[Range]) -> list[Range]:
        """Take away what waits for its fold, of these."""
        if not self.gated or self.unknown is None:
            return []
        marks = bytearray(len(self.unknown))
        mark(marks, wanted)
        taken, self.gated = split(marks, self.gated)
        return taken

    def fills(self, pieces: int, there: Iterable[Range], now: float, *, promises: bool = False) -> None:
        """Take note that it is half-filled: it has some of so many pieces, and perhaps promises others."""
        self.has = bytearray(pieces)
        self.promised = bytearray(pieces) if promises else None
        mark(self.has, there)
        given = list(self.queue)
        self.queue.clear()
        self.give(given)
        self.fed = now

    def available(self, ranges: Iterable[Range], now: float) -> None:
        """Take note of what a half-filled source has now, or of its word that it lives."""
        if self.has is None:
            return
        if not self.flying:
            self.since = now
        before = self.has.count(1)
        mark(self.has, ranges)
        if self.has.count(1) > before:
            self.fed = now
            there, self.parked = split(self.has, self.parked)
            self.queue.extend(there)
            if there and not self.parked:
                self.shown_at = now

    def promises(self, ranges: Iterable[Range]) -> None:
        """Take note of what it promises."""
        if self.promised is not None:
            mark(self.promised, ranges)

    def retracts(self, ranges: Iterable[Range]) -> list[Range]:
        """Take note of what it promises no more; returns what was parked of that, which is not with it any more."""
        if self.promised is None:
            return []
        gone = bytearray(len(self.promised))
        mark(gone, ranges)
        unmark(self.promised, ranges)
        given_up, self.parked = split(gone, self.parked)
        return given_up

    def despair(self, now: float) -> list[Range]:
        """Give up the pieces that are parked without a promise, once they were for `HOPE_S`; returns them."""
        hopeless = split(self.promised, self.parked)[1] if self.promised is not None else []
        if not hopeless or self.phase is not SourcePhase.OPEN:
            self.hopes_until = FOREVER
        elif self.hopes_until == FOREVER:
            self.hopes_until = now + HOPE_S
        elif now >= self.hopes_until and self.promised is not None:
            self.parked = split(self.promised, self.parked)[0]
            return hopeless
        return []

    def let_go(self, wanted: int, which: bytearray | None) -> list[Range]:
        """Take so many waiting pieces away from it, the last ones first; with `which` only those that are marked."""
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

    def cut_batch(
        self, sizes: Sequence[int], share_bytes: int, *, relayed: bool = False
    ) -> tuple[tuple[Range, ...], int]:
        """Take the next pieces out of the queue, about a batch of them; returns them and their bytes."""
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
        if not self.flying:
            self.since, self.early_bytes = now, 0
            self.meter.begins(now)
        self.flying[batch] = (ranges, nbytes)
        self.flying_bytes += nbytes
        self.owed += count_of(ranges) if ranges[0][0] < self.partials else 0

    def progressed(self, nbytes: int, now: float) -> None:
        """Take note of bytes that came within a batch: never more than are under way, so no word counts for ever."""
        came = min(nbytes, self.flying_bytes - self.early_bytes)
        if came > 0:
            self.early_bytes += came
            self.pace.came(came, now - self.since)
            self.meter.came(came)
            self.since = now

    def answered(self, batch: int, now: float) -> tuple[tuple[Range, ...], int]:
        """Take a batch out of what is under way; returns its pieces and bytes."""
        ranges, nbytes = self.flying.pop(batch)
        self.flying_bytes -= nbytes
        late_bytes = max(nbytes - self.early_bytes, 0)
        self.pace.came(late_bytes, now - self.since)
        self.meter.came(late_bytes)
        if not self.flying:
            self.meter.ends(now)
        self.early_bytes = max(self.early_bytes - nbytes, 0)
        self.since = now
        return ranges, nbytes

    def decoded(self, encoded: Sequence[Encoded], now: float) -> None:
        """Note what came otherwise than as it is. Of the link it tells nothing."""
        if encoded:
            self.meter.forget(now)
        for each in encoded:
            nbytes, wire_bytes = self.encoded.get(each.how, (0, 0))
            self.encoded[each.how] = nbytes + each.nbytes, wire_bytes + each.wire_bytes

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
        self.checking, self.checking_bytes = len(self.unconfirmed), self.unconfirmed_bytes

    def confirmed(self) -> list[Range]:
        """Count what waited for the source's word when it was asked, and return it."""
        runs = self.checking or len(self.unconfirmed)
        nbytes = self.checking_bytes if self.checking else self.unconfirmed_bytes
        ranges, self.unconfirmed = self.unconfirmed[:runs], self.unconfirmed[runs:]
        self.got(count_of(ranges), nbytes)
        self.unconfirmed_bytes -= nbytes
        self.checking = 0
        self.owed -= count_of(each for each in ranges if each[0] < self.partials)
        return ranges

    def let_all_go(self) -> list[Range]:
        """Take away all that waits."""
        ranges = [*self.queue, *self.parked, *self.gated]
        for place in (self.queue, self.parked, self.gated, self.fresh_gated):
            place.clear()
        return ranges

    def give_up(self) -> list[Range]:
        """Return everything that is with it: nothing more comes."""
        ranges = [*self.let_all_go(), *self.unconfirmed]
        asked = count_of(self.unconfirmed)
        for batch, _ in self.flying.values():
            ranges.extend(batch)
            asked += count_of(batch)
        self.wasted(asked, self.flying_bytes + self.unconfirmed_bytes)
        self.flying.clear()
        self.unconfirmed, self.flying_bytes, self.unconfirmed_bytes, self.early_bytes = [], 0, 0, 0
        self.checking = self.owed = 0
        return ranges
