"""What agents say of who reads from them: the load that other planners made, or this one before it was restarted. Pure.

Each beat of an agent brings it, so it is as old as a beat. Always true: an agent has one word, that of its highest
incarnation heard, its latest; a word counts for `said_s_max`, and there are at most `AGENTS_MAX` of them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorhub_common.protocol.heartbeat import SERVED_MAX, Heartbeat, ReaderLoad, ServingLoad
from tensorhub_planner.load.load import TRANSPORTS, AgentTransport, Load, ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

AGENTS_MAX: Final = 65_536
"""Words of so many agents are kept; the oldest goes first."""

READERS_MAX: Final = 65_536
"""An agent has at most so many readers, whatever it says: plans of all who could read from it compute with that number,
and on the wire it has any length."""

NBYTES_MAX: Final = 2**62
"""And these have at most so many bytes left."""


class ReportedReader(NamedTuple):
    """A reader whom an agent named, where its round was decided, and its bytes."""

    reader: ReaderId
    decided: int
    nbytes: int


class LoadReport(NamedTuple):
    """What an agent said of one way to read from it, and when: all its readers, and some of them by name."""

    at: float
    all: Load
    named: tuple[ReportedReader, ...]


@dataclass(slots=True)
class LoadReports:
    """The last word of each agent."""

    limits: PlanLimits
    _heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By agent its incarnation, and when it spoke."""
    _words: dict[AgentTransport, LoadReport] = field(default_factory=dict)
    """Of those that have readers: plans look up many that have none."""

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take an agent's beat, unless it is one of an incarnation that is over."""
        before, _ = self._heard.get(beat.agent, (0, 0.0))
        if beat.incarnation < before:
            return
        self._drop(beat.agent)
        self._heard[beat.agent] = (beat.incarnation, now)
        for each in beat.serving:
            if each.readers > 0:
                self._words[beat.agent, each.transport] = _word(each, now)
        if len(self._heard) > AGENTS_MAX:
            self._drop(next(iter(self._heard)))

    def at(self, lane: AgentTransport, now: float) -> LoadReport | None:
        """Return who reads from a source, as it said; None, if it has named nobody that still counts."""
        word = self._words.get(lane)
        return None if word is None or now - word.at >= self.limits.said_s_max else word

    def lanes(self) -> Collection[AgentTransport]:
        """Return the sources that had readers by their last word; what is returned follows what is heard."""
        return self._words.keys()

    def knows(self, agent: str) -> bool:
        """Tell whether an agent has spoken."""
        return agent in self._heard

    def unheard(self, agents: Iterable[str], now: float) -> list[str]:
        """Return which of these agents have said nothing that still counts."""
        never = -self.limits.said_s_max
        return [each for each in agents if now - self._heard.get(each, (0, now + never))[1] >= self.limits.said_s_max]

    def forget(self, agent: str, incarnation: int) -> None:
        """The agent's incarnation is lost, and its leases with it."""
        if agent in self._heard and self._heard[agent][0] <= incarnation:
            self._drop(agent)

    def _drop(self, agent: str) -> None:
        self._heard.pop(agent, None)
        for transport in TRANSPORTS:
            self._words.pop((agent, transport), None)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for (agent, transport), word in self._words.items():
            assert word.at == self._heard[agent][1], f"{agent} said of {transport} what is not of its last word"
            assert word.all.readers > 0, f"{agent} is idle by {transport}"


def _word(serving: ServingLoad, now: float) -> LoadReport:
    everybody = Load(min(serving.readers, READERS_MAX), _possible(serving.nbytes))
    return LoadReport(now, everybody, tuple(_named(each) for each in serving.served[:SERVED_MAX]))


def _named(each: ReaderLoad) -> ReportedReader:
    return ReportedReader(
        ReaderId(each.job, each.model, each.replica, each.shard), each.decided, _possible(each.nbytes)
    )


def _possible(nbytes: int) -> int:
    return min(max(nbytes, 0), NBYTES_MAX)
