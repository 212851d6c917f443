"""The sources of one read and the pieces that no source has: which source brings what, and which are left. Pure.

`TransferActions` stores what the read wants of its driver.

Invariants:
- A missing piece is loose or with one source.
- A piece that a source has under way is loose again only once that source is closed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorhub_agent.primitives.ranges import merge_ranges, split_by_marks, take_first, total_count
from tensorhub_agent.rates.link_rates import LinkMeters
from tensorhub_agent.transfer.admission import Admission
from tensorhub_agent.transfer.balancing import check, distribute, feed_idle_sources, fill_window, slowest_replaceable
from tensorhub_agent.transfer.exclusions import Exclusions
from tensorhub_agent.transfer.flow_control import RefillQueue, wants_early_confirmation
from tensorhub_agent.transfer.fold_progress import FoldProgress
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.role_index import (
    AWAITING_FOLD,
    BUSY,
    GIVING,
    LIVE,
    NEW_AWAITING_FOLD,
    PROMISING,
    SETTLED,
    RoleIndex,
    by_number,
)
from tensorhub_agent.transfer.site_handoff import Handoff, SitePeers, hand_off
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.trial import NO_FASTER, Trial
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.protocol.plans import SHARES_MAX, Plan, Share, SourceId
from tensorhub_common.protocol.ranges import Range


@dataclass(slots=True)
class TransferActions:
    """What a read wants of its driver now."""

    plan: tuple[tuple[Range, ...], tuple[SourceId, ...]] | None = None
    open: list[tuple[int, Share]] = field(default_factory=list)
    hold: list[tuple[int, Share]] = field(default_factory=list)
    """Of these the lease alone is wanted, until they enter."""
    enter: list[int] = field(default_factory=list)
    post: list[tuple[int, int, tuple[Range, ...]]] = field(default_factory=list)
    confirm: list[int] = field(default_factory=list)
    accuse: list[int] = field(default_factory=list)
    """Sources whose bytes were wrong though their lease held."""
    close: list[int] = field(default_factory=list)
    fold: list[tuple[int, tuple[Range, ...], tuple[Range, ...]]] = field(default_factory=list)
    """Partials of a source that count now, and scales that follow: (source, partials, scales); comes before `post`."""
    ceded: list[Handoff] = field(default_factory=list)
    """Of what would be this reader's to bring over to its site, what a peer brings over from now on."""
    proven: list[Range] = field(default_factory=list)
    """Pieces that stand in the destination, verified: others may read them there."""


def every_piece(_: Share) -> bytearray | None:
    """Say of a source of the reader's own layout that it has every piece."""
    return None


def no_piece(_: Share) -> bytearray | None:
    """Say of a source of the reader's own layout that it computes no piece of parts of blocks."""
    return None


class SourcePool:
    """The sources of a read whose shard has pieces of these sizes."""

    def __init__(
        self,
        nbytes: Sequence[int],
        proof: Verification,
        *,
        limits: TransferLimits,
        first_number: int,
        able: Callable[[Share], bytearray | None],
        by_amax: Callable[[Share], bytearray | None] = no_piece,
        folds: AmaxReductions | None = None,
    ) -> None:
        """Begin with no source; `able` returns marks of the pieces that a share's source has or will have.

        `by_amax` returns marks of those that it computes of parts of blocks; `folds` says what these need.
        """
        self.by_number: dict[int, Source] = {}
        self.fold_progress = FoldProgress(folds, len(nbytes))
        self.loose = self.fold_progress.apart(proof.missing())[1]
        """What is missing, and no source is to bring."""
        self.index, self._admission = RoleIndex(limits), Admission()
        self._live_as: dict[tuple[SourceId, str, bool, int], Source] = {}
        """The last session of each kind with each source."""
        self._refill_queue = RefillQueue()
        self.actions = TransferActions()
        self.exclusions, self.trial, self.meters = Exclusions(), Trial(limits), LinkMeters()
        self.site_peers = SitePeers(self.loose, self.index, len(nbytes))
        self.next_number = first_number
        """The first number that no source and no batch of this read has."""
        self._nbytes, self._limits, self._able, self._by_amax = nbytes, limits, able, by_amax
        self._verification = proof
        self._slow_closed = 0
        self._slow: Source | None = None
        """The one that was closed last for being slow."""

    # The sources that exist.

    def open_one(self, number: int) -> Source | None:
        """Return the source of this number if it is open."""
        source = self.by_number.get(number)
        return source if source is not None and source.phase is SourcePhase.OPEN else None

    @property
    def is_settled(self) -> bool:
        """Whether the leases are there, on all that is missing."""
        return not self.loose and self.index.is_settled

    @property
    def is_whole(self) -> bool:
        """Whether all pieces are done that are wanted: partials need not come."""
        return self._verification.done.find(0, self.fold_progress.partials) == -1

    def left_out(self) -> tuple[SourceId, ...]:
        """Return the sources that a plan is not to name now."""
        return (*self.exclusions.left_out(), *self.trial.avoid)

    def committed(self) -> list[Range]:
        """Return what is under way, or waits its turn at a source that has it: no other reader has to get it first."""
        self.index.settle()
        there = by_number(self.index.of(SETTLED))
        flying = [run for source in there for ranges, _ in source.in_flight.values() for run in ranges]
        come = [run for source in there for run in source.unconfirmed]
        return [*flying, *come, *(run for source in there for run in source.queue)]

    def awaiting_others(self) -> list[Range]:
        """Return what waits for others to get it."""
        self.index.settle()
        return [run for source in by_number(self.index.of(GIVING)) for run in source.awaiting_source]

    def exist(self, pieces: Sequence[Range]) -> bool:
        """Tell whether these are pieces of this shard, whatever a source says."""
        return all(first >= 0 and 0 < count <= len(self._nbytes) - first for first, count in pieces)

    def check(self, done: bytearray) -> None:
        """Raise AssertionError unless each piece that is not done is in exactly one place."""
        check(done, self.loose, self.by_number.values(), self.fold_progress.places())
        self.index.check()
        for source in self.by_number.values():
            assert source.in_flight_bytes == sum(nbytes for _, nbytes in source.in_flight.values()), source.number

    def check_fed(self) -> None:
        """Raise AssertionError when a source has nothing under way though it could."""
        for source in self.by_number.values():
            starved = source.is_ready and source.queue and not source.in_flight and not source.confirming_early
            assert not starved, f"source {source.number} has pieces to bring, and is asked for none"

    # Which source brings which piece.

    def spread(self, plan: Plan, now: float) -> bool:
        """Give the loose pieces to the plan's sources; what the plan left out stays loose. False: it gave none."""
        before = total_count(self.loose)
        self.site_peers.crossers = self.site_peers.crossers or plan.crossers
        given, self.loose[:] = self.fold_progress.spread(plan, self.loose, len(self._nbytes))
        for share, ranges in given:
            for stream in range(share.streams):
                part = take_first(ranges, -(-total_count(ranges) // (share.streams - stream)))
                can = part and not self.exclusions.has_failed(share.source)
                source = self._source_of(share, stream, now) if can else None
                if source is None:
                    self.loose.extend(part)
                else:
                    source.give(part)
        self._follow()
        return not before or total_count(self.loose) < before

    def _source_of(self, share: Share, stream: int, now: float) -> Source | None:
        """Return the live source that is a share's stream, or open it; None where more can't be open."""
        wanted = (share.source, share.transport, share.crosses, stream)
        known = self._live_as.get(wanted)
        if known is not None and known.is_live:
            return known
        self.index.settle()
        live = self.index.of(LIVE)
        if len(live) >= SHARES_MAX:
            whole = [source for source in live.values() if source.covered is None]
            return min(whole, key=lambda each: (each.waiting, each.number), default=None)
        source = Source(
            self.next_number, share, SourcePhase.OPENING, now, covered=self._able(share), limits=self._limits
        )
        source.partials, source.unknown = self.fold_progress.partials, self.fold_progress.unknown
        source.by_amax = self._by_amax(share)
        source.is_readmitted = self.exclusions.has_forgiven(share.source)
        source.meter = self.meters.of(share)
        self.next_number += 1
        self.by_number[source.number] = self._live_as[wanted] = source
        self._admission.add(source)
        self.index.add(source)
        return source

    def hold(self, source: Source) -> None:
        """Take note that a lease is there; the source waits to enter."""
        self._admission.hold(source)

    def open(self, now: float) -> None:
        """Let sources in, and ask others for their leases, whose turn it is."""
        if not self._admission.are_awaited:
            return
        self.actions.enter += self._admission.admit(self.index, now)
        for number, share, is_held in self._admission.request_leases(self.index, now):
            (self.actions.hold if is_held else self.actions.open).append((number, share))

    def share_out(self, *, is_told: bool) -> bool:
        """Give what is loose to those that there are; tells whether they take all of it.

        `is_told`: a planner has said that no other holder has it; without its word it is unknown which holder has it
        computed.
        """
        self.index.settle()
        live = by_number(self.index.of(LIVE))
        others = self._give_doubted(live) if is_told else live
        if others:
            distribute(self.loose, others)
        if others and self.loose and not is_told:
            self.loose += self.fold_progress.request_partials(self.loose)
            self._follow()
            distribute(self.loose, others)
        return bool(live) and not self.loose

    def _give_doubted(self, sources: Sequence[Source]) -> list[Source]:
        """Give peers that were waited for in vain only what they have or promise; return the other sources.

        Two peers that lack the same piece would else wait for each other until their calls end.
        """
        others = []
        for source in sources:
            if source.share.source in self.site_peers.not_bringing and source.has is not None:
                source.give(source.of_use(self.loose))
            else:
                others.append(source)
        return others

    # Folds.

    def folded(self, number: int, partials: Sequence[Range]) -> None:
        """Count partials of a source, and the scales that follow; ask for what has waited for them."""
        scales, is_known = self.fold_progress.folded(partials)
        self._fold(number, partials, scales)
        if is_known:
            self.index.settle()
            for source in by_number(self.index.of(AWAITING_FOLD)):
                source.freed()

    def _follow(self) -> None:
        """Leave scales that no source brings to their folds; some of these may be known."""
        self.loose[:], known = self.fold_progress.follow(self.loose)
        if known:
            self._fold(0, (), known)

    def _fold(self, number: int, partials: Sequence[Range], scales: Sequence[Range]) -> None:
        self.actions.fold.append((number, tuple(partials), tuple(scales)))
        self._verification.confirmed([*partials, *scales])
        self.actions.proven.extend(scales)

    def wake(self) -> None:
        """Want the partials without which sources can't be asked for what was given to them."""
        if not self.fold_progress.partials:
            return
        self.index.settle()
        for source in by_number(self.index.of(NEW_AWAITING_FOLD)):
            self.loose += self.fold_progress.request_partials(source.take_new_awaiting_fold())

    def give_up_folds(self) -> None:
        """Let partials sleep that no source has, so that the next plan may do without them."""
        partials, others = self.fold_progress.apart(self.loose)
        if partials:
            scales, values = self.fold_progress.defer_partials(partials)
            self.index.settle()
            back = [run for source in by_number(self.index.of(AWAITING_FOLD)) for run in source.give_back(values)]
            self.loose[:] = merge_ranges([*others, *scales, *back])

    def cede(self, began: float, now: float) -> None:
        """Hand over to peers what would take a slow far source too long."""
        self.index.settle()
        self.actions.ceded += hand_off(by_number(self.index.of(LIVE)), self._nbytes, began, now)

    def to_be_planned(self) -> tuple[Range, ...]:
        """Return for what a plan is asked next: what was inherited by itself, for it is divided otherwise."""
        self.loose[:] = merge_ranges(self.loose)
        return self.site_peers.inherited(self.loose) or self.fold_progress.choice(self.loose)

    def lose_agent(self, agent: str, incarnation: int) -> None:
        """Take note that the log has lost an agent: who is silent there is not waited for much longer."""
        for source in self.by_number.values():
            if source.share.source.agent == agent and source.share.source.incarnation <= incarnation:
                source.mark_agent_lost()

    def pump(self, now: float, *, is_asking: bool, is_relayed: bool) -> None:
        """Ask every source for as much as its part of the window allows, and idle ones for what others have waiting.

        `is_asking`: a question for a plan is out; `is_relayed`: others wait for what comes here.
        """
        index = self.index
        if is_relayed != self._refill_queue.is_relayed:
            self._refill_queue.is_relayed = is_relayed
            index.refresh()
        index.settle()
        for in_vain in self.trial.look(index.of(LIVE).values(), self.loose, self._nbytes, now, asks=is_asking):
            self.close(in_vain, NO_FASTER)
        index.settle()
        if not index.fresh and self.loose == index.offered:
            # No source has changed, and what is loose was offered to all that are idle.
            return
        feed_idle_sources(index, self.loose)
        if self._admission.are_awaited:
            for source in self._admission.leaving(index):
                self.close(source)
        index.settle()
        part_bytes = self._limits.window_bytes // max(index.count(BUSY), 1)
        room_bytes = self._limits.window_bytes - index.in_flight_bytes
        for source in self._refill_queue.affected(index, part_bytes):
            room_bytes = self._ask(source, part_bytes, room_bytes, now)
        waiting = self._refill_queue.waiting()
        while room_bytes > 0 and (waiter := next(waiting, None)) is not None:
            room_bytes = self._ask(waiter, part_bytes, room_bytes, now)
        index.settle()
        index.fresh.clear()

    def _ask(self, source: Source, part_bytes: int, room_bytes: int, now: float) -> int:
        """Ask a source for as much as it may have under way, and for its word on what came; return the room left."""
        if not source.is_ready:
            return room_bytes
        is_relayed = self._refill_queue.is_relayed
        if source.queue:
            for ranges, nbytes in fill_window(source, self._nbytes, part_bytes, room_bytes, relayed=is_relayed):
                source.asked(self.next_number, ranges, nbytes, now)
                self.actions.post.append((source.number, self.next_number, ranges))
                self.next_number += 1
                room_bytes -= nbytes
            self._refill_queue.stopped(source, part_bytes)
        if source.unconfirmed and not source.confirming_early:
            self._ask_to_confirm(source, now, is_relayed=is_relayed)
        return room_bytes

    def _ask_to_confirm(self, source: Source, now: float, *, is_relayed: bool) -> None:
        """Ask whether the lease held, when all has come; where others wait for it, on the way too."""
        if not source.queue and not source.in_flight:
            source.asks_to_confirm(now)
        elif wants_early_confirmation(source, is_relayed=is_relayed):
            source.check_early()
        else:
            return
        self.actions.confirm.append(source.number)

    def count(self, source: Source, ranges: tuple[Range, ...], nbytes: int, digests: bytes) -> None:
        """Count what has the right digests; what has not is loose again."""
        wrong = self._verification.count(ranges, digests)
        wrong_bytes = sum(sum(self._nbytes[first : first + count]) for first, count in wrong)
        source.got(total_count(ranges) - total_count(wrong), nbytes - wrong_bytes)
        if not wrong:
            self.actions.proven.extend(ranges)
            return
        self.actions.proven.extend(split_by_marks(self._verification.done, ranges)[0])
        source.wasted(total_count(wrong), wrong_bytes)
        self.loose.extend(wrong)
        self.doubt(source)

    # Which sources are left out.

    def began(self, now: float) -> None:
        """Expect of all sources from now on that they bring something."""
        self.index.begins()
        for source in self.index.of(LIVE).values():
            source.begins(now)

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of this process out of what its sources are silent for."""
        for source in self.index.of(LIVE).values():
            source.paused(late_s, now)
        self.meters.paused(late_s, now)

    def doubt(self, source: Source) -> None:
        """Leave a source out whose bytes were wrong, once it has said whether that is its fault."""
        if source.phase is SourcePhase.OPEN and not source.is_suspect:
            source.mark_suspect()
            self.exclusions.fail(source.share.source)
            self.actions.confirm.append(source.number)

    def leave(self, source: Source, reason: str) -> None:
        """Close a source that may be good for something later: also one that was late to open, but once."""
        if source.phase is SourcePhase.OPENING and self.exclusions.has_forgiven(source.share.source):
            self.exclusions.fail(source.share.source)
        elif not source.is_suspect:
            self.exclusions.exclude_for_now(source.share.source)
        self.close(source, reason)

    def leave_slow(self, now: float) -> None:
        """Close a source whose pieces an idle one brings much sooner; one at a time."""
        if self._slow_closed >= self._limits.slow_closed_max or self.loose:
            return
        if self._slow is not None and self._slow.phase is SourcePhase.CLOSING:
            return
        slow = slowest_replaceable(self.index, now)
        if slow is not None:
            self._slow_closed += 1
            self._slow = slow
            self.leave(slow, "it was slow, and another source had nothing left to bring")

    def overdue(self, now: float) -> list[Source]:
        """Return the sources whose deadline has passed."""
        return self.index.overdue(now)

    def waiting_unpromised(self) -> list[Source]:
        """Return the sources that may have pieces waiting that they have not promised."""
        self.index.settle()
        return by_number(self.index.of(PROMISING))

    def close(self, source: Source, reason: str = "") -> None:
        """Want a source closed; what waits at it others may bring at once. `reason`: why before its end."""
        source.closes(reason)
        self.loose.extend(source.take_all_back())
        if source.is_asked:
            self.actions.close.append(source.number)

    def close_all(self) -> None:
        """Want every source closed that is not yet."""
        for source in self.by_number.values():
            if source.phase in (SourcePhase.OPENING, SourcePhase.HELD, SourcePhase.OPEN):
                self.close(source)

    def closed(self, source: Source, now: float) -> None:
        """Nothing more can come from the source: what it had under way others may bring."""
        source.ends(now)
        self.loose.extend(source.give_up())
