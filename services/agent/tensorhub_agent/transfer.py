"""One read of one shard: which piece comes from which source, and when a piece counts. Pure.

Always true: a piece is with one source at a time, and is asked for elsewhere only after that source has answered for it
or is closed, so a destination byte has one writer. A piece counts when its digest, taken of the destination, is the one
that the log's root vouches for; without digests, when its source says after the last byte that the lease still held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.proof import Proof
from tensorhub_agent.ranges import mark, marked, merged
from tensorhub_agent.reading import FOREVER, Reading, SourcePhase
from tensorhub_common.errors import IntegrityError, LayoutMismatch, RegistryUnavailable, VersionUnavailable
from tensorhub_common.wire.transfer import Plan, PlanAnswer, Range, Refusal, Share, SourceId

PLAN_S_MAX: Final = 1.0
"""A planner that has not answered within this is asked again."""

PLAN_AGAIN_S: Final = 0.1
"""How long to wait before asking the planner again after a refusal in mid-read."""

PLANS_MAX: Final = 256
"""One read is planned at most so often."""

NO_ANSWER: Final = RegistryUnavailable.__name__
"""The error of a refusal that stands for no answer. Silence says nothing of sources: the planner is asked again."""


class Phase(StrEnum):
    """How far a read is."""

    LEASING = "leasing"
    LEASED = "leased"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Todo:
    """What the read wants of its driver now."""

    plan: tuple[tuple[Range, ...], tuple[SourceId, ...]] | None = None
    open: list[tuple[int, Share]] = field(default_factory=list)
    post: list[tuple[int, int, tuple[Range, ...]]] = field(default_factory=list)
    confirm: list[int] = field(default_factory=list)
    close: list[int] = field(default_factory=list)


class Transfer:
    """A read in progress. Feed it what happens; after each feed take `todo()` and look at `phase`."""

    def __init__(
        self,
        *,
        version: int,
        root: str | None,
        nbytes: Sequence[int],
        verify: bool,
        window_bytes: int,
        stall_s: float,
        sources_lost_s: float,
        first_number: int,
        now: float,
        kept: tuple[bytearray, bytes] | None = None,
    ) -> None:
        """Take the sizes of the shard's pieces, and what an earlier failed read of the same bytes has verified."""
        self.version, self.root = version, root
        self.proof = Proof(len(nbytes), root, kept, verify=verify)
        self.phase = Phase.LEASING
        self.error: tuple[str, str] | None = None
        self.sources: dict[int, Reading] = {}
        self.avoid: list[SourceId] = []
        self.retried = 0
        self.got_bytes = 0
        self.began = self.planned_at = self.leased_at = now
        self.started = self.first_at = self.last_at = self.ended = now
        self._nbytes = nbytes
        self._window_bytes, self._stall_s, self._sources_lost_s = window_bytes, stall_s, sources_lost_s
        self._next = first_number
        self._planning = self._ending = self._damaged = False
        self._plan_at: float | None = now
        self._plan_sent = now
        self._plans = 0
        self._dry_since: float | None = None
        self._loose: list[Range] = self.proof.missing()
        self._todo = Todo()
        if not self._loose:
            self._plan_at = None
            self.phase = Phase.LEASED

    # What happens.

    def planned(self, answer: PlanAnswer, now: float) -> None:
        """Take the planner's answer."""
        if not self._planning or self._ending:
            return
        self._planning = False
        if isinstance(answer, Refusal):
            self._no_plan(answer, now)
            return
        self._dry_since = None
        if self.phase is Phase.LEASING:
            self.planned_at = now
        self._spread(answer, now)

    def opened(self, number: int, digests: bytes, now: float) -> None:
        """Take a granted lease with an open transport."""
        source = self.sources.get(number)
        if source is None or source.phase is not SourcePhase.OPENING:
            return
        if self.proof.verify and not self.proof.vouched(digests):
            self._damaged = True
            self.lost(number, "its digests are not those of the log", now)
            return
        source.phase, source.since = SourcePhase.OPEN, now
        self._advance(now)

    def batch_done(self, number: int, batch: int, digests: bytes, now: float) -> None:
        """Take a batch that stands in the destination, with the digests taken there."""
        source = self.sources.get(number)
        if source is None or batch not in source.flying:
            return
        ranges, nbytes = source.flying.pop(batch)
        source.since = self.last_at = now
        if not self.got_bytes:
            self.first_at = now
        wrong: list[Range] = []
        if self.proof.verify:
            wrong = self.proof.count(ranges, digests)
        else:
            source.unconfirmed.extend(ranges)
        source.got_bytes += nbytes
        source.got_pieces += sum(count for _, count in ranges)
        self.got_bytes += nbytes
        if wrong:
            self._loose.extend(wrong)
            source.retried += sum(count for _, count in wrong)
            self.retried += sum(count for _, count in wrong)
            self._doubt(source)
        self._advance(now)

    def confirmed(self, number: int, holds: bool, now: float) -> None:  # noqa: FBT001 (the source's answer)
        """Take the source's word on whether the lease held up to its last byte."""
        source = self.sources.get(number)
        if source is None or not source.confirming or source.phase is not SourcePhase.OPEN:
            return
        source.confirming, source.since = False, now
        if source.doubted:
            self._damaged = self._damaged or holds
            self.lost(number, "its bytes did not match the digests of the log", now)
            return
        if not holds:
            self.lost(number, "its lease did not hold to the end", now)
            return
        self.proof.confirmed(source.unconfirmed)
        source.unconfirmed.clear()
        self._advance(now)

    def lost(self, number: int, reason: str, now: float) -> None:
        """Leave a source out. What it has under way is asked for elsewhere only once it is closed."""
        source = self.sources.get(number)
        if source is None or source.phase in (SourcePhase.CLOSING, SourcePhase.CLOSED):
            return
        if not source.doubted:
            self.avoid.append(source.share.source)
        source.lost = reason
        self._close(source)
        self._advance(now)

    def closed(self, number: int, now: float) -> None:
        """Nothing more can come from the source."""
        source = self.sources.get(number)
        if source is None or source.phase is SourcePhase.CLOSED:
            return
        source.phase = SourcePhase.CLOSED
        for ranges, _ in source.flying.values():
            source.retried += sum(count for _, count in ranges)
            self.retried += sum(count for _, count in ranges)
            self._loose.extend(ranges)
        self._loose.extend(source.unconfirmed)
        source.flying.clear()
        source.unconfirmed.clear()
        if self._loose and not self._ending and self._plan_at is None and not self._planning:
            self._plan_at = now
        self._advance(now)

    def start(self, now: float) -> None:
        """Write from now on: every shard of the replica has its leases."""
        if self.phase is Phase.LEASED:
            self.phase = Phase.RUNNING
            self.started = self.first_at = self.last_at = now
            self._advance(now)

    def stop(self) -> None:
        """End the read. `quiet` says when nothing can be written any more."""
        self._ending = True
        self._plan_at = None
        for source in self.sources.values():
            if source.phase in (SourcePhase.OPENING, SourcePhase.OPEN):
                self._close(source)

    def tick(self, now: float) -> None:
        """Let time pass: leave out what stalls, ask the planner again."""
        if self._ending:
            return
        for source in list(self.sources.values()):
            if now >= source.since + source.patience_s(self._stall_s):
                self.lost(source.number, "it made no progress", now)
        if self._planning and now >= self._plan_sent + PLAN_S_MAX:
            self.planned(Refusal(error=NO_ANSWER, reason="no planner answered"), now)
        self._advance(now)

    # What follows.

    @property
    def quiet(self) -> bool:
        """Whether no byte can be written into the destination any more.

        What a source has flying is forgotten only when it has answered for it or is closed.
        """
        return all(not source.flying for source in self.sources.values())

    def todo(self) -> Todo:
        """Take what is to be done; the next call returns only what is new."""
        todo, self._todo = self._todo, Todo()
        return todo

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        if self._ending:
            return None
        bounds = [source.since + source.patience_s(self._stall_s) for source in self.sources.values()]
        times = [when for when in bounds if when < FOREVER]
        if self._plan_at is not None:
            times.append(self._plan_at)
        if self._planning:
            times.append(self._plan_sent + PLAN_S_MAX)
        return min(times, default=None)

    @property
    def next_number(self) -> int:
        """The first number that no source of this read has."""
        return self._next

    def done_bytes(self) -> int:
        """Return how much has come, for progress bars."""
        return self.got_bytes

    def keep(self) -> tuple[bytearray, bytes] | None:
        """Return what a later read of the same bytes need not read again."""
        return self.proof.keep()

    def check(self) -> None:
        """Raise AssertionError unless each missing piece is in exactly one place."""
        places = [0] * len(self._nbytes)
        for ranges in (self._loose, *(part for source in self.sources.values() for part in source.places())):
            for first, count in ranges:
                for piece in range(first, first + count):
                    places[piece] += 1
        for piece, count in enumerate(places):
            expected = 0 if self.proof.done[piece] else 1
            assert count == expected or self.phase is Phase.FAILED, f"piece {piece} is in {count} places"

    # How.

    def _no_plan(self, refusal: Refusal, now: float) -> None:
        if refusal.error == LayoutMismatch.__name__:
            self._fail(refusal.error, refusal.reason)
            return
        if refusal.error == NO_ANSWER and self._plans < PLANS_MAX:
            self._plan_at = now + PLAN_AGAIN_S
            return
        self._dry_since = now if self._dry_since is None else self._dry_since
        leasing = self.phase is Phase.LEASING
        if self._plans >= PLANS_MAX or now - self._dry_since >= (0 if leasing else self._sources_lost_s):
            error = IntegrityError if self._damaged else VersionUnavailable
            self._fail(error.__name__, refusal.reason)
            return
        self._plan_at = now + PLAN_AGAIN_S

    def _fail(self, error: str, message: str) -> None:
        self.phase, self.error = Phase.FAILED, (error, message)
        self.stop()

    def _spread(self, plan: Plan, now: float) -> None:
        """Give the loose pieces to the plan's sources; what the plan left out stays loose."""
        loose = bytearray(len(self._nbytes))
        mark(loose, self._loose)
        for share in plan.shares:
            number = self._next
            self._next += 1
            source = Reading(number, share, SourcePhase.OPENING, now)
            for first, count in share.pieces:
                source.queue.extend(marked(loose, first, first + count))
                loose[first : first + count] = bytes(count)
            self.sources[number] = source
            self._todo.open.append((number, share))
        self._loose = marked(loose, 0, len(loose))
        self._advance(now)

    def _doubt(self, source: Reading) -> None:
        """Leave a source out whose bytes were wrong, once it has said whether that is its fault."""
        if source.phase is SourcePhase.OPEN and not source.doubted:
            source.doubted = source.confirming = True
            self.avoid.append(source.share.source)
            self._todo.confirm.append(source.number)

    def _close(self, source: Reading) -> None:
        source.phase = SourcePhase.CLOSING
        source.confirming = False
        self._loose.extend(source.queue)
        source.queue.clear()
        self._todo.close.append(source.number)

    def _advance(self, now: float) -> None:
        if self._ending or self.phase in (Phase.DONE, Phase.FAILED):
            return
        if self._loose and not self._planning and self._plan_at is None and not self._is_closing():
            self._plan_at = now
        if self._plan_at is not None and now >= self._plan_at and not self._planning and not self._is_closing():
            self._ask_plan(now)
        if self.phase is Phase.LEASING and not self._loose and not self._planning and self._all_open():
            self.phase, self.leased_at = Phase.LEASED, now
        if self.phase is Phase.RUNNING:
            self._pump()
            if self.proof.whole:
                self.phase, self.ended = Phase.DONE, now
                self.stop()

    def _is_closing(self) -> bool:
        return any(source.phase is SourcePhase.CLOSING for source in self.sources.values())

    def _all_open(self) -> bool:
        return all(s.phase in (SourcePhase.OPEN, SourcePhase.CLOSED) for s in self.sources.values())

    def _ask_plan(self, now: float) -> None:
        self._plan_at = None
        if not self._loose:
            return
        self._planning, self._plan_sent = True, now
        self._plans += 1
        self._loose = merged(self._loose)
        self._todo.plan = (tuple(self._loose), tuple(self.avoid))

    def _pump(self) -> None:
        flying = sum(source.flying_bytes for source in self.sources.values())
        for source in self.sources.values():
            if source.phase is not SourcePhase.OPEN or source.confirming:
                continue
            if not source.queue and not source.flying:
                source.take_over(self.sources.values())
            while source.queue and flying < self._window_bytes:
                ranges, nbytes = source.cut_batch(self._nbytes)
                source.flying[self._next_batch()] = (ranges, nbytes)
                self._todo.post.append((source.number, self._next - 1, ranges))
                flying += nbytes
            if source.unconfirmed and not source.queue and not source.flying:
                source.confirming = True
                self._todo.confirm.append(source.number)

    def _next_batch(self) -> int:
        self._next += 1
        return self._next - 1
