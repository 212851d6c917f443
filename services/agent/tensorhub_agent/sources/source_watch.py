"""The agents that this one reads from: a line in the log when one is left, and one when it is read from again.

Invariant: however many reads leave an agent, that is told once until one of them gets bytes of it again; at most
`LOST_MAX` agents are remembered as left.
"""

from typing import Final

from tensorhub_common.runtime.peer_status import PeerStatus

LOST_MAX: Final = 1024


class SourceWatch:
    """Of all jobs of this agent."""

    def __init__(self) -> None:
        """Begin with every agent as good as the others."""
        self._lost: dict[str, PeerStatus] = {}

    @property
    def any_lost(self) -> bool:
        """Whether any is left just now."""
        return bool(self._lost)

    def lost(self, agent: str, why: str) -> None:
        """A read leaves an agent."""
        if agent in self._lost:
            return
        while len(self._lost) >= LOST_MAX:
            del self._lost[next(iter(self._lost))]
        self._lost[agent] = PeerStatus(f"source {agent}", lost="is left", back="is read from again")
        self._lost[agent].is_silent(why)

    def back(self, agent: str) -> None:
        """Bytes of an agent have come."""
        found = self._lost.pop(agent, None)
        if found is not None:
            found.answers()
