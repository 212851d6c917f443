"""What agents say of who reads from them: the load that other planners made, or this one before it was restarted. Pure.

Each beat of an agent brings it, so it is as old as a beat. Always true: an agent has one word, that of its highest
incarnation heard, its latest; a word counts for `said_s_max`, and there are at most `AGENTS_MAX` of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.wire.asks import Beat
from tensorhub_common.wire.transfer import Transport
from tensorhub_planner.limits import Limits

AGENTS_MAX: Final = 65_536
"""Words of so many agents are kept; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class _Word:
    incarnation: int
    at: float
    serving: dict[Transport, tuple[int, int]]


@dataclass(slots=True)
class Said:
    """The last word of each agent."""

    limits: Limits
    _words: dict[str, _Word] = field(default_factory=dict)

    def hear(self, beat: Beat, now: float) -> bool:
        """Take an agent's beat; False: one of an incarnation that is over."""
        before = self._words.get(beat.agent)
        if before is not None and beat.incarnation < before.incarnation:
            return False
        self._words.pop(beat.agent, None)
        serving = {each.transport: (max(each.readers, 0), max(each.nbytes, 0)) for each in beat.serving}
        self._words[beat.agent] = _Word(beat.incarnation, now, serving)
        if len(self._words) > AGENTS_MAX:
            del self._words[next(iter(self._words))]
        return True

    def at(self, agent: str, transport: Transport, now: float) -> tuple[int, int] | None:
        """Return how many readers an agent has, and their bytes; None: it has said nothing that still counts."""
        word = self._words.get(agent)
        if word is None or now - word.at >= self.limits.said_s_max:
            return None
        return word.serving.get(transport, (0, 0))

    def lanes(self) -> Iterator[tuple[str, Transport]]:
        """Yield the agents and transports that had readers by the last word."""
        return ((agent, transport) for agent, word in self._words.items() for transport in word.serving)

    def knows(self, agent: str) -> bool:
        """Tell whether an agent has spoken."""
        return agent in self._words

    def unheard(self, agents: Iterable[str], now: float) -> list[str]:
        """Return which of these agents have said nothing that still counts."""
        return [agent for agent in agents if self.at(agent, "local", now) is None]

    def forget(self, agent: str, incarnation: int) -> None:
        """The agent's incarnation is lost, and its leases with it."""
        word = self._words.get(agent)
        if word is not None and word.incarnation <= incarnation:
            del self._words[agent]
