"""The operation that reads a version into one shard, as one shard of its replica's round. Pure.

`ReadStage` says how far a read call is. The steps are: join the round -> the log decides a version -> plan and lease ->
every shard has its leases -> drain and write -> verify -> the manifest records it -> every shard is filled.

`is_better_dropped` decides whether to read on when a newer version comes, or to drop the current read. An engine is
paused while its memory is overwritten. Reading on costs the rest of this read, and then a whole read of the newer
version. Dropping costs a whole read now: it saves the rest of this one, and throws away the bytes that have come. The
replica is ready when its last shard is, so the shard that is furthest behind decides for all: one wish to drop is
enough. The log bounds how often a round may be superseded (SUPERSEDED_MAX in `tensorhub_common`), so every round ends.

Invariants:
- Nothing is overwritten before the log says `round.started`. A mapped shard overwrites nothing, and does not wait for
  `round.started` where it is the last one that is missing.
- No call is answered before the read is quiet: everything that was asked for has come or can come no more.
"""

from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_agent.core.effects import CallRead, EffectOutcome, Kept
from tensorhub_agent.core.operations.read_driver import ReadDriver
from tensorhub_agent.core.operations.read_report import report_of, report_of_failure, stages_of
from tensorhub_agent.core.operations.read_target import ReadTarget
from tensorhub_agent.core.operations.round_client import RoundClient
from tensorhub_agent.core.operations.timeout_errors import MissingShards, not_in_time, still_mapped, unanswered
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.transfer.source import Source
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.errors import (
    AgentUnavailable,
    MemoryExhausted,
    ReplicaConflict,
    RoundTimeout,
    VersionUnavailable,
)
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.log.commands import NO_ROOT, Sender
from tensorhub_common.protocol.log.events import (
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    ReplicaReady,
    RoundDecided,
    RoundEvent,
    RoundFailed,
    RoundJoined,
    RoundOvertaken,
    RoundReopened,
    RoundSettled,
    RoundStarted,
    RoundWithdrawn,
    ShardFilled,
)
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_common.protocol.subjects import cached_version
from tensorhub_common.protocol.worker import ReadReport


class ReadStage(StrEnum):
    """The stages of a call, in their order; `read.py` says what leads from one to the next."""

    JOINING = "joining"
    LEASING = "leasing"
    GRANTED = "granted"
    DRAINING = "draining"
    FILLING = "filling"
    DIGESTING = "digesting"
    KEEPING = "keeping"
    FILLED = "filled"
    ENDING = "ending"


PAST_ABANDON: Final = frozenset(
    (ReadStage.DRAINING, ReadStage.FILLING, ReadStage.DIGESTING, ReadStage.KEEPING, ReadStage.FILLED, ReadStage.ENDING)
)
"""From here on memory is being written, or was."""

WRITES: Final = PAST_ABANDON - {ReadStage.ENDING}
"""The call takes what the log has given up to be overwritten."""


FINISH_FRACTION: Final = 0.5
"""With so much of it there, what is left costs less than what would be thrown away: it is finished."""


def is_better_dropped(done_bytes: int, total_bytes: int, elapsed_s: float, finish_s: float) -> bool:
    """Tell whether an overtaken read is dropped: at its present rate, the rest takes longer than `finish_s`."""
    if done_bytes >= total_bytes * FINISH_FRACTION:
        return False
    if done_bytes <= 0:
        return True
    return elapsed_s * (total_bytes - done_bytes) / done_bytes > finish_s


REPLAN_S: float = 0.1
"""How long to wait before the log is asked to decide again, when no lease can be had."""

DRY_REPLAN_S: float = 1.0
"""The same while the log counts a holder that grants none; after each time twice as long. A newer version may have come
meanwhile, from a holder that does."""

NOT_NOW: Final = frozenset({VersionUnavailable.__name__, RoundTimeout.__name__})
"""What an `update` does not raise where the shard still holds what it held: calling again may bring the version."""


class ReadOperation:
    """One replicate or update call of one shard."""

    def __init__(self, core: ShardCore, call: CallRead) -> None:
        """Take the call."""
        self.core, self.call = core, call
        self.stage = ReadStage.JOINING
        self._round, self._driver, self._target = RoundClient(core), ReadDriver(core), ReadTarget(core)
        self._missing: tuple[int, ...] = ()
        self._absent = MissingShards()
        self._settled = False
        self._deadline = call.deadline
        self._at_once = False
        """The last shard that is missing only maps what others hold: it need not wait for `round.started`."""
        self._replan_at: float | None = None
        self._dry_since: float | None = None
        self._dry_replan_s = DRY_REPLAN_S
        self._trouble = ""
        """Why an earlier attempt had no leases, in words."""
        self._was_decided = self._gave_up_old = False
        """The log has decided a version; and what the shard held before is given up for it."""
        self._fills_since = 0.0
        self.began = 0.0
        self.version: int | None = None
        """What the log has decided; None while it waits for a publisher or a sibling."""
        self.leasing_since = 0.0
        """Since when there was no lease, however often the log has decided meanwhile."""
        self._waits_since: float | None = 0.0
        """Since when nothing is decided; None: the read is under way."""
        self._waited_s = 0.0
        """For how long nothing was decided in earlier waits. See `_decided`."""
        self._report: ReadReport | None = None
        self._verdict: tuple[str, str] | None = None
        self._root: str | None = None
        """Of what was filled."""
        self._decision: RoundDecided | None = None
        self._answer: int | None = None
        """What the call returns when it was not what it has read."""

    @property
    def program(self) -> NumberedProgram | None:
        """The program by whose units this reads; None: it reads the shard's own pieces."""
        return self._driver.program

    @property
    def transfer(self) -> Transfer | None:
        """The bytes on their way, if there are any."""
        return self._driver.transfer

    def source(self, number: int) -> Source | None:
        """Return a source of the transfer by its number."""
        transfer = self.transfer
        return None if transfer is None else transfer.sources.get(number)

    @property
    def may_turn_to_program(self) -> bool:
        """Whether the read has nothing yet, so that the plan which it awaits decides what it goes by."""
        transfer = self.transfer
        return (
            transfer is not None
            and not self._driver.abandoned
            and transfer.has_nothing
            and (self._driver.program is None)
        )

    @property
    def reached(self) -> bool:
        """Once memory is being written the read is finished for the next worker."""
        return self.stage in PAST_ABANDON

    def writes_for(self, number: int) -> bool:
        """Tell whether this call overwrites what stands here for a round that has started."""
        return self._round.is_round(number) and self.stage in WRITES

    def start(self, now: float) -> None:
        """Join the replica's round."""
        core, call = self.core, self.call
        self.began = self._waits_since = now
        if call.has_let_go:
            core.worker_mapping_gone()
        if core.contents.memory is MemoryState.FILLING:
            core.fail(ReplicaConflict, f"{core.where} is {core.contents.memory}: wait until that has ended")
            return
        # Memory that drains because readers map it, and that the log counts as empty, may be read into again: this call
        # waits for those readers before it writes. What an unpublish drains the log refuses.
        patient = call.patience > now
        self._settled = not patient
        self._round.want(call.want, patient=patient)

    # The log's word.

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take an event about this shard's replica, or an answer to this call's commands."""
        self._driver.at_seq = max(self._driver.at_seq, event.cmd)
        if self._round.is_mine(event.by):
            self._on_answer(event, now)
        if self._is_over():
            return
        if isinstance(event, ReplicaReady) and self._round.is_round(event.round):
            self._on_ready(event, now)
        elif isinstance(event, RoundEvent) and self._round.is_round(event.round):
            self._on_round(event, now)

    def lose_agent(self, agent: str, incarnation: int) -> None:
        """Take note that the log has lost an agent, which may be a source's."""
        if self.transfer is not None:
            self.transfer.pool.lose_agent(agent, incarnation)

    def plan_kept_back(self) -> None:
        """The question for a plan waits for others of this agent."""
        self._driver.plan_kept_back()

    def plan_sent(self, number: int, now: float) -> bool:
        """The question that was kept back goes out; False: it is not wanted any more."""
        return self._driver.plan_sent(number, now)

    def _is_over(self) -> bool:
        operation: object = self.core.operation
        return operation is not self

    def _on_answer(self, event: AnyEvent, now: float) -> None:
        voice = self._round
        if isinstance(event, RoundJoined) and event.by == voice.want_by:
            voice.round = event.round
        elif isinstance(event, RoundWithdrawn) and event.by == voice.give_up_by:
            self._end(*self._not_in_time(event.missing), now)
        elif isinstance(event, ShardFilled) and event.by == voice.filled_by:
            self._on_filled(event)
        elif isinstance(event, ReplicaReady) and event.by == voice.filled_by and self.transfer is not None:
            if self._at_once:
                self._target.fill_at_once(event.version, self.transfer.root or NO_ROOT)
        elif isinstance(event, CommandRejected | CommandRepeated) and event.error is not None:
            self._on_refused(event.by, event.error, event.message or "", now)

    def _on_refused(self, by: Sender | None, error: str, message: str, now: float) -> None:
        """End the read; a round that is over has ended it before, and then a refused giving-up changes nothing."""
        core = self.core
        if (
            by == self._round.want_by
            and core.contents.memory is MemoryState.DRAINING
            and error == ReplicaConflict.__name__
        ):
            message = f"{core.where} is {core.contents.memory}: call unpublish again and wait for its end"
        if by == self._round.filled_by:
            # The round would go on waiting for this shard, and no other call on it could begin.
            self._round.give_up(error, message)
        if by in (self._round.want_by, self._round.filled_by) or self._round.round is None:
            self._end(error, message, now)

    def _on_filled(self, event: ShardFilled) -> None:
        self._target.filled(event, self._driver.digests)

    def _on_round(self, event: RoundEvent, now: float) -> None:
        match event:
            case RoundJoined():
                self._missing = event.missing
                self._absent.heard(event.missing)
            case RoundDecided() if self.stage is not ReadStage.ENDING:
                self._decided(event, now)
            case RoundStarted() if self.stage is ReadStage.GRANTED and event.attempt == self._round.attempt:
                self._vacate(now)
            case RoundOvertaken() if event.attempt == self._round.attempt:
                self._judge(now)
            case RoundReopened() if self.stage is not ReadStage.ENDING:
                self._reopened(now)
            case RoundSettled():
                self._end("", "", now)
            case RoundFailed():
                self._end(event.error, event.message, now)

    def _judge(self, now: float) -> None:
        """A newer version came: go on only if that is the better end. The log may refuse to turn the round again."""
        if self.stage not in (ReadStage.DRAINING, ReadStage.FILLING) or self.transfer is None:
            return
        elapsed_s = now - self._fills_since if self.stage is ReadStage.FILLING else 0.0
        if is_better_dropped(
            self.transfer.done_bytes(), sum(self.core.spec.nbytes), elapsed_s, self.core.config.read_finish_s
        ):
            self._round.drop()

    def _begin_anew(self) -> None:
        """What this shard gave up the log took up again, so the call's own bound counts once more."""
        self._target.begin_anew()
        self._driver.abandon()
        self._round.begin_anew()
        self._deadline = self.call.deadline
        self._replan_at = None

    def _reopened(self, now: float) -> None:
        """What was decided has gone, and there is nothing else to read: the call waits as it did at its beginning."""
        self._begin_anew()
        self.stage = ReadStage.JOINING
        self.version = None
        if self._waits_since is None:
            self._waits_since = now

    def _decided(self, event: RoundDecided, now: float) -> None:
        """Begin to read the version, once nothing of an earlier plan can be written any more.

        The wait ends with the first decision, when this agent hears it. From then on the read is under way, whatever
        the log decides anew, until it ends or the log reopens the round for want of a version: that is a wait again,
        until the next decision.
        """
        core = self.core
        if self._waits_since is not None:
            self._waited_s += now - self._waits_since
            self._waits_since = None
        if self.stage is not ReadStage.LEASING:
            self.leasing_since = now
        self._was_decided = True
        self._begin_anew()
        self._round.attempt = event.attempt
        self.stage, self.version = ReadStage.LEASING, event.version
        if self.transfer is not None:
            self._decision = event
            return
        self._decision = None
        if core.key.shard in event.held:
            self.stage = ReadStage.GRANTED
            return
        self._at_once = core.spec.mapped and len(event.held) + 1 == len(event.roots)
        self._driver.begin(event.version, event.roots[core.key.shard], ReadPriority(event.cmd, event.round), now)
        self._drive(now)

    def _on_ready(self, event: ReplicaReady, now: float) -> None:
        self._target.swap(event.version, self._driver.digests)
        self.core.hold(event.version)
        self._verdict = None
        if self.transfer is not None and self.transfer.version != event.version:
            # The log turned back to what stands here; what is on its way beside it for another version ends first.
            self._answer = event.version
            self._end("", "", now)
            return
        if self._report is not None and self.transfer is not None:
            stages = stages_of(self.transfer, self.began, self._waited_s, now)
            root = self.transfer.root if self._root is None else self._root
            known = "" if root in (None, NO_ROOT) else root
            self._report = msgspec.structs.replace(self._report, stages=stages, root=known)
        self.core.finish(version=event.version, report=self._report)

    # The read.

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Pass on what came of the transfer's wishes, and what was found out about who maps the memory."""
        if self._target.on_outcome(outcome, now):
            self._write(now)
        if self._driver.has_digested(outcome):
            if self.stage is ReadStage.DIGESTING:
                self._filled(root_digest(self._driver.digests))
        elif isinstance(outcome, Kept):
            self._kept(outcome, now)
        elif self.transfer is not None:
            self._driver.on_outcome(outcome, now)
            self._drive(now)

    def _drive(self, now: float) -> None:
        """Carry out what the transfer wants, and follow its phase."""
        transfer = self.transfer
        if transfer is None:
            return
        self._driver.drive(self._round.agent, now)
        if self.stage is ReadStage.ENDING:
            self._settle_end(now)
        elif self._driver.abandoned:
            self._follow_decision(now)
        elif transfer.phase is TransferPhase.LEASED and self.stage is ReadStage.LEASING:
            self._dry_since = None
            self._granted(now)
        elif transfer.is_dry and self.stage is ReadStage.LEASING and self._replan_at is None:
            self._replan_at = now + self._dry_replan_s
            self._dry_replan_s *= 2
        elif transfer.phase is TransferPhase.FAILED and transfer.quiet:
            self._transfer_failed(transfer, now)
        elif transfer.phase is TransferPhase.DONE and transfer.quiet and self.stage is ReadStage.FILLING:
            self._all_here(transfer, now)

    def _granted(self, now: float) -> None:
        """All leases are there."""
        self.stage = ReadStage.GRANTED
        if self._at_once:
            self._vacate(now)
        else:
            self._round.granted()

    def _follow_decision(self, now: float) -> None:
        """The abandoned transfer may be quiet by now; then the decision that waited for that is followed."""
        self._driver.forget_if_quiet()
        if self.transfer is None and self._decision is not None:
            self._decided(self._decision, now)

    def _transfer_failed(self, transfer: Transfer, now: float) -> None:
        """No leases: let the log decide again, for a while. No bytes: leave the round."""
        error, message = transfer.error or (VersionUnavailable.__name__, "no source is left")
        if self.stage is ReadStage.LEASING and error == VersionUnavailable.__name__:
            self._dry_since = now if self._dry_since is None else self._dry_since
            if now - self._dry_since < self.core.config.transfer.sources_lost_s:
                self._leave_dry()
                self._replan_at = now + REPLAN_S
                return
        if self._round.give_up_by is None and self.stage is not ReadStage.FILLED:
            self._give_up(error, message, now, self._round.attempt)

    def _leave_dry(self) -> None:
        """Give up an attempt that has no leases. Holders of other layouts, which may be left, give all or nothing."""
        if self.transfer is not None:
            self._trouble = self.transfer.trouble or self._trouble
        self._driver.forgo_kept()
        self._driver.abandon()

    def _vacate(self, now: float) -> None:
        """Every shard has its leases: stop serving what stands here, then write."""
        if self.transfer is None:
            # This shard holds the version already; it waits for its siblings.
            return
        self._gave_up_old = not self.core.spec.swaps
        if self.transfer.phase is TransferPhase.FAILED:
            # Its sources went after they had granted. Nothing is written, and the attempt is given up.
            return
        self.stage = ReadStage.DRAINING
        if self._target.vacate(now):
            self._write(now)

    def _write(self, now: float) -> None:
        self.stage = ReadStage.FILLING
        self._fills_since = now
        self._driver.serve()
        if self.transfer is not None:
            self.transfer.start(now)
            self._drive(now)

    def on_readers_gone(self, now: float) -> None:
        """The last reader of what stood here went."""
        if self.stage is ReadStage.DRAINING and self._target.on_readers_gone(now):
            self._write(now)

    def _all_here(self, transfer: Transfer, now: float) -> None:
        execution = self._driver.program
        program = None if execution is None else execution.program
        self._report = report_of(
            transfer,
            self.core.spec.nbytes,
            now - self.began,
            self._driver.retried,
            program=program,
            turned_by=self._driver.turned_by,
        )
        by_pieces = transfer.root is not None and self._driver.program is None
        if by_pieces or transfer.root == NO_ROOT or not self.core.config.digests:
            self._filled(transfer.root)
            return
        # The log has no digests of the shard's own pieces yet: it gets them from here, and keeps the first that it
        # gets.
        self.stage = ReadStage.DIGESTING
        self._driver.digest()

    def _filled(self, root: str | None) -> None:
        """All bytes stand and are verified."""
        assert self.transfer is not None
        self._root = root
        if self.core.spec.swaps:
            # Its manifest tells of what it holds, and of this from the swap on.
            self._say_filled()
            return
        self.stage = ReadStage.KEEPING
        self._target.keep(self.transfer.version, root or NO_ROOT, self._driver.digests)

    def awaits(self, outcome: Kept) -> bool:
        """Tell whether this is the answer that the read goes on with."""
        is_asked = self.stage is ReadStage.KEEPING and self._round.give_up_by is None
        return is_asked and self._target.has_kept(outcome)

    def _kept(self, outcome: Kept, now: float) -> None:
        if not self.awaits(outcome):
            return
        if outcome.failure is not None and cached_version(self.core.key.replica) is not None:
            # Others would rest on a copy that goes with this process. A worker has its version all the same.
            self._give_up(MemoryExhausted.__name__, outcome.failure, now, self._round.attempt)
            return
        self._say_filled()

    def _say_filled(self) -> None:
        assert self.transfer is not None
        self.stage = ReadStage.FILLED
        self._round.filled(self.transfer.version, self._root, at_once=self._at_once)

    # The end.

    def tick(self, now: float) -> None:
        """Let time pass: patience, the drain's bound, another plan, and the call's own bound."""
        if self._replan_at is not None and now >= self._replan_at:
            self._replan_at = None
            if self.stage is ReadStage.LEASING:
                self._leave_dry()
                self._round.replan()
        if not self._settled and now >= self.call.patience and self._round.round is not None:
            self._settled = True
            self._round.settle()
        if self.stage is ReadStage.DRAINING and self._target.tick(now):
            self._write(now)
        if self.transfer is not None:
            self._drive(now)
        if not self._is_over() and now >= self._deadline and self.stage is not ReadStage.ENDING:
            self._out_of_time(now)

    def _out_of_time(self, now: float) -> None:
        if self._round.give_up_by is None and self._target.is_blocked:
            self._give_up(*still_mapped(self.core.key), now)
            return
        if self._round.give_up_by is None:
            self._give_up(RoundTimeout.__name__, self._not_in_time(self._missing)[1], now)
            return
        self._round.fence()
        self._end(*unanswered(self.core.key), now)

    def _give_up(self, error: str, message: str, now: float, attempt: int | None = None) -> None:
        self._deadline = now + self.call.outcome_s
        self._round.give_up(error, message, attempt)

    def _not_in_time(self, missing: tuple[int, ...]) -> tuple[str, str]:
        absent, is_joining = self._absent.of(missing), self.stage is ReadStage.JOINING
        unplanned = None if self.transfer is None else self.transfer.plan_requests.unanswered
        trouble = (self.transfer.trouble if self.transfer is not None else "") or self._trouble
        if self.stage is ReadStage.KEEPING:
            trouble = "all of it has come, and its manifest is not written yet"
        return not_in_time(
            self.core.key, self.call.want, absent, is_joining=is_joining, unplanned=unplanned, trouble=trouble
        )

    def _end(self, error: str, message: str, now: float) -> None:
        """Answer the call as soon as nothing can be written any more. An empty error means None."""
        if self.stage is not ReadStage.ENDING or not self._verdict:
            self._verdict = (error, message)
        self.stage = ReadStage.ENDING
        self._driver.stop()
        self._settle_end(now)

    def _settle_end(self, now: float) -> None:
        core = self.core
        if self._verdict is None or not self._driver.is_quiet:
            return
        report = self.report(now)
        self._driver.keep_verified()
        self._target.leave()
        error, message = self._verdict
        if error in NOT_NOW and self.call.want == "newer" and self._was_decided and not self._gave_up_old:
            # What the shard held it still holds, so that its worker can go on with that and call again.
            core.finish(report=report_of_failure(message, now - self.began, report))
        elif error:
            core.fail(error, message, report)
        else:
            core.finish(version=self._answer)

    def report(self, now: float) -> ReadReport | None:
        """Sum up how far it has come, if it has begun."""
        if self.transfer is None:
            return None
        return report_of(self.transfer, self.core.spec.nbytes, now - self.began, self._driver.retried)

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        times = [self._deadline] if self.stage is not ReadStage.ENDING else []
        if self._replan_at is not None:
            times.append(self._replan_at)
        if not self._settled and self._round.round is not None:
            times.append(self.call.patience)
        if self.stage is ReadStage.DRAINING:
            again = self._target.deadline()
            times += [again] if again is not None else []
        if self.transfer is not None:
            when = self.transfer.deadline()
            times += [when] if when is not None else []
        return min(times, default=None)

    def abandon(self, now: float) -> None:
        """The worker is gone before anything was written: leave the round."""
        if self._round.give_up_by is None:
            self._give_up(RoundTimeout.__name__, f"the worker of {self.core.where} is gone", now)

    def restart(self, now: float) -> None:
        """The agent joined anew, and its rounds went with the old incarnation."""
        self._target.stated()
        self._end(AgentUnavailable.__name__, "the agent was taken for lost and has joined anew: call again", now)


def read_of(core: ShardCore | None) -> ReadOperation | None:
    """Return the read that is in progress on a shard, if there is one."""
    operation = None if core is None else core.operation
    return operation if isinstance(operation, ReadOperation) else None
