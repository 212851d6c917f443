"""Taking a shard back: unpublish, and release. Pure.

The order is the whole point: first no new lease is granted, then the log is told, then the open reads end or are
broken, and only then does the call return and the memory change. A process that maps the memory can't be made to let
go: the call waits for them too, or goes on in spare memory (`core/operations/reclaim.py`), or raises `DrainTimeout` at
its bound.

The log may hold it back, because this is the last copy that counts of a retained version. Then the shard is published
as before, and grants leases, until the log says that it drains or stays.

Where the log is silent beyond the bound the caller is told so, and what was begun goes on without a caller: an
unpublish until it is known whether the log counts the shard as published still, so that it grants leases again; a
release until the shard is gone.
"""

from abc import ABC, abstractmethod
from typing import Final

from tensorhub_agent.core.effects import AnyCall, BreakLease, CallRegister, CallRelease, CallUnpublish, EffectOutcome
from tensorhub_agent.core.operation import UnattendedOperation
from tensorhub_agent.core.operations.reclaim import MemoryChoice, MemoryReclaim
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.errors import (
    DrainTimeout,
    NotPublished,
    RegistryUnavailable,
    RetentionFull,
    TensorHubError,
)
from tensorhub_common.protocol.log.commands import Drained, Release, Sender, Stay, Unpublish
from tensorhub_common.protocol.log.events import (
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    ShardDrained,
    ShardDraining,
    ShardStays,
    UnpublishHeld,
)

HELD: Final = "unpublish.held"


class DrainOperation(UnattendedOperation, ABC):
    """The common way down: stop granting, tell the log, wait for readers, tell the log."""

    def __init__(self, core: ShardCore, call: CallUnpublish | CallRelease | CallRegister) -> None:
        """Take the call."""
        self.core = core
        self.call: AnyCall = call
        self._deadline = call.deadline
        self._unpublish_by: Sender | None = None
        self._drained_by: Sender | None = None
        self._stay_by: Sender | None = None
        self._counted = False
        self._bounded = False
        self._held = False
        self._is_detached = False
        """Its caller was told that the log is silent."""
        self._reclaim = MemoryReclaim(core, MemoryChoice.EITHER)

    def drain(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Begin, or go on after a bound that was reached before."""
        core, key = self.core, self.core.key
        core.table.stop_granting(key)
        core.hold(None)
        core.set_memory(MemoryState.DRAINING)
        self._unpublish_by = core.append_command(Unpublish(model=key.model, replica=key.replica, shard=key.shard))

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take the log's word."""
        if self._held:
            self._on_word_of_hold(event, now)
        if event.by is None:
            return
        if event.by == self._unpublish_by:
            repeats_hold = isinstance(event, CommandRepeated) and event.outcome == HELD
            if isinstance(event, UnpublishHeld) or repeats_hold:
                self._resume(self.core.contents.version)
                self.on_held(now)
                return
            if isinstance(event, CommandRejected | CommandRepeated) and event.error == RetentionFull.__name__:
                self._resume(self.core.contents.version)
                self.stays(RetentionFull, event.message or self._no_copy())
                return
            # A refusal means that the log counts the shard as gone already: it is no holder either way.
            if isinstance(event, ShardDraining | CommandRejected | CommandRepeated):
                self._counted = True
                self.counted(now)
        elif event.by == self._drained_by and isinstance(event, ShardDrained | CommandRejected | CommandRepeated):
            self.core.set_memory(MemoryState.EMPTY)
            self.core.table.withdraw_offer(self.core.key)
            self.drained(now)

    def _resume(self, version: int | None) -> None:
        """Serve again what the log goes on counting as published."""
        core, contents = self.core, self.core.contents
        if contents.memory not in (MemoryState.READY, MemoryState.DRAINING) or version is None:
            return
        # Who reads from now on is broken at the bound that the log's next word begins.
        self._held, self._bounded = True, False
        if contents.root is not None:
            core.table.offer(core.key, contents.version, contents.root, contents.digests)
        core.set_memory(MemoryState.READY)
        core.hold(version)

    def _on_word_of_hold(self, event: AnyEvent, now: float) -> None:
        """Another copy stands, so this one drains; or none can, so it stays."""
        core = self.core
        if (
            not isinstance(event, ShardDraining | ShardStays)
            or not core.is_mine(event)
            or event.shard != core.key.shard
        ):
            return
        self._held = False
        if isinstance(event, ShardStays):
            self.stays(RetentionFull, event.message or self._no_copy())
            return
        core.table.stop_granting(core.key)
        core.hold(None)
        core.set_memory(MemoryState.DRAINING)
        self._counted = True
        self.counted(now)

    def counted(self, now: float) -> None:
        """The log counts the shard as a holder no more."""
        self._when_read_out(now)

    def _no_copy(self) -> str:
        core = self.core
        return (
            f"{core.where} stays published: no other copy of the retained version {core.contents.version} stood within "
            "the bound; allow more time, or give an agent more TENSORHUB_CACHE_BYTES"
        )

    def on_held(self, now: float) -> None:
        """The log holds the unpublish back: wait for its word, up to the call's bound."""

    def stays(self, error: type[TensorHubError], message: str) -> None:
        """The shard is published as before."""
        core = self.core
        if core.contents.memory is MemoryState.DRAINING:
            self._resume(core.contents.version)
        self._held = False
        if self._is_detached:
            core.settled(self)
        else:
            core.fail(error, message)

    def say_stay(self, now: float) -> None:
        """Ask the log to leave the shard published; it decides."""
        key = self.core.key
        self._deadline = now + self.call.outcome_s
        self._stay_by = self.core.append_command(Stay(model=key.model, replica=key.replica, shard=key.shard))

    def _when_read_out(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        core, key = self.core, self.core.key
        if not self._counted or self._drained_by is not None or core.table.reading(key) > 0:
            return
        self._reclaim.seek()
        if self._reclaim.is_found:
            self._drained_by = core.append_command(Drained(model=key.model, replica=key.replica, shard=key.shard))

    def on_readers_gone(self, now: float) -> None:
        """The last reader went."""
        self._when_read_out(now)

    @abstractmethod
    def drained(self, now: float) -> None:
        """Go on when the memory may be overwritten."""

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what was found out about who maps the memory."""
        self._reclaim.on_outcome(outcome, now)
        self._when_read_out(now)
        self._fail_if_mapped()

    def _fail_if_mapped(self) -> None:
        """At the bound say that somebody still maps the memory. It drains on, and the next call goes on from there."""
        core = self.core
        if self._bounded and self._reclaim.is_blocked and self._drained_by is None and not self._is_detached:
            spare = " and its spare memory" if core.spec.staged else ""
            core.fail(
                DrainTimeout,
                f"the memory of {core.where}{spare} is still mapped by a reader of this host: don't overwrite it, and "
                "call again; a process that maps it lets go by its next update, by let_go(), once nothing refers to "
                "the tensors, or by its end",
            )

    def tick(self, now: float) -> None:
        """At the bound break the readers, and raise while somebody maps the memory; when the log is silent, say so."""
        self._reclaim.tick(now)
        if now < self._deadline or self._reclaim.is_copying or self._is_detached:
            return
        core = self.core
        if self._held and self._stay_by is None:
            self.say_stay(now)
            return
        if self._held:
            # Whether the log lets it go just now is unknown, so it may not be published on, nor overwritten.
            core.table.stop_granting(core.key)
            core.set_memory(MemoryState.DRAINING)
            self._leave_to_log()
            return
        if not self._bounded:
            self._bounded = True
            self._deadline = now + self.call.outcome_s
            for lease in core.table.break_all(core.key):
                core.emit(BreakLease(lease, "the bound of unpublish was reached"))
            self._when_read_out(now)
            self._fail_if_mapped()
            return
        self._leave_to_log()

    def _leave_to_log(self) -> None:
        """Tell the caller that the log is silent, and go on without it."""
        self.core.fail(RegistryUnavailable, self.silence())
        self._is_detached = True
        self.core.detach(self)

    @abstractmethod
    def restart(self, now: float) -> None:
        """Take note that the agent has joined anew under a higher incarnation."""

    @property
    def excludes(self) -> str | None:
        """Any other call may begin while this goes on without a caller."""
        return None

    def silence(self) -> str:
        """Say what it means that the log said nothing."""
        return f"the registry did not say that {self.core.where} may be overwritten: don't, and call again"

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        if self._reclaim.is_copying:
            # It ends by itself, and nothing may be answered before.
            return None
        again = self._reclaim.deadline()
        if self._is_detached:
            return again
        return self._deadline if again is None else min(self._deadline, again)


class UnpublishOperation(DrainOperation):
    """One unpublish call of one shard."""

    def start(self, now: float) -> None:
        """Refuse when nothing is published, else drain."""
        if self.core.spec.mapped:
            self.core.fail(NotPublished, f"{self.core.where} only maps what its publisher holds: unpublish there")
        elif self.core.contents.memory not in (MemoryState.READY, MemoryState.DRAINING):
            self.core.fail(NotPublished, f"{self.core.where} has nothing published: publish or replicate first")
        else:
            self.drain(now)

    def counted(self, now: float) -> None:
        """The log counts the shard as a holder no more. Without a caller that is all: the next call empties it."""
        if self._is_detached:
            self.core.settled(self)
        else:
            super().counted(now)

    def drained(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """The memory may be overwritten. Without a caller the call that is under way is another one."""
        if self._is_detached:
            self.core.settled(self)
        else:
            self.core.finish()

    def restart(self, now: float) -> None:
        """The agent joined anew without stating this shard, so the log counts it as empty."""
        if self._is_detached:
            self.core.settled(self)
            return
        if self._held:
            # It was stated as published, and the log let go of what the old incarnation had said.
            self._held, self._stay_by = False, None
            self.drain(now)
            return
        self._counted = True
        core = self.core
        core.break_readers("the agent joined anew")
        if core.contents.lent:
            # What the old incarnation said is void, but the memory must be free all the same.
            self._drained_by = None
            self._when_read_out(now)
            return
        core.set_memory(MemoryState.EMPTY)
        core.finish()


class AttachOperation(UnpublishOperation):
    """A worker comes back to a shard that stands here. It may write what is empty: an old drain ends first."""

    def start(self, now: float) -> None:
        """Answer, unless a call that gave up has left the shard draining, or to be drained once another copy stands."""
        core = self.core
        goes_on, core.detached = core.detached is not None, None
        # What another worker had mapped this one does not show.
        core.worker_mapping_gone()
        if core.contents.memory is MemoryState.DRAINING or (goes_on and core.contents.memory is MemoryState.READY):
            # No other operation is left to take the log's word that it drains.
            self.drain(now)
        else:
            core.finish()

    def on_held(self, now: float) -> None:
        """The worker comes back to what is published still, and may ask for it again."""
        self.say_stay(now)

    def stays(self, error: type[TensorHubError], message: str) -> None:
        """The shard is published as before."""
        if self._is_detached:
            super().stays(error, message)
            return
        self._held = False
        self.core.finish()


class ReleaseOperation(DrainOperation):
    """Drain if something is published, then let the log forget the shard, then free the memory."""

    def __init__(self, core: ShardCore, call: CallRelease) -> None:
        """Take the call."""
        super().__init__(core, call)
        self._release_by: Sender | None = None

    def start(self, now: float) -> None:
        """Drain first where there may be readers."""
        if self.core.contents.memory in (MemoryState.READY, MemoryState.DRAINING):
            self.drain(now)
        else:
            self.drained(now)

    def drained(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Tell the log."""
        key = self.core.key
        self._release_by = self.core.append_command(Release(model=key.model, replica=key.replica, shard=key.shard))

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take the log's word on the release too."""
        if self._release_by is not None and event.by == self._release_by:
            # That it is gone is the core's to notice; a refusal means that it was gone before.
            if isinstance(event, CommandRejected | CommandRepeated):
                self.core.dismiss(now)
            return
        super().on_event(event, now)

    def silence(self) -> str:
        """Say what it means that the log said nothing."""
        where = self.core.where
        if self._release_by is None:
            return (
                f"the registry did not say that {where} may go: it goes as soon as the registry answers and no reader "
                "is left, unless it is the last copy of a retained version, which stays published"
            )
        return f"the registry did not say that {where} is released: it goes as soon as the registry answers"

    @property
    def excludes(self) -> str | None:
        """Once the log was told that the shard goes, nothing else may begin on it."""
        if self._release_by is None:
            return None
        return f"{self.core.where} is being released, and the registry has not answered yet: wait until it has"

    def restart(self, now: float) -> None:
        """The shard is gone, as was wanted; or the agent joined anew, and the old incarnation's word counts no more."""
        core = self.core
        if core.dismissed:
            core.finish()
            return
        if self._held:
            self._held, self._stay_by = False, None
            self.drain(now)
            return
        core.break_readers("the agent joined anew")
        if core.contents.memory is not MemoryState.EMPTY:
            core.set_memory(MemoryState.EMPTY)
        self.drained(now)
