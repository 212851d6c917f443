"""What one read says to the log about its replica's round, and which answers are to it. Pure."""

from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.errors import RoundTimeout
from tensorhub_common.protocol.log.commands import (
    NO_ROOT,
    Drop,
    Filled,
    GiveUp,
    Granted,
    Replan,
    Sender,
    Settle,
    VersionRequest,
    Want,
)


class RoundClient:
    """One shard's words in one round. `round` is the round's number once the log has told it."""

    def __init__(self, core: ShardCore) -> None:
        """Begin silent."""
        self._core = core
        self.round: int | None = None
        self.attempt = 0
        self.want_by: Sender | None = None
        self.give_up_by: Sender | None = None
        self.filled_by: Sender | None = None

    def is_mine(self, by: Sender | None) -> bool:
        """Tell whether an event answers what was said here and still matters."""
        return by is not None and by in (self.want_by, self.give_up_by, self.filled_by)

    def is_round(self, number: int | None) -> bool:
        """Tell whether an event is about this round."""
        return self.round is not None and number == self.round

    @property
    def agent(self) -> str:
        """The agent under whose name this is said."""
        return self.want_by.process if self.want_by is not None else ""

    def begin_anew(self) -> None:
        """The log decided again: what was given up or filled before is void."""
        self.give_up_by = self.filled_by = None

    def want(self, wish: VersionRequest, *, patient: bool) -> None:
        """Join the round."""
        key = self._core.key
        command = Want(
            model=key.model,
            replica=key.replica,
            shard=key.shard,
            want=wish,
            patient=patient,
            supersede=True,
            staged=self._core.spec.swaps,
        )
        self.want_by = self._core.append_command(command)

    def settle(self) -> None:
        """Wait for nothing newer any more."""
        key = self._core.key
        assert self.round is not None
        self._core.append_command(Settle(model=key.model, replica=key.replica, shard=key.shard, round=self.round))

    def granted(self) -> None:
        """All leases are there."""
        key = self._core.key
        assert self.round is not None
        self._core.append_command(
            Granted(model=key.model, replica=key.replica, shard=key.shard, round=self.round, attempt=self.attempt)
        )

    def replan(self) -> None:
        """The leases can't be had."""
        key = self._core.key
        assert self.round is not None
        self._core.append_command(
            Replan(model=key.model, replica=key.replica, shard=key.shard, round=self.round, attempt=self.attempt)
        )

    def drop(self) -> None:
        """A newer version stands, and this attempt at an older one is not worth its end."""
        key = self._core.key
        assert self.round is not None
        self._core.append_command(
            Drop(model=key.model, replica=key.replica, shard=key.shard, round=self.round, attempt=self.attempt)
        )

    def filled(self, version: int, root: str | None, *, at_once: bool) -> None:
        """All bytes are there and verified. `at_once`: the log has not been told of the leases."""
        key = self._core.key
        assert self.round is not None
        self.filled_by = self._core.append_command(
            Filled(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                round=self.round,
                version=version,
                root=root or NO_ROOT,
                waits=True,
                attempt=self.attempt if at_once else None,
            )
        )

    def give_up(self, error: str, message: str, attempt: int | None = None) -> None:
        """Leave the round, or only the attempt at it that failed."""
        self.give_up_by = self._leave(self.round, error, message, attempt)

    def fence(self) -> None:
        """The call raises without the log's word: whatever the log makes of it is undone by what stands behind it.

        A lane keeps its order, so nothing that this shard says later can meet what was given up here: neither the
        round, which the log may have taken up again, nor a fill that was not announced.
        """
        core = self._core
        message = f"the registry did not answer {core.where} within the bound"
        self._leave(None, RoundTimeout.__name__, message)
        if self.filled_by is not None and (core.contents.memory is MemoryState.FILLING or core.spec.swaps):
            core.take_back()
            if core.contents.memory is MemoryState.READY:
                # Whether the log has swapped is unknown, so the shard is no holder of either version.
                core.hold(None)
                core.break_readers("the log did not say which version stands here")
                core.set_memory(MemoryState.EMPTY)

    def _leave(self, number: int | None, error: str, message: str, attempt: int | None = None) -> Sender:
        key = self._core.key
        return self._core.append_command(
            GiveUp(
                model=key.model,
                replica=key.replica,
                shard=key.shard,
                round=number,
                attempt=attempt,
                error=error,
                message=message,
            )
        )
