"""One read of one shard: which piece comes from which source, and when a piece counts. Pure.

Always true: a piece is with one source at a time, and is asked for elsewhere only after that source has answered for it
or is closed, so a destination byte has one writer. A piece counts when its digest, taken of the destination, is the one
that the log's root vouches for; without digests, when its source says after the last byte that the lease still held.
What it does about sources that are killed, stopped, slow or cut off: docs/protocol.md, "Faults during a transfer".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.asking import NO_ANSWER, PLANS_MAX, Asking
from tensorhub_agent.effects import Base
from tensorhub_agent.meter import Meters
from tensorhub_agent.proof import Proof
from tensorhub_agent.ranges import count_of, merged, split, take_first
from tensorhub_agent.reading import FOREVER, Reading, SourcePhase
from tensorhub_agent.sharing import check, feed, fill, share_out, spread, too_slow
from tensorhub_agent.trial import NO_FASTER, Trial
from tensorhub_agent.trust import Trust
from tensorhub_common.errors import IntegrityError, LayoutMismatch, VersionUnavailable
from tensorhub_common.wire.transfer import SHARES_MAX, Plan, PlanAnswer, Range, Refusal, Share, SourceId
from tensorhub_common.wire.worker import Encoded

LOOK_S: Final = 0.25
"""While anything is awaited the read wants to be called so often, to see slow sources and its own pauses."""

LATE_S: Final = 0.1
"""What a call comes later than wanted, by more than this, is a pause of the reader, and no source's fault."""

RELAYED_BYTES: Final = 8 * 1024 * 1024
"""A source is asked for its word on so much at a time, where others wait for what it brings."""

SLOW_CLOSED_MAX: Final = 4
"""So many sources are closed for being slow in one read."""


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
    proven: list[Range] = field(default_factory=list)
    """Pieces that stand in the destination, verified: others may read them there."""


def everything(_: Share) -> bytearray | None:
    """Say of a source of the reader's own layout that it has every piece."""
    return None


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
        able: Callable[[Share], bytearray | None] = everything,
    ) -> None:
        """Take the sizes of the shard's pieces, and what an earlier failed read of the same bytes has verified.

        Of a shard that is filled from other layouts than its own they are the units of a program, and `verify` is off:
        no list of digests is about them. `able` returns marks of those that a share's source has or will have.
        """
        self._able = able
        self.version, self.root = version, root
        self.proof = Proof(len(nbytes), root, kept, verify=verify)
        self.phase = Phase.LEASING
        self.error: tuple[str, str] | None = None
        self.sources: dict[int, Reading] = {}
        self.trust, self.trial, self.meters = Trust(), Trial(), Meters()
        self.asking = Asking(now)
        self.began = self.planned_at = self.leased_at = now
        self.started = self.first_at = self.last_at = self.ended = now
        self._nbytes = nbytes
        self._window_bytes, self._stall_s, self._sources_lost_s = window_bytes, stall_s, sources_lost_s
        self._next = first_number
        self._ending = self._damaged = self._begun = False
        self.base: Base | None = None
        """What stood in the destination, whole, when the read began."""
        self.is_relayed = False
        """Others read what is being filled here, and wait for it."""
        self._seen = now
        self._slow_closed = 0
        self.uncrossed: dict[SourceId, None] = {}
        """Who does not bring over to the site what would be its part."""
        self._loose: list[Range] = self.proof.missing()
        self._todo = Todo()
        if not self._loose:
            self.asking.at = None
            self.phase = Phase.LEASED

    # What happens.

    def planned(self, answer: PlanAnswer, now: float) -> None:
        """Take the planner's answer."""
        if not self.asking.waiting or self._ending:
            return
        self.asking.waiting = False
        if isinstance(answer, Refusal):
            self._no_plan(answer, now)
        elif self._spread(answer, now):
            self.asking.planned()
            if self.phase is Phase.LEASING:
                self.planned_at = now
        else:
            # It names whoever failed while it was made; that says nothing of others.
            self._no_plan(Refusal(error=NO_ANSWER, reason="the plan names no source that is left"), now)
        self._advance(now)

    def opened(
        self,
        number: int,
        digests: bytes,
        now: float,
        pieces: Sequence[Range] | None = None,
        *,
        promises: bool = False,
    ) -> None:
        """Take a granted lease with an open transport. `pieces` are what a half-filled source has so far.

        `promises`: of the others only those are awaited that it promises.
        """
        source = self.sources.get(number)
        if source is None or source.phase is not SourcePhase.OPENING:
            return
        if self.proof.verify and not self.proof.vouched(digests):
            self._damaged = True
            self.lost(number, "its digests are not those of the log", now)
            return
        source.phase, source.since = SourcePhase.OPEN, now
        if pieces is not None:
            source.fills(len(self._nbytes), pieces, now, promises=promises)
        self._advance(now)

    def available(self, number: int, pieces: Sequence[Range], now: float) -> None:
        """Take note of what a half-filled source has now."""
        source = self.sources.get(number)
        if source is not None and source.phase is SourcePhase.OPEN and self._exist(pieces):
            source.available(pieces, now)
            self._advance(now)

    def promised(self, number: int, pieces: Sequence[Range]) -> None:
        """Take note of what a half-filled source has under way: it may be waited for."""
        source = self.sources.get(number)
        if source is not None and source.phase is SourcePhase.OPEN and self._exist(pieces):
            source.promises(pieces)

    def retracted(self, number: int, pieces: Sequence[Range], now: float) -> None:
        """Take note of what a half-filled source waits for itself: it has to come from elsewhere."""
        source = self.sources.get(number)
        if source is not None and source.phase is SourcePhase.OPEN and self._exist(pieces):
            self._doubted(source, source.retracts(pieces))
            self._advance(now)

    def _doubted(self, source: Reading, given_up: Sequence[Range]) -> None:
        """Have others bring over what a source does not: it is good for what it has."""
        if given_up:
            self.uncrossed[source.share.source] = None
            self._loose.extend(given_up)

    def _exist(self, pieces: Sequence[Range]) -> bool:
        """Tell whether these are pieces of this shard, whatever a source says."""
        return all(first >= 0 and 0 < count <= len(self._nbytes) - first for first, count in pieces)

    def progressed(self, number: int, nbytes: int, now: float) -> None:
        """Take note of bytes that have come within a batch."""
        source = self.sources.get(number)
        if source is not None and source.phase is SourcePhase.OPEN:
            source.progressed(nbytes, now)

    def batch_done(self, number: int, batch: int, digests: bytes, now: float, encoded: Sequence[Encoded] = ()) -> None:
        """Take a batch that stands in the destination, with the digests taken there; `encoded` came in fewer bytes."""
        source = self.sources.get(number)
        if source is None or batch not in source.flying:
            return
        ranges, nbytes = source.answered(batch, now)
        source.decoded(encoded, now)
        self.last_at = now
        if not self._begun:
            self._begun, self.first_at = True, now
        if self.proof.verify:
            self._count(source, ranges, nbytes, digests)
        else:
            source.unconfirmed.extend(ranges)
            source.unconfirmed_bytes += nbytes
        self._advance(now)

    def confirmed(self, number: int, holds: bool, now: float) -> None:  # noqa: FBT001 (the source's answer)
        """Take the source's word on whether the lease held up to its last byte."""
        source = self.sources.get(number)
        asked = source is not None and (source.confirming or source.checking)
        if source is None or not asked or source.phase is not SourcePhase.OPEN:
            return
        source.confirming, source.since = False, now
        if source.doubted:
            self._damaged = self._damaged or holds
            self.lost(number, "its bytes did not match the digests of the log", now)
            return
        if not holds:
            self.lost(number, "its lease did not hold to the end", now)
            return
        ranges = source.confirmed()
        self.proof.confirmed(ranges)
        self._todo.proven.extend(ranges)
        self._advance(now)

    def lost(self, number: int, reason: str, now: float) -> None:
        """Leave a source out. What it has under way is asked for elsewhere only once it is closed."""
        source = self.sources.get(number)
        if source is None or source.phase in (SourcePhase.CLOSING, SourcePhase.CLOSED):
            return
        self.trust.fail(source.share.source)
        source.lost = reason
        self._close(source)
        self._advance(now)

    def closed(self, number: int, now: float) -> None:
        """Nothing more can come from the source."""
        source = self.sources.get(number)
        if source is None or source.phase is SourcePhase.CLOSED:
            return
        source.phase = SourcePhase.CLOSED
        if source.flying:
            source.meter.ends(now)
        self._loose.extend(source.give_up())
        self._advance(now)

    def start(self, now: float) -> None:
        """Write from now on: every shard of the replica has its leases."""
        if self.phase is Phase.LEASED:
            self.phase = Phase.RUNNING
            self.started = self.first_at = self.last_at = now
            for source in self.sources.values():
                source.since = source.fed = now
            self._advance(now)

    @property
    def has_nothing(self) -> bool:
        """Whether a plan is awaited for all of it: nothing has come, and nothing can come of what was asked for."""
        return self.asking.waiting and not self._ending and count_of(self._loose) == len(self._nbytes)

    def goes_on(self, before: "Transfer") -> None:
        """Take the place of a read that has nothing: as far as that has come, this one has."""
        self.phase, self.began, self.leased_at = before.phase, before.began, before.leased_at
        self.started, self.first_at, self.last_at = before.started, before.first_at, before.last_at

    def stop(self) -> None:
        """End the read. `quiet` says when nothing can be written any more."""
        self._ending = True
        for source in self.sources.values():
            if source.phase in (SourcePhase.OPENING, SourcePhase.OPEN):
                self._close(source)

    def tick(self, now: float) -> None:
        """Let time pass: leave out what stalls or is slow, ask the planner again."""
        if self._ending:
            return
        self._look(now)
        for source in list(self.sources.values()):
            if now >= self._due(source):
                self._leave(source, "it made no progress")
            elif source.promised is not None:
                self._doubted(source, source.despair(now))
        if self.asking.is_silent(now):
            self.planned(Refusal(error=NO_ANSWER, reason="no planner answered"), now)
        self._advance(now)
        if self.phase is Phase.RUNNING and self._slow_closed < SLOW_CLOSED_MAX:
            self._leave_slow(now)

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
        bounds = [self._due(source) for source in self.sources.values()]
        times = [when for when in bounds if when < FOREVER]
        if times:
            times.append(self._seen + LOOK_S)
        plan_at = self.asking.deadline()
        if plan_at is not None:
            times.append(plan_at)
        return min(times, default=None)

    def _due(self, source: Reading) -> float:
        """Return when a source is left; before the read begins nothing is expected of an open one."""
        if self.phase is not Phase.RUNNING and source.phase is SourcePhase.OPEN:
            return FOREVER
        return source.due(self._stall_s)

    @property
    def next_number(self) -> int:
        """The first number that no source of this read has."""
        return self._next

    def firm(self) -> list[Range]:
        """Return what is under way, or waits its turn at a source that has it: nobody else has to get it first."""
        open_ = [source for source in self.sources.values() if source.phase is SourcePhase.OPEN]
        flying = [run for source in open_ for ranges, _ in source.flying.values() for run in ranges]
        return [*flying, *(run for source in open_ for run in source.queue)]

    def awaited(self) -> list[Range]:
        """Return what waits for others to get it."""
        return [run for source in self.sources.values() for run in source.parked]

    def done_bytes(self) -> int:
        """Return how much has come, for progress bars."""
        return sum(source.got_bytes + source.unconfirmed_bytes for source in self.sources.values())

    def check(self) -> None:
        """Raise AssertionError unless each missing piece is in exactly one place, and no source is starved."""
        if self.phase is not Phase.FAILED:
            check(self.proof.done, self._loose, self.sources.values())
        if self.phase is Phase.RUNNING and not self._ending:
            for source in self.sources.values():
                starved = source.is_ready and source.queue and not source.flying
                assert not starved, f"source {source.number} has pieces to bring, and is asked for none"

    # Planning.

    def _no_plan(self, refusal: Refusal, now: float) -> None:
        """Nobody new brings what is loose: the open sources do, or it is asked again, or the read fails."""
        if refusal.error == LayoutMismatch.__name__:
            self._fail(refusal.error, refusal.reason)
            return
        others = [source for source in self.sources.values() if source.is_live]
        if others and self.phase is Phase.RUNNING:
            share_out(self._loose, others)
            if not self._loose:
                return
        lost_s = 0.0 if self.phase is Phase.LEASING else self._sources_lost_s
        if not self.asking.refused(refusal, self.trust, lost_s, now):
            self._fail_without(refusal.reason)

    def _fail_without(self, reason: str) -> None:
        self._fail((IntegrityError if self._damaged else VersionUnavailable).__name__, reason)

    def _fail(self, error: str, message: str) -> None:
        self.phase, self.error = Phase.FAILED, (error, message)
        self.stop()

    def _ask_plan(self, now: float) -> None:
        if self.asking.count >= PLANS_MAX:
            self._fail_without(f"the read was planned {PLANS_MAX} times, and its sources failed each time")
            return
        self.asking.asked(now)
        self._loose = merged(self._loose)
        self._todo.plan = (tuple(self._loose), (*self.trust.left_out(), *self.trial.avoid))

    def _spread(self, plan: Plan, now: float) -> bool:
        """Give the loose pieces to the plan's sources; what the plan left out stays loose. False: it gave none."""
        before = count_of(self._loose)
        given, self._loose = spread(plan, self._loose, len(self._nbytes))
        for share, ranges in given:
            for stream in range(share.streams):
                part = take_first(ranges, -(-count_of(ranges) // (share.streams - stream)))
                can = part and not self.trust.has_failed(share.source)
                source = self._source_of(share, stream, now) if can else None
                if source is None:
                    self._loose.extend(part)
                else:
                    source.give(part)
        return not before or count_of(self._loose) < before

    def _source_of(self, share: Share, stream: int, now: float) -> Reading | None:
        """Return the live source that is a share's stream, or open it; None where more can't be open."""
        live = [source for source in self.sources.values() if source.is_live]
        wanted = (share.source, share.transport, share.crosses, stream)
        for source in live:
            known = source.share
            if (known.source, known.transport, known.crosses, source.stream) == wanted:
                return source
        if len(live) >= SHARES_MAX:
            return min((source for source in live if source.able is None), key=lambda each: each.waiting, default=None)
        source = Reading(self._next, share, SourcePhase.OPENING, now, able=self._able(share), stream=stream)
        source.pace.is_trusted = self.trust.has_forgiven(share.source)
        source.meter = self.meters.of(share)
        self._next += 1
        self.sources[source.number] = source
        self._todo.open.append((source.number, share))
        return source

    # Sources.

    def _count(self, source: Reading, ranges: tuple[Range, ...], nbytes: int, digests: bytes) -> None:
        """Count what has the right digests; what has not is loose again."""
        wrong = self.proof.count(ranges, digests)
        wrong_bytes = sum(sum(self._nbytes[first : first + count]) for first, count in wrong)
        source.got(count_of(ranges) - count_of(wrong), nbytes - wrong_bytes)
        self._todo.proven.extend(split(self.proof.done, ranges)[0] if wrong else ranges)
        if wrong:
            source.wasted(count_of(wrong), wrong_bytes)
            self._loose.extend(wrong)
            self._doubt(source)

    def _doubt(self, source: Reading) -> None:
        """Leave a source out whose bytes were wrong, once it has said whether that is its fault."""
        if source.phase is SourcePhase.OPEN and not source.doubted:
            source.doubted = source.confirming = True
            self.trust.fail(source.share.source)
            self._todo.confirm.append(source.number)

    def _look(self, now: float) -> None:
        """Take a pause of this process out of what its sources are silent for."""
        due = self.deadline()
        late_s = now - due if due is not None else 0.0
        if late_s > LATE_S:
            for source in self.sources.values():
                source.since, source.fed = min(source.since + late_s, now), min(source.fed + late_s, now)
            self.meters.paused(late_s, now)
        self._seen = max(self._seen, now)

    def _leave(self, source: Reading, reason: str) -> None:
        """Close a source that may be good for something later."""
        if source.phase is SourcePhase.OPENING:
            self.trust.fail(source.share.source)
        elif not source.doubted:
            self.trust.suspect(source.share.source)
        source.lost = reason
        self._close(source)

    def _leave_slow(self, now: float) -> None:
        """Close a source whose pieces an idle one brings much sooner; one at a time."""
        sources = list(self.sources.values())
        if self._loose or any(source.slow and source.phase is SourcePhase.CLOSING for source in sources):
            return
        slow = too_slow(sources, now)
        if slow is not None:
            self._slow_closed += 1
            slow.slow = True
            self._leave(slow, "it was slow, and another source had nothing left to bring")

    def _close(self, source: Reading) -> None:
        source.phase = SourcePhase.CLOSING
        source.confirming = False
        self._loose.extend(source.let_all_go())
        self._todo.close.append(source.number)

    # Getting on.

    def _advance(self, now: float) -> None:
        if self._ending or self.phase in (Phase.DONE, Phase.FAILED):
            return
        if self.phase is Phase.RUNNING:
            self._pump(now)
            if self.proof.whole:
                self.phase, self.ended = Phase.DONE, now
                self.stop()
                return
        if not self._loose:
            self.asking.rest()
        elif self.asking.want(now):
            self._ask_plan(now)
        if self.phase is Phase.LEASING and not self._loose and not self.asking.waiting and self._is_settled():
            self.phase, self.leased_at = Phase.LEASED, now

    def _is_settled(self) -> bool:
        """Tell whether the leases are there: of a group's crossers one may come late, as long as anybody is open."""
        sources = [source for source in self.sources.values() if source.phase is not SourcePhase.CLOSED]
        late = [source for source in sources if source.phase is SourcePhase.OPENING and source.share.crosses]
        rest = [source for source in sources if source not in late]
        return all(source.phase is SourcePhase.OPEN for source in rest) and (bool(rest) or not late)

    def _pump(self, now: float) -> None:
        """Ask every source for as much as its part of the window allows, and idle ones for what others have waiting."""
        sources = list(self.sources.values())
        in_vain = self.trial.look(sources, self._loose, self._nbytes, now, asks=self.asking.waiting)
        if in_vain is not None:
            in_vain.lost = NO_FASTER
            self._close(in_vain)
        feed(sources, self._loose)
        busy = sum(1 for source in sources if source.phase is SourcePhase.OPEN and (source.queue or source.flying))
        share_bytes = self._window_bytes // max(busy, 1)
        room_bytes = self._window_bytes - sum(source.flying_bytes for source in sources)
        for source in sources:
            if not source.is_ready:
                continue
            for ranges, nbytes in fill(source, self._nbytes, share_bytes, room_bytes, relayed=self.is_relayed):
                source.asked(self._next, ranges, nbytes, now)
                self._todo.post.append((source.number, self._next, ranges))
                self._next += 1
                room_bytes -= nbytes
            if not source.unconfirmed or source.checking:
                continue
            if not source.queue and not source.flying:
                source.confirming, source.since = True, now
                self._todo.confirm.append(source.number)
            elif self.is_relayed and source.unconfirmed_bytes >= RELAYED_BYTES:
                source.check_early()
                self._todo.confirm.append(source.number)
