"""What agents say of who reads from them: the load that other planners made, or this one before it was restarted. Pure.

Each beat of an agent brings it, so it is as old as a beat. Always true: an agent has one word, that of its highest
incarnation heard, its latest; a word counts for `said_s_max`, and there are at most `AGENTS_MAX` of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.wire.asks import Beat
from tensorhub_planner.busy import IDLE, TRANSPORTS, Busy, Lane
from tensorhub_planner.limits import Limits

AGENTS_MAX: Final = 65_536
"""Words of so many agents are kept; the oldest goes first."""

READERS_MAX: Final = 65_536
"""An agent has at most so many readers, whatever it says: plans of all who could read from it compute with that number,
and on the wire it has any length."""

NBYTES_MAX: Final = 2**62
"""And these have at most so many bytes left."""


@dataclass(slots=True)
class Said:
    """The last word of each agent."""

    limits: Limits
    _words: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By agent its incarnation, and when it spoke."""
    _busy: dict[Lane, tuple[float, Busy]] = field(default_factory=dict)
    """The same for each that has readers, and what it said: plans look up many that have none."""

    def hear(self, beat: Beat, now: float) -> bool:
        """Take an agent's beat; False: one of an incarnation that is over."""
        before, _ = self._words.get(beat.agent, (0, 0.0))
        if beat.incarnation < before:
            return False
        self._drop(beat.agent)
        self._words[beat.agent] = (beat.incarnation, now)
        for each in beat.serving:
            if each.readers > 0:
                readers = min(each.readers, READERS_MAX)
                self._busy[beat.agent, each.transport] = (now, Busy(readers, min(max(each.nbytes, 0), NBYTES_MAX)))
        if len(self._words) > AGENTS_MAX:
            self._drop(next(iter(self._words)))
        return True

    def at(self, lane: Lane, now: float) -> Busy:
        """Return who reads from a source, as it said; nobody, if it has said nothing that still counts."""
        said = self._busy.get(lane)
        return IDLE if said is None or now - said[0] >= self.limits.said_s_max else said[1]

    def lanes(self) -> Iterable[Lane]:
        """Return the sources that had readers by their last word."""
        return self._busy.keys()

    def knows(self, agent: str) -> bool:
        """Tell whether an agent has spoken."""
        return agent in self._words

    def unheard(self, agents: Iterable[str], now: float) -> list[str]:
        """Return which of these agents have said nothing that still counts."""
        never = -self.limits.said_s_max
        return [each for each in agents if now - self._words.get(each, (0, now + never))[1] >= self.limits.said_s_max]

    def forget(self, agent: str, incarnation: int) -> None:
        """The agent's incarnation is lost, and its leases with it."""
        if agent in self._words and self._words[agent][0] <= incarnation:
            self._drop(agent)

    def _drop(self, agent: str) -> None:
        self._words.pop(agent, None)
        for transport in TRANSPORTS:
            self._busy.pop((agent, transport), None)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for (agent, transport), (at, busy) in self._busy.items():
            assert at == self._words[agent][1], f"{agent} said of {transport} what is not of its last word"
            assert busy.readers > 0, f"{agent} is idle by {transport}"
