"""One read of one shard: which piece comes from which source, and when a piece counts. Pure.

docs/design/protocol/transfer-faults.md has what a read does about sources that are killed, stopped, slow or cut off.

Invariants:
- A piece is with one source at a time. It is asked for elsewhere only after that source has answered for it or is
  closed. So a destination byte has one writer.
- With digests, a piece counts when its digest, taken of the destination, is the one that the log's root vouches for.
- Without digests, a piece counts when its source confirms, after the last byte, that the lease still held.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.primitives.ids import BaseVersion
from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_S_MAX, PLANS_MAX, PlanRequests
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.source_pool import SourcePool, TransferActions, every_piece, no_piece
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.errors import IntegrityError, LayoutMismatch, VersionUnavailable
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.protocol.plans import PlanAnswer, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.protocol.worker import EncodedBytes


class TransferPhase(StrEnum):
    """How far a read is."""

    LEASING = "leasing"
    LEASED = "leased"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """A read in progress. Feed it what happens; after each feed take `take_actions()` and look at `phase`."""

    def __init__(
        self,
        *,
        version: int,
        root: str | None,
        nbytes: Sequence[int],
        verify: bool,
        limits: TransferLimits,
        first_number: int,
        now: float,
        kept: tuple[bytearray, bytes] | None = None,
        able: Callable[[Share], bytearray | None] = every_piece,
        by_amax: Callable[[Share], bytearray | None] = no_piece,
        folds: AmaxReductions | None = None,
    ) -> None:
        """Take the sizes of the shard's pieces, and what an earlier failed read of the same bytes has verified.

        Of a shard that is filled from other layouts than its own they are the units of a program, and `verify` is off:
        no list of digests is about them. `able` returns marks of those that a share's source has or will have,
        `by_amax` of those that it computes of parts of blocks; `folds` says what these need.
        """
        self.version, self.root = version, root
        self.verification = Verification(len(nbytes), root, kept, verify=verify)
        self.phase = TransferPhase.LEASING
        self.error: tuple[str, str] | None = None
        self.pool = SourcePool(
            nbytes,
            self.verification,
            limits=limits,
            first_number=first_number,
            able=able,
            by_amax=by_amax,
            folds=folds,
        )
        self.plan_requests = PlanRequests(now)
        self.planned_at = self.leased_at = now
        self.started = self.first_at = self.last_at = self.ended = now
        self._nbytes, self._limits = nbytes, limits
        self._ending = self._damaged = self._begun = False
        self._wrong: SourceId | None = None
        """Whose bytes were wrong though its lease held."""
        self.base: BaseVersion | None = None
        """What stood in the destination, whole, when the read began."""
        self.has_downstream_readers = False
        """Others read what is being filled here, and wait for it."""
        self.has_promised_readers = False
        """Peers wait for what this reader brings over."""
        self._cedes_from = now
        self._seen = now
        if not self.pool.loose:
            self.plan_requests.at = None
            self.phase = TransferPhase.LEASED

    # What happens.

    def planned(self, answer: PlanAnswer, now: float) -> None:
        """Take the planner's answer."""
        if not self.plan_requests.waiting or self._ending:
            return
        self.plan_requests.answered(answer)
        if isinstance(answer, Refusal):
            self._no_plan(answer, now)
        elif self.pool.spread(answer, now):
            self.plan_requests.planned()
            if self.phase is TransferPhase.LEASING:
                self.planned_at = now
        else:
            # It names sources that failed while it was made; that says nothing of others.
            self._no_plan(Refusal(error=NO_ANSWER, reason="the plan names no source that is left"), now)
        self._advance(now)

    def held(self, number: int, digests: bytes, now: float) -> None:
        """Take a granted lease whose transport waits for its turn."""
        source = self._granted(number, digests, now)
        if source is not None and not source.is_inside:
            self.pool.hold(source)
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
        source = self._granted(number, digests, now)
        if source is None:
            return
        source.opens(now)
        if pieces is not None:
            source.fills(len(self._nbytes), pieces, now, promises=promises)
        self._advance(now)

    def _granted(self, number: int, digests: bytes, now: float) -> Source | None:
        """Return the source that has granted a lease, if that is awaited and it holds what the log says."""
        source = self.sources.get(number)
        if source is None or source.phase is not SourcePhase.OPENING:
            return None
        if self.verification.verify and not self.verification.vouched(digests):
            self._damaged = True
            self.pool.exclusions.exclude_for_good(source.share.source)
            self.lost(number, "its digests are not those of the log", now)
            return None
        return source

    def available(self, number: int, pieces: Sequence[Range], now: float) -> None:
        """Take note of what a half-filled source has now."""
        source = self._telling(number, pieces)
        if source is not None:
            source.available(pieces, now)
            self._advance(now)

    def promised(self, number: int, pieces: Sequence[Range]) -> None:
        """Take note of what a half-filled source has under way: it may be waited for."""
        source = self._telling(number, pieces)
        if source is not None:
            source.promises(pieces)

    def retracted(self, number: int, pieces: Sequence[Range], now: float) -> None:
        """Take note of what a half-filled source waits for itself: it has to come from elsewhere."""
        source = self._telling(number, pieces)
        if source is not None:
            self.pool.site_peers.doubted(source, source.retracts(pieces))
            self._advance(now)

    def inherited(self, number: int, pieces: Sequence[Range], now: float) -> None:
        """Take note of what a peer has ceded to this reader: it is brought over here, and promised."""
        source = self._telling(number, pieces)
        if source is not None:
            self._cedes_from = now + self._limits.handoff_pause_s
            self.pool.site_peers.accept_handoff(source, pieces)
            self._advance(now)

    def ceded(self, number: int, pieces: Sequence[Range], new_owner: SourceId, now: float) -> None:
        """Take note of what a peer has ceded to another one: it is awaited there from now on."""
        source = self._telling(number, pieces)
        if source is not None:
            self.pool.site_peers.await_new_owner(source, pieces, new_owner)
            self._advance(now)

    def _telling(self, number: int, pieces: Sequence[Range]) -> Source | None:
        """Return the source that tells of these pieces, if it is one, and they are any of this shard."""
        return self.pool.open_one(number) if self.pool.exist(pieces) else None

    def progressed(self, number: int, nbytes: int, now: float) -> None:
        """Take note of bytes that have come within a batch."""
        source = self.pool.open_one(number)
        if source is not None:
            source.progressed(nbytes, now)

    def batch_done(
        self, number: int, batch: int, digests: bytes, now: float, encoded: Sequence[EncodedBytes] = ()
    ) -> None:
        """Take a batch that stands in the destination, with the digests taken there; `encoded` came in fewer bytes."""
        source = self.sources.get(number)
        if source is None or batch not in source.in_flight:
            return
        ranges, nbytes = source.answered(batch, now)
        self.plan_requests.progressed()
        source.decoded(encoded, now)
        self.last_at = now
        if not self._begun:
            self._begun, self.first_at = True, now
        if self.verification.verify:
            self.pool.count(source, ranges, nbytes, digests)
        else:
            source.unconfirmed.extend(ranges)
            source.unconfirmed_bytes += nbytes
        self._advance(now)

    def confirmed(self, number: int, holds: bool, now: float) -> None:  # noqa: FBT001 (the source's answer)
        """Take the source's word on whether the lease held up to its last byte."""
        source = self.pool.open_one(number)
        if source is None or not (source.confirming or source.confirming_early):
            return
        source.has_answered(now)
        if source.is_suspect:
            if holds:
                self._wrong = source.share.source
                self.pool.actions.accuse.append(number)
                self.pool.exclusions.exclude_for_good(source.share.source)
            self.lost(number, "its bytes did not match the digests of the log", now)
            return
        if not holds:
            self.lost(number, "its lease did not hold to the end", now)
            return
        partials, others = self.pool.fold_progress.apart(source.confirmed())
        self.verification.confirmed(others)
        self.pool.actions.proven.extend(others)
        if partials:
            self.pool.folded(number, partials)
        self._advance(now)

    def lost(self, number: int, reason: str, now: float, *, is_final: bool = False) -> None:
        """Leave a source out. What it has under way is asked for elsewhere only once it is closed.

        `is_final`: it is not tried again in this transfer, also where no other one is left.
        """
        source = self.sources.get(number)
        if source is None or source.phase in (SourcePhase.CLOSING, SourcePhase.CLOSED):
            return
        if is_final:
            self.pool.exclusions.exclude_for_good(source.share.source)
        else:
            self.pool.exclusions.fail(source.share.source)
        self.pool.close(source, reason)
        self._advance(now)

    def closed(self, number: int, now: float) -> None:
        """Nothing more can come from the source."""
        source = self.sources.get(number)
        if source is None or source.phase is SourcePhase.CLOSED:
            return
        self.pool.closed(source, now)
        self._advance(now)

    def start(self, now: float) -> None:
        """Write from now on: every shard of the replica has its leases."""
        if self.phase is TransferPhase.LEASED:
            self.phase = TransferPhase.RUNNING
            self.started = self.first_at = self.last_at = now
            self.pool.began(now)
            self._advance(now)

    @property
    def has_nothing(self) -> bool:
        """Whether a plan is awaited for all of it: nothing has come, and nothing can come of what was asked for."""
        return self.plan_requests.waiting and not self._ending and total_count(self.pool.loose) == len(self._nbytes)

    @property
    def is_dry(self) -> bool:
        """Whether the log counts a holder, and no lease can be had just now."""
        return self.phase is TransferPhase.LEASING and self.plan_requests.log_counts_holder

    def goes_on(self, before: "Transfer") -> None:
        """Take the place of a read that has nothing: as far as that has come, this one has."""
        self.phase, self.leased_at = before.phase, before.leased_at
        self.started, self.first_at, self.last_at = before.started, before.first_at, before.last_at

    def stop(self) -> None:
        """End the read. `quiet` says when nothing can be written any more."""
        self._ending = True
        self.pool.close_all()

    def tick(self, now: float) -> None:
        """Let time pass: leave out what stalls or is slow, ask the planner again."""
        if self._ending:
            return
        self._look(now)
        for source in self.pool.overdue(now):
            self.pool.leave(source, "it made no progress")
        for source in self.pool.waiting_unpromised():
            self.pool.site_peers.doubted(source, source.give_up_unpromised(now))
        if self.plan_requests.is_silent(now):
            self.planned(
                Refusal(error=NO_ANSWER, reason=f"the planner does not answer (nothing came within {PLAN_S_MAX:g} s)"),
                now,
            )
        self._advance(now)
        if self.phase is TransferPhase.RUNNING and self.has_promised_readers and now >= self._cedes_from:
            self.pool.cede(self.started, now)
        if self.phase is TransferPhase.RUNNING:
            self.pool.leave_slow(now)

    # What follows.

    @property
    def sources(self) -> dict[int, Source]:
        """Every source that this read has had, by its number."""
        return self.pool.by_number

    @property
    def quiet(self) -> bool:
        """Whether no byte can be written into the destination any more."""
        return self.pool.index.quiet

    def take_actions(self) -> TransferActions:
        """Take what is to be done; the next call returns only what is new."""
        actions, self.pool.actions = self.pool.actions, TransferActions()
        return actions

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        if self._ending:
            return None
        due = self.pool.index.next_due()
        times = [due, self._seen + self._limits.look_s] if due < NEVER else []
        plan_at = self.plan_requests.deadline()
        if plan_at is not None:
            times.append(plan_at)
        return min(times, default=None)

    def done_bytes(self) -> int:
        """Return how much has come, for progress bars."""
        return sum(source.got_bytes + source.unconfirmed_bytes for source in self.sources.values())

    def check(self) -> None:
        """Raise AssertionError unless each missing piece is in exactly one place, and no source is starved."""
        if self.phase is not TransferPhase.FAILED:
            self.pool.check(self.verification.done)
        if self.phase is TransferPhase.RUNNING and not self._ending:
            self.pool.check_fed()

    # Planning.

    def _no_plan(self, refusal: Refusal, now: float) -> None:
        """No new source brings what is loose: the open sources do, or it is asked again, or the read fails."""
        if refusal.error == LayoutMismatch.__name__:
            self._fail(refusal.error, refusal.reason)
            return
        is_told = refusal.error != NO_ANSWER
        if is_told:
            self.pool.give_up_folds()
        if self.phase is TransferPhase.RUNNING and self.pool.share_out(is_told=is_told):
            return
        lost_s = 0.0 if self.phase is TransferPhase.LEASING else self._limits.sources_lost_s
        if not self.plan_requests.refused(refusal, self.pool.exclusions, lost_s, now):
            self._fail_without(refusal.reason)

    @property
    def trouble(self) -> str:
        """Why the last source that was left was left, in words; empty where none was."""
        lost = next((source for source in reversed(list(self.sources.values())) if source.lost), None)
        return "" if lost is None else f"the last source, on {lost.share.source.agent}, was left because {lost.lost}"

    def _fail_without(self, reason: str) -> None:
        if self._wrong is not None:
            # Waiting for it brings nothing: its memory is published, and has other bytes than when it was.
            self._fail(
                IntegrityError.__name__,
                f"the memory of {self._wrong.replica}/{self._wrong.shard} on {self._wrong.agent} does not hold what was"
                f" published as version {self.version}: most likely its worker wrote to the tensors, for example by an "
                "optimizer's step, without unpublish() or overwriting(). Its log and its agent's say which tensors; "
                "publish a new version there",
            )
            return
        if self.trouble:
            reason += f" ({self.trouble})"
        self._fail((IntegrityError if self._damaged else VersionUnavailable).__name__, reason)

    def _fail(self, error: str, message: str) -> None:
        self.phase, self.error = TransferPhase.FAILED, (error, message)
        self.stop()

    def _ask_plan(self, now: float) -> None:
        if self.plan_requests.count >= PLANS_MAX and not self.plan_requests.log_counts_holder:
            self._fail_without(f"the read was planned {PLANS_MAX} times, and its sources failed each time")
            return
        self.plan_requests.asked(now)
        self.pool.actions.plan = self.pool.to_be_planned(), self.pool.left_out()

    # Sources.

    def _look(self, now: float) -> None:
        """Take a pause of this process out of what its sources are silent for."""
        # Most calls come in time, which is sooner known than how much time there was.
        plan_at, before = (
            self.plan_requests.deadline(),
            min(self.pool.index.due_after(), self._seen + self._limits.look_s),
        )
        if now - (before if plan_at is None else min(before, plan_at)) > self._limits.late_s:
            due = self.deadline()
            if due is not None and now - due > self._limits.late_s:
                self.pool.paused(now - due, now)
        self._seen = max(self._seen, now)

    # Getting on.

    def _advance(self, now: float) -> None:
        if self._ending or self.phase in (TransferPhase.DONE, TransferPhase.FAILED):
            return
        self.pool.wake()
        self.pool.open(now)
        if self.phase is TransferPhase.RUNNING:
            self.pool.pump(now, is_asking=self.plan_requests.waiting, is_relayed=self.has_downstream_readers)
            if self.pool.is_whole:
                self.phase, self.ended = TransferPhase.DONE, now
                self.stop()
                return
        if not self.pool.loose:
            self.plan_requests.rest()
        elif self.plan_requests.want(now):
            self._ask_plan(now)
        if self.phase is TransferPhase.LEASING and not self.plan_requests.waiting and self.pool.is_settled:
            self.phase, self.leased_at = TransferPhase.LEASED, now
