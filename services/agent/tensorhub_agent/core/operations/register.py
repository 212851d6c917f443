"""Registering one shard whose segment stands already. Pure.

The log orders registrations, so of two siblings with clashing layouts the later one is refused, by its own agent.
"""

from tensorhub_agent.core.effects import CallRegister, CompareLayouts, EffectOutcome, SiblingsChecked
from tensorhub_agent.core.operation import UnattendedOperation
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.errors import AgentUnavailable, LayoutMismatch, RegistryUnavailable
from tensorhub_common.protocol.log.commands import Register, Release, Sender
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected, CommandRepeated, ShardRegistered


class RegisterOperation(UnattendedOperation):
    """One register call of one shard."""

    def __init__(self, core: ShardCore, call: CallRegister) -> None:
        """Take the call."""
        self.core, self.call = core, call
        self.reached = True
        self._by: Sender | None = None
        self._checks: int | None = None
        """Where the log has taken it, while its siblings' layouts are compared: so may an earlier registration's be."""

    def start(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """Tell the log."""
        spec, key = self.core.spec, self.core.key
        contents = self.core.contents
        contents.partial, contents.spare_lent = self.call.partial, self.call.spare_lent
        if self.call.lent:
            contents.lent, contents.memory = True, MemoryState.DRAINING
        self._by = self.core.append_command(
            Register(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                shards=spec.shards,
                spot=spec.spot,
                layout=spec.layout,
                nbytes=0 if spec.mapped else sum(spec.nbytes),
                mapped=spec.mapped,
            )
        )

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take the log's word."""
        if event.by is None or event.by != self._by:
            return
        if isinstance(event, ShardRegistered):
            if event.siblings:
                self._checks = event.cmd
                self.core.emit(CompareLayouts(self.core.key, event.cmd, event.siblings))
            else:
                self._done(now)
        elif isinstance(event, CommandRejected | CommandRepeated) and event.error is not None:
            self._drop(event.error, event.message or "")

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what the siblings' layouts say."""
        if isinstance(outcome, SiblingsChecked) and outcome.number == self._checks:
            if outcome.mismatch is None:
                self._done(now)
            else:
                self._release()
                self._drop(LayoutMismatch.__name__, f"{self.core.where}: {outcome.mismatch}: give the same tensors")

    def _done(self, now: float) -> None:
        self.core.registered = True
        self.core.finish()
        if self.call.holds is not None:
            self.core.publish_handed_back(self.call.holds, now)

    def _release(self) -> None:
        key = self.core.key
        self.core.append_command(Release(model=key.model, replica=key.replica, shard=key.shard))

    def _drop(self, error: str, message: str) -> None:
        self.core.fail(error, message)
        self.core.leave()

    def on_readers_gone(self, now: float) -> None:
        """There are no readers yet."""

    def tick(self, now: float) -> None:
        """At the bound take the registration back."""
        if now >= self.call.deadline:
            self._release()
            self._drop(
                RegistryUnavailable.__name__,
                f"no registry confirmed {self.core.where} within the bound: see 'tensorhub status', "
                "then register again",
            )

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        return self.call.deadline

    def restart(self, now: float) -> None:  # noqa: ARG002 (as every operation has it)
        """The agent joined anew; whether the shard was counted is unknown."""
        self._release()
        self._drop(AgentUnavailable.__name__, "the agent was taken for lost and has joined anew: register again")
