"""Publishing one shard: gate the memory, digest it, offer it to the log, wait for the siblings. Pure.

From the digest on the memory is as good as published: it does not change until the log has decided, and so leases on it
are granted at once to readers that name the same root, which they can only have from the log.
"""

from tensorhub_agent.core.effects import BreakLease, CallPublish, Digested, DigestMemory, EffectOutcome
from tensorhub_agent.core.operations.timeout_errors import MissingShards
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.errors import (
    AgentUnavailable,
    NotFilled,
    RegistryUnavailable,
    ReplicaConflict,
    RoundTimeout,
    VersionConflict,
)
from tensorhub_common.protocol.log.commands import NO_ROOT, Ready, Sender, Withdraw
from tensorhub_common.protocol.log.events import (
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    PublishFailed,
    PublishJoined,
    PublishStands,
    PublishWithdrawn,
    ReplicaReady,
)


class PublishOperation:
    """One publish call of one shard."""

    def __init__(self, core: ShardCore, call: CallPublish) -> None:
        """Take the call."""
        self.core, self.call, self.version = core, call, call.version
        self.reached = False
        self._deadline = call.deadline
        self._digesting = 0
        self._root, self._digests = NO_ROOT, b""
        self._ready_by: Sender | None = None
        self._withdraw_by: Sender | None = None
        self._missing: tuple[int, ...] = ()
        self._absent = MissingShards()
        # Until the log has answered this offer, what it says of the replica is about an earlier one that was given up.
        self._counted = False

    def start(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Refuse what can't be published, or begin to digest."""
        core, contents = self.core, self.core.contents
        if core.spec.mapped:
            core.fail(NotFilled, f"{core.where} only maps what its publisher holds: publish there")
        elif contents.memory is MemoryState.READY:
            if self.version == contents.version:
                core.finish(version=contents.version)
                return
            core.fail(
                VersionConflict,
                f"{core.where} still has version {contents.version} published: unpublish {contents.version} first",
            )
        elif contents.memory is not MemoryState.EMPTY and not (
            # Who maps it has what is published again.
            self.call.is_handed_back and contents.memory is MemoryState.DRAINING
        ):
            core.fail(ReplicaConflict, f"{core.where} is {contents.memory}: call unpublish again and wait for its end")
        elif contents.partial:
            core.fail(
                NotFilled,
                f"{core.where} holds only a part of a version, since its last fill failed, or its agent was restarted "
                "and could not vouch for it: replicate again; or write every tensor and call mark_loaded()",
            )
        else:
            self._digesting = core.number()
            core.emit(DigestMemory(core.key, self._digesting))

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Take the digests."""
        if isinstance(outcome, Digested) and outcome.number == self._digesting and self._ready_by is None:
            core = self.core
            if self._withdraw_by is not None:
                return
            self._digests = outcome.digests
            # With digests off nothing vouches for the bytes; an empty layout still has a root, over no digest.
            self._root = root_digest(outcome.digests) if core.config.digests else NO_ROOT
            key = core.key
            if self._root != NO_ROOT:
                core.table.offer(key, self.version, self._root, self._digests)
            self._ready_by = core.append_command(
                Ready(model=key.model, replica=key.replica, shard=key.shard, version=self.version, root=self._root)
            )

    def on_event(self, event: AnyEvent, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Take the log's word."""
        core = self.core
        mine = event.by is not None and event.by in (self._ready_by, self._withdraw_by)
        self._counted = self._counted or (event.by is not None and event.by == self._ready_by)
        match event:
            case PublishStands() if mine:
                self._published(event.version)
            case ReplicaReady() if core.is_mine(event) and event.round is None and self._counted:
                core.hold(event.version)
                self._published(event.version)
            case PublishFailed() if core.is_mine(event) and core.key.shard in event.shards and self._counted:
                self._unoffer()
                core.fail(event.error, event.message)
            case PublishJoined() if core.is_mine(event):
                self._missing = tuple(index for index in event.missing if index != core.key.shard)
                self._absent.heard(event.missing)
            case PublishWithdrawn() if mine:
                self._unoffer()
                core.fail(RoundTimeout, self._late(self._absent.of(event.missing)))
            case CommandRejected() if mine:
                self._rejected(event)
            case CommandRepeated() if mine and event.error is not None:
                self._unoffer()
                core.fail(event.error, event.message or "the log refused the publication")

    def _rejected(self, event: CommandRejected) -> None:
        self._unoffer()
        if event.by == self._withdraw_by:
            self.core.fail(RoundTimeout, self._late(self._missing))
        else:
            self.core.fail(event.error, event.message)

    def _published(self, version: int) -> None:
        core = self.core
        core.set_memory(MemoryState.READY, version=version, root=self._root, digests=self._digests, kept=None)
        core.table.offer(core.key, version, self._root, self._digests)
        core.finish(version=version)

    def _unoffer(self) -> None:
        """Grant nothing more. A reader can be here only if the log has published already what is taken back now."""
        core = self.core
        for lease in core.table.withdraw_offer(core.key):
            core.emit(BreakLease(lease, "the publication was taken back"))

    def _late(self, missing: tuple[int, ...]) -> str:
        who = f"shards {list(missing)} did not publish" if missing else "the registry did not answer"
        return f"{self.core.where}: {who} within the bound, so this shard's publication is withdrawn: publish again"

    def on_readers_gone(self, now: float) -> None:
        """Readers don't matter to a publication."""

    def tick(self, now: float) -> None:
        """At the bound withdraw; when the log says nothing to that either, fence and raise."""
        if now < self._deadline:
            return
        core = self.core
        if self._withdraw_by is None:
            if self._ready_by is None:
                self._digesting = 0
                core.fail(RoundTimeout, f"{core.where} could not be digested within the bound: allow more time")
                return
            key = core.key
            self._withdraw_by = core.append_command(Withdraw(model=key.model, replica=key.replica, shard=key.shard))
            self._deadline = now + self.call.outcome_s
            return
        self._unoffer()
        core.take_back()
        core.fail(
            RegistryUnavailable,
            f"the registry did not say what became of the publication of {core.where}; it is withdrawn as soon as it "
            "answers: see 'tensorhub status', then publish again",
        )

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        return self._deadline

    def abandon(self, now: float) -> None:
        """The worker is gone: withdraw at once."""
        self._deadline = min(self._deadline, now)
        self.tick(now)

    def restart(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """The agent joined anew, and its old offer went with the old incarnation."""
        self._unoffer()
        self.core.fail(AgentUnavailable, "the agent was taken for lost and has joined anew: publish again")
