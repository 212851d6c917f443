"""What an agent says in one job: each command has a lane, an incarnation and a number, and so have its answers. Pure.

Lane 0 is the agent's own, and each shard has one. Always true: on one lane, under one incarnation, no number is used
twice; and a shard that comes back has the lane that it had, so what it says stands behind what it said before.
"""

from collections.abc import Container
from typing import Final

from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.log.commands import Sender
from tensorhub_common.protocol.log.events import AnyEvent

SHARDS_MAX: Final = 1000
"""An agent holds at most this many shards of one job; each has a lane of its own in the log."""

OWN_LANE: Final = 0


class CommandSequencer:
    """One agent's lanes in one job."""

    def __init__(self, agent: str) -> None:
        """Begin with no incarnation: nothing can be said before `begin`."""
        self._agent = agent
        self.incarnation = 0
        self.lanes: dict[ShardKey, int] = {}
        self._shards: dict[int, ShardKey] = {}
        """Whose lane each is."""
        self._said: dict[int, int] = {}
        self._heard: dict[str, tuple[int, int]] = {}
        """By lane the last answered command: its number, and where it stood in the log."""

    def begin(self, incarnation: int) -> None:
        """Speak under a new incarnation, whose numbers begin anew."""
        self.incarnation = incarnation
        self._said.clear()
        self._heard.clear()

    def lane_of(self, key: ShardKey, present: Container[ShardKey]) -> int:
        """Return a shard's lane; of the shards that are not `present` the one gone for longest may lose its own.

        A shard that is not present has the agent's own lane where the present ones have all others.
        """
        lane = self.lanes.pop(key, None)
        if lane is None and len(self.lanes) >= SHARDS_MAX:
            gone = next((old for old in self.lanes if old not in present), None)
            if gone is None:
                return OWN_LANE
            lane = self.lanes.pop(gone)
        if lane is None:
            lane = len(self.lanes) + 1
        self.lanes[key] = lane
        self._shards[lane] = key
        return lane

    def shard_of(self, lane: int) -> ShardKey | None:
        """Return the shard whose lane this is."""
        return self._shards.get(lane)

    def sender(self, lane: int) -> Sender:
        """Return what the next command on a lane is signed with."""
        self._said[lane] = self._said.get(lane, 0) + 1
        name = f"{self._agent}/{lane}" if lane else self._agent
        return Sender(lane=name, incarnation=self.incarnation, n=self._said[lane])

    def is_answered_by(self, event: AnyEvent) -> bool:
        """Tell whether an event answers this incarnation."""
        by = event.by
        return by is not None and (by.process, by.incarnation) == (self._agent, self.incarnation)

    def is_repeat(self, event: AnyEvent) -> bool:
        """Tell whether the log answers a command that came twice: only its first answer is what became of it."""
        by = event.by
        if by is None or not self.is_answered_by(event):
            return False
        number, at = self._heard.get(by.lane, (0, 0))
        if by.n < number or (by.n == number and event.cmd != at):
            return True
        self._heard[by.lane] = (by.n, event.cmd)
        return False
