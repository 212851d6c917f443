"""The driver of one read's transfer: it emits the transfer's wishes as effects and feeds the outcomes back. Pure.

A shard that is being filled is offered to readers of later turns while its transfer goes on. Each piece is offered once
it is verified in the memory that is being filled. `AvailabilityAnnouncer` sends these readers the pieces that are
there, and the pieces that are promised.

Invariants:
- A transfer is forgotten only when it is quiet, so a new one never shares a destination byte with an old one.
- When a transfer is given up, the leases of the readers of later turns are broken first.
"""

from collections.abc import Sequence

from tensorhub_agent.core.effects import (
    AvailabilityReceived,
    BatchDone,
    BytesReceived,
    CloseSource,
    ConfirmLease,
    Digested,
    DigestMemory,
    DropMapping,
    EffectOutcome,
    FoldAmax,
    LeaseConfirmed,
    LeaseReceived,
    OpenTransport,
    PlanReceived,
    ReadBatch,
    ReportWrongBytes,
    RequestLease,
    RequestPlan,
    SendAvailability,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.amax import AmaxTable
from tensorhub_agent.primitives.ids import BaseVersion
from tensorhub_agent.primitives.lease_messages import (
    AvailabilityUpdate,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
)
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.primitives.ranges import ranges_of_marks, set_marks
from tensorhub_agent.transfer.limits import on_device
from tensorhub_agent.transfer.site_handoff import Handoff
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range


class AvailabilityAnnouncer:
    """The readers of one shard that is being filled."""

    def __init__(self, core: ShardCore) -> None:
        """Announce nothing yet."""
        self._core = core

    def pieces(self, pieces: tuple[Range, ...]) -> None:
        """Tell of pieces that stand there, verified."""
        core = self._core
        if pieces:
            leases = core.table.pieces_available(core.key, pieces)
            core.emit(*(SendAvailability(lease, PiecesAvailable(pieces)) for lease in leases))

    def units(self, units: tuple[Range, ...], completion: PieceCompletion) -> None:
        """Tell readers of the same program of units, and all others of the pieces that are whole by them."""
        core = self._core
        self.pieces(tuple(completion.units_arrived(units)))
        if units:
            leases = core.table.prove_units(core.key, units)
            core.emit(*(SendAvailability(lease, PiecesAvailable(units)) for lease in leases))

    def promise(self, transfer: Transfer, ceded_now: Sequence[Handoff]) -> None:
        """Let those who count on it know what this shard has under way, and what it waits for itself."""
        core = self._core
        transfer.has_promised_readers = core.table.counts_on_promises(core.key)
        if not transfer.has_promised_readers:
            return
        for ceded in ceded_now:
            leases = core.table.cede(core.key, ceded.pieces)
            core.emit(*(SendAvailability(lease, PiecesHandedOff(ceded.pieces, ceded.new_owner)) for lease in leases))
        change = core.table.promise(core.key, transfer.pool.committed(), transfer.pool.awaiting_others())
        if change is not None:
            said = [each for each in (PromiseRetracted(change.broken), PiecesPromised(change.fresh)) if each.pieces]
            core.emit(*(SendAvailability(lease, each) for lease in change.leases for each in said))


PlanWish = tuple[tuple[Range, ...], tuple[SourceId, ...]]
"""Pieces that need a source, and sources to leave out."""


class ReadDriver:
    """A transfer under way, or none."""

    def __init__(self, core: ShardCore) -> None:
        """Begin without one."""
        self._core, self._announcer = core, AvailabilityAnnouncer(core)
        self.transfer: Transfer | None = None
        self.abandoned = False
        self._retried = 0
        """Pieces that were asked for once more by transfers that are forgotten."""
        self.at_seq = 0
        """What the planner must have folded to know what this read rests on."""
        self._plan_number = 0
        self._turn: ReadPriority | None = None
        self.program: NumberedProgram | None = None
        """What is read are units of this program, and not the shard's own pieces."""
        self.turned_by: Plan | None = None
        """The plan that named the program."""
        self._completion: PieceCompletion | None = None
        self._table: AmaxTable | None = None
        self._digested: tuple[int, bytes] = (0, b"")
        """Of a read by a program, the question for the digests of what it has filled, and the answer."""
        self._driven_at = 0.0
        self._base: BaseVersion | None = None
        self._forgoes_kept = False

    def begin(self, version: int, root: str | None, turn: ReadPriority, now: float) -> None:
        """Begin to read a version; what an earlier failed read of the same bytes has proven counts."""
        core, config, kept = self._core, self._core.config, self._core.contents.kept
        assert self.transfer is None
        same = kept is not None and (kept[0], kept[1]) == (version, root) and not self._forgoes_kept
        self.program, self._completion, self._table, self._digested = None, None, None, (0, b"")
        self.turned_by = None
        self.transfer = self._new(
            version,
            root,
            # What is mapped weighs nothing, so all of it is asked for at once.
            nbytes=(0,) * len(core.spec.nbytes) if core.spec.mapped else core.spec.nbytes,
            # What is mapped is the holder's own memory. It counts once the holder has said that the lease still holds.
            verify=config.digests and not core.spec.mapped,
            now=now,
            kept=(kept[2], kept[3]) if kept is not None and same else None,
        )
        self._turn = turn
        self._base = self.transfer.base = self._base_for(root)
        if config.digests and root is not None and root != NO_ROOT and not core.spec.swaps:
            # Otherwise nothing vouches for a piece before all of them stand. One that swaps serves what it held.
            core.table.begin_fill(core.key, version, root, turn, len(core.spec.nbytes))

    def forgo_kept(self) -> None:
        """Read all pieces from now on: no source was found for those that an earlier read has not proven.

        The sources that are left may have other layouts alone, and those are read as a whole or not at all.
        """
        self._forgoes_kept = True

    def _base_for(self, root: str | None) -> BaseVersion | None:
        """Return what stands here whole and will be overwritten: patches are good for that, and for nothing else.

        What an earlier fill has begun to overwrite is no version's bytes. Without digests nothing judges a patch.
        """
        core, contents = self._core, self._core.contents
        if not core.config.digests or not core.config.encodings or core.spec.mapped:
            return None
        if contents.memory is not MemoryState.READY or contents.version is None:
            return None
        if contents.root in (None, NO_ROOT) or root in (None, NO_ROOT):
            return None
        return BaseVersion(contents.version, contents.root)

    def _new(
        self,
        version: int,
        root: str | None,
        nbytes: Sequence[int],
        *,
        verify: bool,
        now: float,
        kept: tuple[bytearray, bytes] | None = None,
        folds: AmaxReductions | None = None,
    ) -> Transfer:
        return Transfer(
            version=version,
            root=root,
            nbytes=nbytes,
            verify=verify,
            limits=on_device(self._core.config.transfer) if self._core.spec.device else self._core.config.transfer,
            first_number=self._core.number(),
            now=now,
            kept=kept,
            able=self._able,
            by_amax=self._by_amax,
            folds=folds,
        )

    def _able(self, share: Share) -> bytearray | None:
        """Return marks of the units that a source of this layout gives; None: all pieces."""
        if self.program is None:
            return None
        marks = bytearray(len(self.program))
        set_marks(marks, self.program.given_by(share.layout or ""))
        return marks

    def _by_amax(self, share: Share) -> bytearray | None:
        """Return marks of the units that a source of this layout computes of parts of blocks; None: none."""
        ranges = () if self.program is None else self.program.by_amax(share.layout or "")
        if self.program is None or not ranges:
            return None
        marks = bytearray(len(self.program))
        set_marks(marks, ranges)
        return marks

    def _planned(self, outcome: PlanReceived, now: float) -> None:
        """Take a plan. One that names a program turns a read that has nothing yet into one of the program's units."""
        transfer, answer = self.transfer, outcome.answer
        assert transfer is not None
        if outcome.program is not None and not outcome.program.fills(self._core.spec.layout):
            # Its boxes are places in other memory than this, and whatever came would be hashed as if it belonged here.
            answer = Refusal(error=VersionUnavailable.__name__, reason="the plan's program fills another layout")
        elif outcome.program is not None and self.program is None and transfer.has_nothing:
            self.program, self._completion, self._table = outcome.program, outcome.completion, outcome.table
            self.turned_by = answer if isinstance(answer, Plan) else None
            before, sizes = transfer, outcome.program.nbytes()
            transfer = self._new(before.version, before.root, sizes, verify=False, now=now, folds=outcome.folds)
            transfer.goes_on(before)
            transfer.plan_requests.asked(now)
            self.transfer = transfer
            self._expect_units(transfer)
        elif isinstance(answer, Plan) and answer.program != self._reads_by:
            # Its ranges number other things than this read's do, and in memory that is written already.
            answer = Refusal(error=VersionUnavailable.__name__, reason="what is left has other layouts: read it anew")
        transfer.planned(answer, now)

    @property
    def _reads_by(self) -> str | None:
        return None if self.program is None else self.program.digest

    def _expect_units(self, transfer: Transfer) -> None:
        """Let readers of later turns wait for what comes here, by the word of its sources instead of by digests."""
        core = self._core
        core.break_waiting("the shard is filled from other layouts than its own")
        if self._turn is not None and not core.spec.swaps:
            pieces, units = len(core.spec.nbytes), self._completion
            core.table.begin_fill(core.key, transfer.version, transfer.root, self._turn, pieces, units=units)

    def digest(self) -> None:
        """Ask for the digests of what a program has filled: of the shard's own pieces, where they stand."""
        core = self._core
        self._digested = (core.number(), b"")
        core.emit(DigestMemory(core.key, self._digested[0], filled=True))

    def has_digested(self, outcome: EffectOutcome) -> bool:
        """Take these digests; tell whether they are what was asked for."""
        if not isinstance(outcome, Digested) or outcome.number != self._digested[0]:
            return False
        self._digested = (0, outcome.digests)
        return True

    def serve(self) -> None:
        """The memory is being filled: show what stands in it already."""
        if self.transfer is not None and self.program is None:
            done = self.transfer.verification.done
            self._announcer.pieces(tuple(ranges_of_marks(done, 0, len(done))))

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Pass on what came of the transfer's wishes."""
        transfer = self.transfer
        assert transfer is not None
        match outcome:
            case PlanReceived() if outcome.number == self._plan_number:
                self._planned(outcome, now)
            case LeaseReceived():
                transfer.held(outcome.source, outcome.digests, now)
            case SourceOpened():
                transfer.opened(outcome.source, outcome.digests, now, outcome.pieces, promises=outcome.promises)
            case AvailabilityReceived():
                self._heard(transfer, outcome.source, outcome.update, now)
            case BytesReceived():
                transfer.progressed(outcome.source, outcome.nbytes, now)
            case BatchDone():
                transfer.batch_done(outcome.source, outcome.batch, outcome.digests, now, outcome.encoded)
            case LeaseConfirmed():
                transfer.confirmed(outcome.source, outcome.holds, now)
            case SourceLost():
                transfer.lost(outcome.source, outcome.reason, now, is_final=outcome.is_final)
            case SourceClosed():
                transfer.closed(outcome.source, now)

    def _heard(self, transfer: Transfer, source: int, update: AvailabilityUpdate, now: float) -> None:
        match update:
            case PiecesAvailable():
                transfer.available(source, update.pieces, now)
            case PiecesPromised():
                transfer.promised(source, update.pieces)
            case PromiseRetracted():
                transfer.retracted(source, update.pieces, now)
            case PiecesHandedOff():
                key, new_owner = self._core.key, update.new_owner
                if (new_owner.replica, new_owner.shard) == (key.replica, key.shard):
                    transfer.inherited(source, update.pieces, now)
                else:
                    transfer.ceded(source, update.pieces, new_owner, now)

    def drive(self, agent: str, now: float) -> None:
        """Let time pass for the transfer, and carry out what it wants. `agent` is who asks the planner."""
        transfer = self.transfer
        assert transfer is not None
        core = self._core
        transfer.has_downstream_readers = core.table.awaiting(core.key) > 0
        transfer.tick(now)
        actions = transfer.take_actions()
        self._driven_at = now
        if transfer.phase in (TransferPhase.DONE, TransferPhase.FAILED):
            self._measure()
        if transfer.verification.digests is not None:
            core.table.set_digests(core.key, transfer.verification.digests)
        self._fold(actions)
        if self._completion is None:
            self._announcer.pieces(tuple(actions.proven))
        else:
            self._announcer.units(tuple(actions.proven), self._completion)
        self._announcer.promise(transfer, actions.ceded)
        if actions.plan is not None:
            self._ask_plan(transfer, actions.plan, agent, now)
        self._emit(actions)
        self._core.numbers_up_to(transfer.pool.next_number)

    def abandon(self) -> None:
        """Close all sources of a read that is no longer wanted. It is forgotten once it is quiet."""
        if self.transfer is None:
            return
        self.stop()
        self.abandoned = True
        self.forget_if_quiet()

    def stop(self) -> None:
        """End the transfer; `is_quiet` tells when it has ended."""
        self._core.break_waiting("the source is not filled with this version any more")
        if self._core.spec.mapped:
            self._core.emit(DropMapping(self._core.key))
        if self.transfer is not None:
            self._measure()
            self.transfer.stop()
            self._emit(self.transfer.take_actions())

    def _measure(self) -> None:
        """Take note of how fast each link was, also of a read that is given up: it may be for a slow one."""
        if self.transfer is not None:
            self._core.measured.note(self.transfer.pool.meters.take(self._driven_at), self._driven_at)

    def forget_if_quiet(self) -> None:
        """Forget an abandoned transfer that can write nothing any more."""
        if self.abandoned and self.is_quiet:
            self.keep_verified()
            self._retried = self.retried
            self.transfer, self.abandoned = None, False

    @property
    def retried(self) -> int:
        """How many pieces were asked for once more, by this transfer and those before it."""
        sources = () if self.transfer is None else self.transfer.sources.values()
        return self._retried + sum(source.retried for source in sources)

    @property
    def digests(self) -> bytes:
        """What every piece hashes to, as far as the log's root has vouched for that; empty without digests."""
        return self._digested[1] or (self.transfer.verification.digests if self.transfer is not None else None) or b""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can be written into the destination any more."""
        return self.transfer is None or self.transfer.quiet

    def keep_verified(self) -> None:
        """Remember which pieces are proven, for a later read of the same bytes."""
        transfer, contents = self.transfer, self._core.contents
        written = contents.memory is MemoryState.FILLING or self._core.spec.staged
        keep = transfer.verification.keep() if transfer is not None and written else None
        if transfer is not None and keep is not None and transfer.root is not None:
            self._core.keep_verified(transfer.version, transfer.root, *keep)

    def _ask_plan(self, transfer: Transfer, plan: PlanWish, agent: str, now: float) -> None:
        core, key = self._core, self._core.key
        self._measure()
        pieces, avoid = plan
        self._plan_number = core.number()
        demand = PlanRequest(
            model=key.model,
            version=transfer.version,
            replica=key.replica,
            shard=key.shard,
            agent=agent,
            root=transfer.root,
            at_seq=self.at_seq,
            pieces=pieces,
            avoid=avoid,
            turn=self._turn,
            mapped=core.spec.mapped,
            program=self._reads_by,
            rates=core.measured.told(now),
            promises=True,
            packs=True,
            uncrossed=self._uncrossed(transfer),
            crossers=transfer.pool.site_peers.crossers,
        )
        core.emit(RequestPlan(key, self._plan_number, demand))

    def plan_kept_back(self) -> None:
        """The question for a plan waits for others of this agent."""
        if self.transfer is not None:
            self.transfer.plan_requests.kept_back()

    def plan_sent(self, number: int, now: float) -> bool:
        """The question that was kept back goes out, if it is still wanted."""
        transfer = self.transfer
        if transfer is None or number != self._plan_number or not transfer.plan_requests.waiting:
            return False
        transfer.plan_requests.goes_out(now)
        return True

    def _uncrossed(self, transfer: Transfer) -> tuple[SourceId, ...]:
        """Return who does not bring over what is asked for: of what was ceded to this shard, none of its peers."""
        key, peers = self._core.key, transfer.pool.site_peers
        if not peers.asks_for_handoff:
            return tuple(peers.not_bringing)
        return tuple(each for each in peers.crossers if (each.replica, each.shard) != (key.replica, key.shard))

    def _root_of(self, share: Share) -> str | None:
        """Return what a source must hold by the log: in its own layout, where that is not the reader's."""
        assert self.transfer is not None
        return self.transfer.root if self.program is None else share.root

    def _fold(self, actions: TransferActions) -> None:
        """Count partials, before anything is asked for by them and before anybody hears of the scales."""
        for source, partials, scales in actions.fold:
            assert self._table is not None
            self._core.emit(FoldAmax(self._core.key, source, partials, scales, self._table))

    def _emit(self, actions: TransferActions) -> None:
        core, key, transfer = self._core, self._core.key, self.transfer
        assert transfer is not None
        base = self._base if self.program is None else None
        core.emit(
            *(
                RequestLease(
                    key,
                    n,
                    share,
                    transfer.version,
                    self._root_of(share),
                    self._turn,
                    core.spec.mapped,
                    core.spec.device if core.spec.mapped else "",
                    self.program,
                    base,
                    core.measured.rate((share.link, share.transport)),
                    self._table,
                    is_held,
                )
                for is_held, shares in ((False, actions.open), (True, actions.hold))
                for n, share in shares
            )
        )
        core.emit(*(OpenTransport(key, n) for n in actions.enter))
        core.emit(*(ReadBatch(key, n, batch, ranges) for n, batch, ranges in actions.post))
        core.emit(*(ConfirmLease(key, n) for n in actions.confirm))
        core.emit(*(ReportWrongBytes(key, n) for n in actions.accuse))
        core.emit(*(CloseSource(key, n) for n in actions.close))
