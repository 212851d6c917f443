"""One shard in this agent's memory: what the memory is, and the call in progress on it. Pure.

The log decides what exists; this core decides what may be done to the memory.

Invariants:
- Memory that is offered to readers is not written.
- A call is not answered while anything can still be written into the memory for it.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AnyCall,
    AnyEffect,
    AppendCommand,
    BreakLease,
    CallPublish,
    CallRegister,
    CallRelease,
    CallUnpublish,
    CompleteCall,
    EffectOutcome,
    FailCall,
    FreeShard,
    ReportReplicaVersion,
    SaveManifest,
)
from tensorhub_agent.core.operation import DetachedOperation, Operation
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_common.errors import (
    AgentUnavailable,
    DrainTimeout,
    JobGone,
    ReplicaConflict,
    StaleSender,
    TensorHubError,
)
from tensorhub_common.protocol.log.commands import AnyCommand, Decline, Drained, Sender, Unpublish
from tensorhub_common.protocol.log.events import AnyEvent, PublishWished, ReplicaReady, ShardReleased
from tensorhub_common.protocol.worker import ReadReport

NO_CALL: Final = 0
"""The number of a call without a caller: a publication requested from outside, or of handed-back memory."""

NO_WISH: Final = 0
"""Of a publication that no process has requested: none is told why it does not come about."""


Begin = Callable[["ShardCore", AnyCall], Operation]


class ShardCore:
    """The state of one shard. The operations beside this file do the work of calls."""

    def __init__(
        self,
        spec: ShardSpec,
        table: LeaseTable,
        config: CoreConfig,
        sender: Callable[[], Sender],
        begin: Begin,
        contents: ShardContents | None = None,
        measured: LinkRates | None = None,
    ) -> None:
        """Take what was adopted, or begin with empty memory. `begin` makes the operation that does a call."""
        self.spec, self.key = spec, spec.key
        self.table, self.config, self.measured = table, config, measured or LinkRates()
        self.contents = contents or ShardContents()
        self.replica_version: int | None = None
        self.session: int | None = None
        self.operation: Operation | None = None
        self.detached: DetachedOperation | None = None
        """What goes on of a call that ended without the log's word."""
        self.queued: AnyCall | None = None
        self.out: list[AnyEffect] = []
        self.gone = False
        self.registered = contents is not None
        """Whether the log has taken the registration, as far as the agent knows."""
        self.dismissed = False
        self.deleted: str | None = None
        """The job is deleted: what callers are told."""
        self._sender, self._begin = sender, begin
        self._wish = NO_WISH
        self._numbers = 0
        if self.contents.memory is MemoryState.READY and self.contents.root is not None and not self.spec.mapped:
            self.table.offer(self.key, self.contents.version, self.contents.root, self.contents.digests)

    # What operations use.

    def append_command(self, command: AnyCommand) -> Sender:
        """Send a command on this shard's lane."""
        by = self._sender()
        self.out.append(AppendCommand(msgspec.structs.replace(command, by=by)))
        return by

    def emit(self, *effects: AnyEffect) -> None:
        """Have the driver carry these out, in this order."""
        self.out.extend(effects)

    def note_lent(self, lent: bool = True, *, spare: bool = False) -> None:  # noqa: FBT001, FBT002 (what a probe found)
        """Note whether a process may have the memory mapped, or the spare memory."""
        if spare:
            self.contents.spare_lent = lent
        else:
            self.contents.lent = lent

    def keep_verified(self, version: int, root: str, done: bytearray, digests: bytes) -> None:
        """Keep which pieces a failed read has verified, for a later read of the same bytes."""
        self.contents.kept = (version, root, done, digests)

    def drop_kept(self) -> None:
        """Forget what a failed read has verified: the memory is written otherwise."""
        self.contents.kept = None

    def number(self) -> int:
        """Return a number that no other source, batch or question of this shard has."""
        self._numbers += 1
        return self._numbers

    def numbers_up_to(self, last: int) -> None:
        """Note that numbers below `last` are taken."""
        self._numbers = max(self._numbers, last)

    def hold(self, version: int | None) -> None:
        """Note what the whole replica holds, and tell the worker."""
        if version != self.replica_version:
            self.replica_version = version
            self.out.append(ReportReplicaVersion(self.key, version))

    def set_memory(self, memory: MemoryState, *, swap: bool = False, **changes: object) -> None:
        """Change what the memory is, and have the manifest say so before anything later is done.

        With `swap` this is said of the spare memory, which is the shard's from now on. Memory that somebody may have
        mapped is not empty: it drains on, until an unpublish finds that no process has.
        """
        if swap:
            self.contents.lent, self.contents.spare_lent = self.contents.spare_lent, self.contents.lent
        if memory is MemoryState.EMPTY and self.contents.lent:
            memory = MemoryState.DRAINING
            self.contents.version, self.contents.root, self.contents.digests = None, None, b""
        self.contents.memory = memory
        if memory in (MemoryState.EMPTY, MemoryState.FILLING):
            self.contents.version, self.contents.root, self.contents.digests = None, None, b""
        for name, value in changes.items():
            setattr(self.contents, name, value)
        self.out.append(
            SaveManifest(
                key=self.key,
                state=str(memory),
                partial=self.contents.partial,
                version=self.contents.version,
                root=self.contents.root,
                digests=self.contents.digests,
                swap=swap,
            )
        )

    def finish(self, *, version: int | None = None, report: ReadReport | None = None) -> None:
        """Answer the call under way. Who registers what is gone is told so: there is no memory to hand over."""
        registers = self.operation is not None and isinstance(self.operation.call, CallRegister)
        call = self._ended()
        if registers and self.gone:
            error = AgentUnavailable if self.deleted is None else JobGone
            why = self.deleted or f"{self.where} is gone from its agent: register it again"
            self.out.append(FailCall(call, error.__name__, why))
        elif call != NO_CALL:
            self.out.append(CompleteCall(call=call, version=version, report=report))

    def fail(self, error: type[TensorHubError] | str, message: str, report: ReadReport | None = None) -> None:
        """Let the call under way raise. `report` is how far a read came."""
        if self.operation is not None and isinstance(self.operation.call, CallRegister):
            # Who was not let in has no claim: it may come again.
            self.session = None
        call = self._ended()
        name = error if isinstance(error, str) else error.__name__
        # Of incarnations callers know nothing: to them the agent was away for a moment.
        name = AgentUnavailable.__name__ if name == StaleSender.__name__ else name
        if self.deleted is not None and name != DrainTimeout.__name__:
            name, message = JobGone.__name__, self.deleted
        if call != NO_CALL:
            self.out.append(FailCall(call, name, message, report))
        elif not self.gone:
            self._decline(self._wish, name, message)

    def detach(self, what: DetachedOperation) -> None:
        """The call under way was told that the log is silent; what it had begun goes on."""
        if not self.gone:
            self.detached = what

    def settled(self, what: DetachedOperation) -> None:
        """The log has said what became of it."""
        if self.detached is what:
            self.detached = None

    def _ended(self) -> int:
        call = self.operation.call.call if self.operation is not None else NO_CALL
        self.operation = None
        if self.session is None:
            self.worker_mapping_gone()
        self.break_waiting("nothing is filled in here any more")
        if self.dismissed:
            self.leave()
        return call

    def leave(self) -> None:
        """Be gone from the agent, with the memory."""
        if self.gone:
            return
        self.gone = True
        self.detached = None
        self.break_readers("the shard is gone from this agent")
        self.break_waiting("the shard is gone from this agent")
        self.out.append(FreeShard(self.key))
        self._refuse_queued(f"{self.where} is gone from its agent: register it again")

    def _refuse_queued(self, why: str) -> None:
        if self.queued is not None:
            error = AgentUnavailable if self.deleted is None else JobGone
            self.out.append(FailCall(self.queued.call, error.__name__, self.deleted or why))
            self.queued = None

    def break_readers(self, reason: str) -> None:
        """End the offer, and tell its readers."""
        for lease in self.table.withdraw_offer(self.key):
            self.out.append(BreakLease(lease, reason))

    def break_waiting(self, reason: str) -> None:
        """The memory will not be filled as was expected: tell the readers of what is there."""
        for lease in self.table.cancel_fill(self.key):
            self.out.append(BreakLease(lease, reason))

    def dismiss(self, now: float) -> None:
        """The log does not count the shard as this agent's: leave as soon as nothing can be written any more."""
        self.dismissed = True
        self.break_readers("the shard is gone from this agent")
        if self.operation is not None:
            self.operation.restart(now)
        if self.operation is None:
            self.leave()

    def job_deleted(self, why: str, now: float) -> None:
        """The job is deleted: the same, and each call under way ends with an error that says so."""
        self.deleted = why
        self.dismiss(now)

    @property
    def where(self) -> str:
        """Name the shard in a sentence."""
        return f"shard {self.key.shard} of {self.key.model}/{self.key.replica}"

    def is_mine(self, event: AnyEvent) -> bool:
        """Tell whether an event is about this shard's replica."""
        return getattr(event, "model", None) == self.key.model and getattr(event, "replica", None) == self.key.replica

    # What happens.

    def called(self, call: AnyCall, now: float) -> None:
        """Begin a call, or refuse it at once."""
        if isinstance(call, CallRegister):
            if self.session is not None and self.session != call.session:
                self.out.append(
                    FailCall(call.call, ReplicaConflict.__name__, f"{self.where} has a live worker: release it there")
                )
                return
            self.session = call.session
        if self.operation is not None:
            orphan = self.operation.call.session != call.session
            if orphan and self.queued is None:
                # A worker that died left this call behind; it ends within its bound, and then the new one begins.
                self.queued = call
                return
            self.out.append(
                FailCall(call.call, ReplicaConflict.__name__, f"{self.where} has a call under way: wait for it")
            )
            return
        if self.detached is not None and not self._makes_way(self.detached, call):
            return
        self.operation = self._begin(self, call)
        self.operation.start(now)
        self._begin_queued(now)

    def _makes_way(self, detached: DetachedOperation, call: AnyCall) -> bool:
        """Tell whether a call may begin beside what lingers, or in its place; refuse it otherwise."""
        why = None if isinstance(call, CallRelease) else detached.excludes
        if why is None:
            if isinstance(call, CallRelease | CallUnpublish):
                # It drains what stands here in its own name. So may a worker that comes back, who looks first.
                self.detached = None
            return True
        if call.call == NO_CALL:
            self._decline(self._wish, ReplicaConflict.__name__, why)
        else:
            self.out.append(FailCall(call.call, ReplicaConflict.__name__, why))
        if isinstance(call, CallRegister):
            self.session = None
        return False

    def worker_gone(self, session: int, now: float) -> None:
        """The worker's connection ended: give up what it waited for, unless that has got far enough to be finished."""
        if self.session == session:
            self.session = None
            if self.operation is None:
                self.worker_mapping_gone()
        if self.queued is not None and self.queued.session == session:
            self._refuse_queued(f"the worker of {self.where} is gone")
        operation = self.operation
        if operation is not None and operation.call.session == session and not operation.reached:
            operation.abandon(now)
        self._begin_queued(now)

    def worker_mapping_gone(self) -> None:
        """A worker is gone with what it had mapped, or has let go of it: the shard holds nothing from here on."""
        if self.spec.mapped and self.contents.memory is MemoryState.READY:
            self.take_back()
            self.hold(None)
            self.set_memory(MemoryState.EMPTY)

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take an event of the log that is about this shard's replica or answers its lane."""
        if (
            isinstance(event, ShardReleased)
            and self.is_mine(event)
            and event.shard == self.key.shard
            and self.registered
        ):
            # The call that waited for this may have given up, and the shard is gone nevertheless.
            self.dismiss(now)
            return
        if self.detached is not None:
            self.detached.on_event(event, now)
        if self.operation is not None:
            publishing = isinstance(self.operation.call, CallPublish)
            if isinstance(event, PublishWished) and self.is_mine(event) and not publishing:
                self._decline(event.cmd, ReplicaConflict.__name__, f"{self.where} has a call under way: wish again")
            self.operation.on_event(event, now)
        else:
            self._without_operation(event, now)
        self._begin_queued(now)

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what came of an effect."""
        if self.detached is not None:
            self.detached.on_outcome(outcome, now)
        if self.operation is not None:
            self.operation.on_outcome(outcome, now)
        self._begin_queued(now)

    def readers_changed(self, now: float) -> None:
        """A lease ended: somebody may be waiting for the last one."""
        if self.table.reading(self.key) == 0:
            for each in (self.detached, self.operation):
                if each is not None:
                    each.on_readers_gone(now)
        self._begin_queued(now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self.queued is not None and now >= self.queued.deadline:
            self.out.append(
                FailCall(self.queued.call, ReplicaConflict.__name__, f"an earlier call on {self.where} has not ended")
            )
            self.queued = None
        for each in (self.detached, self.operation):
            if each is not None:
                each.tick(now)
        self._begin_queued(now)

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        times = [self.queued.deadline] if self.queued is not None else []
        for each in (self.detached, self.operation):
            when = each.deadline() if each is not None else None
            times += [when] if when is not None else []
        return min(times, default=None)

    def rejoined(self, now: float) -> None:
        """The agent has a new incarnation: what was said by the old one may not have counted."""
        if self.detached is not None:
            self.detached.restart(now)
        if self.operation is not None:
            self.operation.restart(now)
        self._begin_queued(now)

    def believed(self, version: int | None, root: str | None) -> None:
        """Take what the log believes after the agent joined: memory that it can't vouch for is no version."""
        if self.contents.memory is MemoryState.READY and root != self.contents.root:
            self.break_readers("the log does not know what stands here")
            self.set_memory(MemoryState.EMPTY)
            version = None
        self.hold(version)

    def overwritten_for_log(self, version: int) -> None:
        """The log has given up what stands here to have it overwritten with a version, and no call does that."""
        if not self.spec.swaps and self.contents.memory is MemoryState.READY and self.contents.version != version:
            self.hold(None)
            self.break_readers("the log has given up what stands here")
            self.set_memory(MemoryState.EMPTY)

    def check(self) -> None:
        """Raise AssertionError when memory and offers disagree."""
        offered = self.table.offers.get(self.key)
        granting = offered is not None and offered.granting
        if self.contents.memory is MemoryState.FILLING:
            assert not granting, f"{self.where} is written while it grants leases"
            assert self.table.reading(self.key) == 0, f"{self.where} is written under its readers"
        if self.contents.memory is MemoryState.READY:
            assert self.contents.version is not None
        else:
            assert self.contents.memory is MemoryState.DRAINING or not self.contents.lent, (
                f"{self.where} may be written while lent"
            )
        coming = self.table.coming.get(self.key)
        if coming is not None:
            assert self.operation is not None, f"{self.where} is to be filled, and no call fills it"
            assert self.contents.memory is MemoryState.FILLING or not any(coming.has or b""), (
                f"{self.where} shows old pieces"
            )

    def _begin_queued(self, now: float) -> None:
        if self.operation is None and self.queued is not None and not self.gone:
            call, self.queued = self.queued, None
            self.called(call, now)

    def _without_operation(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, PublishWished) and self.is_mine(event):
            self._wish = event.cmd
            self._publish_unasked(event.version, now, now + self.config.wish_s_max)
        elif (
            isinstance(event, ReplicaReady)
            and self.is_mine(event)
            and (self.contents.memory, self.contents.version) == (MemoryState.READY, event.version)
        ):
            self.hold(event.version)

    def publish_handed_back(self, version: int, now: float) -> None:
        """Offer handed-back memory as the version that it had: the log believes it where the root is the same.

        Where it does not, for example since a newer version was published meanwhile, the shard holds nothing.
        """
        self._wish = NO_WISH
        self._publish_unasked(version, now, now + self.config.handed_back_s_max, is_handed_back=True)

    def _publish_unasked(
        self, version: int | None, now: float, deadline: float, *, is_handed_back: bool = False
    ) -> None:
        call = CallPublish(
            call=NO_CALL, session=NO_CALL, deadline=deadline, version=version, is_handed_back=is_handed_back
        )
        self.called(call, now)

    def _decline(self, wish: int, error: str, message: str) -> None:
        """Tell everybody why a wish from outside is not fulfilled: its sender has no call that could raise."""
        if wish == NO_WISH:
            return
        key = self.key
        self.append_command(
            Decline(model=key.model, replica=key.replica, shard=key.shard, wish=wish, error=error, message=message)
        )

    def take_back(self) -> None:
        """A call ends without the log's word: should the log count the shard as a holder, it shall not for long.

        This stands in the lane behind what was fenced and before whatever the shard says next.
        """
        key = self.key
        self.append_command(Unpublish(model=key.model, replica=key.replica, shard=key.shard, void=True))
        self.append_command(Drained(model=key.model, replica=key.replica, shard=key.shard))
