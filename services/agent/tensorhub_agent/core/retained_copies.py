"""The copies of retained versions that the log wants of this agent. Pure.

A copy is a shard like any other, but no worker uses it: this class makes its calls. It is made when the log places it,
reads its version in the round of its cache replica, and is freed when the log says that it is released. After a
restart a copy is adopted as any segment is; a copy that is not whole is read again.

Invariants:
- A copy that can't be made, or not be read in `TRIES_MAX` attempts, is released, so that the log places it elsewhere
  or informs the calls that wait for it.
- At most one call is in progress on each copy.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.core.effects import AllocateCopy, CallRead, CallRelease, CompleteCall, FailCall
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.log.events import CopyPlaced, RoundJoined
from tensorhub_common.protocol.subjects import cached_version

COPIES_SESSION: Final = -1
"""The session of the calls for retained copies; those of workers count from 1."""

TRIES_MAX: Final = 5
RELEASE_S: Final = 10.0


@dataclass(slots=True)
class RetainedCopy:
    """One copy that is being made or kept. `again` is when it is tried once more."""

    version: int
    tries: int = 0
    again: float | None = None
    failed: bool = False
    releasing: bool = False
    awaited: bool = False
    """A sibling reads the version again, and its round waits for this shard, which stands."""


class RetainedCopies:
    """The copies of one agent in one job."""

    def __init__(self, agent: str) -> None:
        """Begin with none."""
        self._agent = agent
        self.copies: dict[ShardKey, RetainedCopy] = {}
        self._calls: dict[int, ShardKey] = {}
        self._last = 0

    def placed(self, event: CopyPlaced) -> list[AllocateCopy]:
        """Take the log's wish for copies; those of this agent are to be made."""
        wanted = []
        for member in event.members:
            key = ShardKey(event.model, event.replica, member.shard)
            if member.agent == self._agent and key not in self.copies:
                self.copies[key] = RetainedCopy(event.version)
                wanted.append(AllocateCopy(key, len(event.members), member.layout, member.nbytes))
        return wanted

    def found(self, key: ShardKey) -> None:
        """Take a copy that an earlier process left, whole or not."""
        version = cached_version(key.replica)
        if version is not None:
            self.copies.setdefault(key, RetainedCopy(version))

    def only(self, standing: Collection[ShardKey]) -> None:
        """The agent joins and states what stands here: what does not, the log won't count on."""
        self.copies = {key: copy for key, copy in self.copies.items() if key in standing}

    def called_for(self, event: RoundJoined) -> None:
        """A shard of a copy has joined a round: the others join it too, whether they stand or not."""
        for shard in event.missing:
            copy = self.copies.get(ShardKey(event.model, event.replica, shard))
            if copy is not None:
                copy.awaited = True

    def forget(self, key: ShardKey) -> None:
        """The log wants the copy no more."""
        self.copies.pop(key, None)

    def give_up(self, key: ShardKey) -> None:
        """The copy can't stay here."""
        if key in self.copies:
            self.copies[key].releasing = True

    def tend(self, core: ShardCore, now: float) -> None:
        """Begin what is to be done about a copy, if nothing is under way."""
        copy = self.copies.get(core.key)
        if copy is None or core.gone:
            return
        if core.operation is not None:
            # It is on its way into that round already, or comes to its own end first.
            copy.awaited = False
            return
        if copy.failed:
            copy.failed, copy.again = False, now + core.config.copy_again_s
        if copy.again is not None and now < copy.again:
            return
        copy.again = None
        if copy.releasing or copy.tries >= TRIES_MAX:
            copy.releasing = True
            core.called(CallRelease(call=self._call(core.key), session=COPIES_SESSION, deadline=now + RELEASE_S), now)
        elif core.contents.memory is not MemoryState.READY or copy.awaited:
            copy.tries += 1
            copy.awaited = False
            until = now + core.config.copy_read_s_max
            call = CallRead(
                call=self._call(core.key), session=COPIES_SESSION, deadline=until, want=copy.version, patience=until
            )
            core.called(call, now)

    def _call(self, key: ShardKey) -> int:
        self._last -= 1
        self._calls[self._last] = key
        return self._last

    def ended(self, effect: CompleteCall | FailCall) -> bool:
        """Take the end of a call; tells whether it was one of these."""
        key = self._calls.pop(effect.call, None)
        copy = self.copies.get(key) if key is not None else None
        if copy is not None and isinstance(effect, FailCall):
            copy.failed, copy.again = True, 0.0
        elif copy is not None:
            copy.tries = 0
        return key is not None

    def deadline(self) -> float | None:
        """Say when a copy is tried again; at once where a try has just failed."""
        return min((copy.again for copy in self.copies.values() if copy.again is not None), default=None)
