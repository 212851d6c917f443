"""Reading a version into one shard, as one shard of its replica's round. Pure.

join the round -> the log decides a version -> plan and lease -> every shard has its leases -> drain and write -> verify -> every
shard is filled. Nothing is overwritten before the log says `round.started`, and no call is answered before the read is
quiet: whatever was asked for has come or can come no more.
"""

from enum import StrEnum

from tensorhub_agent.effects import (
    AskPlan,
    BatchDone,
    BreakLease,
    CallRead,
    CloseSource,
    Confirm,
    Confirmed,
    OpenSource,
    PlanCame,
    Post,
    ShardNews,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.reports import report_of
from tensorhub_agent.shard import OUTCOME_S_MAX, Memory, ShardCore
from tensorhub_agent.transfer import Phase, Transfer
from tensorhub_common.errors import (
    AgentUnavailable,
    RegistryUnavailable,
    ReplicaConflict,
    RoundTimeout,
    VersionUnavailable,
)
from tensorhub_common.wire.commands import NO_ROOT, Filled, GiveUp, Granted, Replan, Sender, Settle, Want
from tensorhub_common.wire.events import (
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    ReplicaReady,
    RoundDecided,
    RoundEvent,
    RoundFailed,
    RoundJoined,
    RoundReopened,
    RoundSettled,
    RoundStarted,
    RoundWithdrawn,
    ShardFilled,
)
from tensorhub_common.wire.transfer import Demand
from tensorhub_common.wire.worker import ReadReport

REPLAN_S: float = 0.1
"""How long to wait before the log is asked to decide again, when no lease can be had."""


class Stage(StrEnum):
    """How far the call is."""

    JOINING = "joining"
    LEASING = "leasing"
    GRANTED = "granted"
    DRAINING = "draining"
    FILLING = "filling"
    FILLED = "filled"
    ENDING = "ending"


class ReadOperation:
    """One replicate or update call of one shard."""

    def __init__(self, core: ShardCore, call: CallRead) -> None:
        """Take the call."""
        self.core, self.call = core, call
        self.stage = Stage.JOINING
        self.transfer: Transfer | None = None
        self._want_by: Sender | None = None
        self._give_up_by: Sender | None = None
        self._filled_by: Sender | None = None
        self._round: int | None = None
        self._attempt = 0
        self._at_seq = 0
        self._missing: tuple[int, ...] = ()
        self._settled = False
        self._deadline = call.deadline
        self._replan_at: float | None = None
        self._dry_since: float | None = None
        self._drain_until = 0.0
        self._plan_number = 0
        self._began = 0.0
        self._report: ReadReport | None = None
        self._verdict: tuple[str, str] | None = None
        self._decision: RoundDecided | None = None
        self._abandoned = False

    @property
    def reached(self) -> bool:
        """Once memory is being written the read is finished for the next worker."""
        return self.stage in (Stage.DRAINING, Stage.FILLING, Stage.FILLED, Stage.ENDING)

    def start(self, now: float) -> None:
        """Join the replica's round."""
        core, key, call = self.core, self.core.key, self.call
        self._began = now
        if core.held.memory not in (Memory.EMPTY, Memory.READY):
            core.fail(ReplicaConflict, f"{core.where} is {core.held.memory}: call unpublish again and wait for its end")
            return
        patient = call.patience > now
        self._settled = not patient
        self._want_by = core.say(
            Want(model=key.model, replica=key.replica, shard=key.shard, want=call.want, patient=patient)
        )

    # The log's word.

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take an event about this shard's replica, or an answer to this call's commands."""
        self._at_seq = max(self._at_seq, event.cmd)
        if event.by is not None and event.by in (self._want_by, self._give_up_by, self._filled_by):
            self._on_answer(event, now)
        if self._is_over():
            return
        if isinstance(event, ReplicaReady) and self._is_round(event.round):
            self._on_ready(event, now)
        elif isinstance(event, RoundEvent) and self._is_round(event.round):
            self._on_round(event, now)

    def _is_over(self) -> bool:
        operation: object = self.core.operation
        return operation is not self

    def _is_round(self, number: int | None) -> bool:
        return self._round is not None and number == self._round

    def _on_answer(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, RoundJoined) and event.by == self._want_by:
            self._round = event.round
        elif isinstance(event, RoundWithdrawn) and event.by == self._give_up_by:
            self._end(*self._not_in_time(event.missing), now)
        elif isinstance(event, ShardFilled) and event.by == self._filled_by:
            core = self.core
            digests = self.transfer.digests if self.transfer is not None else None
            root = event.root
            core.become(
                Memory.READY, version=event.version, root=root, digests=digests or b"", partial=False, kept=None
            )
            core.table.offer(core.key, event.version, root, digests or b"")
        elif isinstance(event, CommandRejected | CommandRepeated) and event.error is not None:
            # A filled or given-up round that is over has told its end before; a refused want is the end itself.
            if event.by == self._want_by or self._round is None:
                self._end(event.error, event.message or "", now)
            elif event.by == self._filled_by:
                self._end(event.error, event.message or "", now)

    def _on_round(self, event: RoundEvent, now: float) -> None:
        match event:
            case RoundJoined():
                self._missing = event.missing
            case RoundDecided() if self.stage is not Stage.ENDING:
                self._decided(event, now)
            case RoundStarted() if self.stage is Stage.GRANTED and event.attempt == self._attempt:
                self._vacate(now)
            case RoundReopened() if self.stage is not Stage.ENDING:
                self._begin_anew()
                self.stage = Stage.JOINING
            case RoundSettled():
                self._end("", "", now)
            case RoundFailed():
                self._end(event.error, event.message, now)

    def _begin_anew(self) -> None:
        """What this shard gave up the log took up again, so the call's own bound counts once more."""
        self._abandon_transfer()
        self._give_up_by = self._filled_by = None
        self._deadline = self.call.deadline
        self._replan_at = None

    def _decided(self, event: RoundDecided, now: float) -> None:
        """Begin to read the version, once nothing of an earlier plan can be written any more."""
        core = self.core
        self._begin_anew()
        self._attempt = event.attempt
        self.stage = Stage.LEASING
        if self.transfer is not None:
            self._decision = event
            return
        self._decision = None
        if core.key.shard in event.held:
            self.stage = Stage.GRANTED
            return
        root = event.roots[core.key.shard]
        kept = core.held.kept
        same = kept is not None and (kept[0], kept[1]) == (event.version, root)
        limits = core.limits
        self.transfer = Transfer(
            version=event.version,
            root=root,
            nbytes=core.place.nbytes,
            verify=limits.digests,
            window_bytes=limits.window_bytes,
            stall_s=limits.stall_s,
            sources_lost_s=limits.sources_lost_s,
            first_number=core.number(),
            now=now,
            kept=(kept[2], kept[3]) if kept is not None and same else None,
        )
        self._drive(now)

    def _on_ready(self, event: ReplicaReady, now: float) -> None:
        self.core.hold(event.version)
        self._verdict = None
        self.core.finish(version=event.version, report=self._report)

    # The read.

    def on_news(self, news: ShardNews, now: float) -> None:
        """Pass on what came of the transfer's wishes."""
        transfer = self.transfer
        if transfer is None:
            return
        match news:
            case PlanCame() if news.number == self._plan_number:
                transfer.planned(news.answer, now)
            case SourceOpened():
                transfer.opened(news.source, news.digests, now)
            case BatchDone():
                transfer.batch_done(news.source, news.batch, news.digests, now)
            case Confirmed():
                transfer.confirmed(news.source, news.holds, now)
            case SourceLost():
                transfer.lost(news.source, news.reason, now)
            case SourceClosed():
                transfer.closed(news.source, now)
        self._drive(now)

    def _drive(self, now: float) -> None:
        """Carry out what the transfer wants, and follow its phase."""
        transfer, core = self.transfer, self.core
        if transfer is None:
            return
        transfer.tick(now)
        self._emit(transfer)
        core.numbers_up_to(transfer.next_number)
        if self.stage is Stage.ENDING:
            self._settle_end(now)
        elif self._abandoned:
            self._follow_decision(now)
        elif transfer.phase is Phase.LEASED and self.stage is Stage.LEASING:
            self.stage = Stage.GRANTED
            self._dry_since = None
            self._say_granted()
        elif transfer.phase is Phase.FAILED and transfer.quiet:
            self._transfer_failed(transfer, now)
        elif transfer.phase is Phase.DONE and transfer.quiet and self.stage is Stage.FILLING:
            self._all_here(transfer, now)

    def _follow_decision(self, now: float) -> None:
        """The abandoned transfer may be quiet by now; then the decision that waited for that is followed."""
        if self.transfer is not None and self.transfer.quiet:
            self._remember_kept(self.transfer)
            self.transfer, self._abandoned = None, False
            if self._decision is not None:
                self._decided(self._decision, now)

    def _emit(self, transfer: Transfer) -> None:
        core, todo = self.core, transfer.todo()
        out, key = core.out, core.key
        if todo.plan is not None:
            pieces, avoid = todo.plan
            self._plan_number = core.number()
            demand = Demand(
                model=key.model,
                version=transfer.version,
                replica=key.replica,
                shard=key.shard,
                agent=self._want_by.process if self._want_by is not None else "",
                root=transfer.root,
                at_seq=self._at_seq,
                pieces=pieces,
                avoid=avoid,
            )
            out.append(AskPlan(key, self._plan_number, demand))
        out.extend(OpenSource(key, n, share, transfer.version, transfer.root) for n, share in todo.open)
        out.extend(Post(key, n, batch, ranges) for n, batch, ranges in todo.post)
        out.extend(Confirm(key, n) for n in todo.confirm)
        out.extend(CloseSource(key, n) for n in todo.close)

    def _say_granted(self) -> None:
        key = self.core.key
        assert self._round is not None
        self.core.say(
            Granted(model=key.model, replica=key.replica, shard=key.shard, round=self._round, attempt=self._attempt)
        )

    def _transfer_failed(self, transfer: Transfer, now: float) -> None:
        """No leases: let the log decide again, for a while. No bytes: leave the round."""
        error, message = transfer.error or (VersionUnavailable.__name__, "no source is left")
        if self.stage is Stage.LEASING and error == VersionUnavailable.__name__:
            self._dry_since = now if self._dry_since is None else self._dry_since
            if now - self._dry_since < self.core.limits.sources_lost_s:
                self._abandon_transfer()
                self._replan_at = now + REPLAN_S
                return
        if self._give_up_by is None and self.stage is not Stage.FILLED:
            self._give_up(error, message, now)

    def _vacate(self, now: float) -> None:
        """Every shard has its leases: stop serving what stands here, then write."""
        core = self.core
        if self.transfer is None:
            # This shard holds the version already; it waits for its siblings.
            return
        if self.transfer.phase is Phase.FAILED:
            # Its sources went after they had granted: what stands here is better than nothing.
            return
        core.hold(None)
        core.table.stop(core.key)
        self.stage = Stage.DRAINING
        self._drain_until = now + core.limits.refill_drain_s
        self._when_read_out(now)

    def _when_read_out(self, now: float) -> None:
        core = self.core
        if core.table.reading(core.key) > 0 and now < self._drain_until:
            return
        for lease in core.table.forget(core.key):
            core.out.append(BreakLease(lease, "the shard is being filled with another version"))
        core.become(Memory.FILLING, partial=True, kept=None)
        self.stage = Stage.FILLING
        if self.transfer is not None:
            self.transfer.start(now)
            self._drive(now)

    def on_readers_gone(self, now: float) -> None:
        """The last reader of what stood here went."""
        if self.stage is Stage.DRAINING:
            self._when_read_out(now)

    def _all_here(self, transfer: Transfer, now: float) -> None:
        core, key = self.core, self.core.key
        assert self._round is not None
        self.stage = Stage.FILLED
        self._report = report_of(transfer, core.place.nbytes, now - self._began)
        self._filled_by = core.say(
            Filled(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                round=self._round,
                version=transfer.version,
                root=transfer.root or NO_ROOT,
            )
        )

    # The end.

    def tick(self, now: float) -> None:
        """Let time pass: patience, the drain's bound, another plan, and the call's own bound."""
        if self._replan_at is not None and now >= self._replan_at and self._round is not None:
            self._replan_at = None
            key = self.core.key
            self.core.say(
                Replan(model=key.model, replica=key.replica, shard=key.shard, round=self._round, attempt=self._attempt)
            )
        if not self._settled and now >= self.call.patience and self._round is not None:
            self._settled = True
            key = self.core.key
            self.core.say(Settle(model=key.model, replica=key.replica, shard=key.shard, round=self._round))
        if self.stage is Stage.DRAINING and now >= self._drain_until:
            self._when_read_out(now)
        if self.transfer is not None:
            self._drive(now)
        if not self._is_over() and now >= self._deadline and self.stage is not Stage.ENDING:
            self._out_of_time(now)

    def _out_of_time(self, now: float) -> None:
        if self._give_up_by is None:
            self._give_up(RoundTimeout.__name__, self._not_in_time(self._missing)[1], now)
            return
        self._fence()
        self._end(
            RegistryUnavailable.__name__,
            f"the registry did not say what became of the read of {self.core.where}; it is given up: see 'tensorhub "
            "status', then call again",
            now,
        )

    def _fence(self) -> None:
        """The call raises without the log's word: whatever the log makes of it is undone by what stands behind it.

        A lane keeps its order, so nothing that this shard says later can meet what was given up here: neither the
        round, which the log may have taken up again, nor a fill that nobody was told of.
        """
        core, key = self.core, self.core.key
        core.say(
            GiveUp(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                round=None,
                error=RoundTimeout.__name__,
                message=f"the registry did not answer {core.where} within the bound",
            )
        )
        if self._filled_by is not None and core.held.memory is Memory.FILLING:
            core.take_back()

    def _give_up(self, error: str, message: str, now: float) -> None:
        key = self.core.key
        self._deadline = now + OUTCOME_S_MAX
        self._give_up_by = self.core.say(
            GiveUp(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                round=self._round,
                error=error,
                message=message,
            )
        )

    def _not_in_time(self, missing: tuple[int, ...]) -> tuple[str, str]:
        core = self.core
        others = [index for index in missing if index != core.key.shard]
        if self.stage is not Stage.JOINING:
            return RoundTimeout.__name__, f"{core.where} could not be filled within the bound: allow more time"
        if others:
            return (
                RoundTimeout.__name__,
                f"{core.where}: shards {others} of the replica did not join the round within the bound: every shard "
                "must call replicate or update",
            )
        wish = self.call.want if isinstance(self.call.want, str) else f"version {self.call.want}"
        return (
            VersionUnavailable.__name__,
            f"{wish} of model {core.key.model!r} has no live holder within the bound: has a trainer published it?",
        )

    def _end(self, error: str, message: str, now: float) -> None:
        """Answer the call as soon as nothing can be written any more. An empty error means None."""
        if self.stage is not Stage.ENDING or not self._verdict:
            self._verdict = (error, message)
        self.stage = Stage.ENDING
        if self.transfer is not None and self.transfer.phase is not Phase.FAILED:
            self.transfer.stop()
            self._emit(self.transfer)
        self._settle_end(now)

    def _settle_end(self, now: float) -> None:
        core = self.core
        if self._verdict is None or (self.transfer is not None and not self.transfer.quiet):
            return
        if core.held.memory is Memory.FILLING:
            self._keep_partial()
        error, message = self._verdict
        if error:
            core.fail(error, message)
        else:
            core.finish(version=None)

    def _keep_partial(self) -> None:
        """Leave the memory as it is: a part of a version."""
        if self.transfer is not None:
            self._remember_kept(self.transfer)
        self.core.become(Memory.EMPTY, partial=True)

    def _remember_kept(self, transfer: Transfer) -> None:
        """Remember which pieces are verified, for a later read of the same bytes."""
        keep = transfer.keep() if self.core.held.memory is Memory.FILLING else None
        if keep is not None and transfer.root is not None:
            self.core.held.kept = (transfer.version, transfer.root, *keep)

    def _abandon_transfer(self) -> None:
        """Close all sources of a plan that is no longer wanted. It is forgotten once it is quiet."""
        if self.transfer is None:
            return
        self.transfer.stop()
        self._emit(self.transfer)
        self._abandoned = True
        if self.transfer.quiet:
            self._remember_kept(self.transfer)
            self.transfer, self._abandoned = None, False

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        times = [self._deadline] if self.stage is not Stage.ENDING else []
        if self._replan_at is not None:
            times.append(self._replan_at)
        if not self._settled and self._round is not None:
            times.append(self.call.patience)
        if self.stage is Stage.DRAINING:
            times.append(self._drain_until)
        if self.transfer is not None:
            when = self.transfer.deadline()
            times += [when] if when is not None else []
        return min(times, default=None)

    def abandon(self, now: float) -> None:
        """The worker is gone before anything was written: leave the round."""
        if self._give_up_by is None:
            self._give_up(RoundTimeout.__name__, f"the worker of {self.core.where} is gone", now)

    def restart(self, now: float) -> None:
        """The agent joined anew, and its rounds went with the old incarnation."""
        self._end(AgentUnavailable.__name__, "the agent was taken for lost and has joined anew: call again", now)
