"""Agents' reports of their readers: the load that other planners made, or this one before it was restarted. Pure.

Each beat of an agent brings a report, so it is as old as a beat.

Invariants:
- An agent has one report, the latest one of its highest known incarnation.
- A report counts for `said_s_max`, and there are reports of at most `AGENTS_MAX` agents.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorhub_common.protocol.heartbeat import SERVED_MAX, Heartbeat, ReaderLoad, ServingLoad
from tensorhub_planner.load.load import TRANSPORTS, AgentTransport, Load, ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

AGENTS_MAX: Final = 65_536
"""Limit of agents with a report; the oldest is dropped first."""

READERS_MAX: Final = 65_536
"""Limit of an agent's readers, whatever it reports: plans of all its readers compute with that number, which has any
length on the wire."""

NBYTES_MAX: Final = 2**62
"""Limit of the bytes that these have left."""


class ReportedReader(NamedTuple):
    """A reader that an agent named, where its round was decided, and its bytes."""

    reader: ReaderId
    decided: int
    nbytes: int


class LoadReport(NamedTuple):
    """A report on one transport of an agent: when it came, all readers, and some of them by name."""

    at: float
    all: Load
    named: tuple[ReportedReader, ...]


@dataclass(slots=True)
class LoadReports:
    """The last report of each agent."""

    limits: PlanLimits
    _reported: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By agent its incarnation, and the time of the report."""
    _loads: dict[AgentTransport, LoadReport] = field(default_factory=dict)
    """Of agents that have readers: plans look up many that have none."""

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take an agent's beat, unless it is one of an incarnation that is over."""
        before, _ = self._reported.get(beat.agent, (0, 0.0))
        if beat.incarnation < before:
            return
        self._drop(beat.agent)
        self._reported[beat.agent] = (beat.incarnation, now)
        for each in beat.serving:
            if each.readers > 0:
                self._loads[beat.agent, each.transport] = _load_report(each, now)
        if len(self._reported) > AGENTS_MAX:
            self._drop(next(iter(self._reported)))

    def at(self, lane: AgentTransport, now: float) -> LoadReport | None:
        """Return the report of a source; None, if it has none that still counts."""
        report = self._loads.get(lane)
        return None if report is None or now - report.at >= self.limits.said_s_max else report

    def lanes(self) -> Collection[AgentTransport]:
        """Return the sources that had readers by their last report, as a view that follows later reports."""
        return self._loads.keys()

    def unheard(self, agents: Iterable[str], now: float) -> list[str]:
        """Return which of these agents have no report that still counts."""
        never = -self.limits.said_s_max
        return [
            each for each in agents if now - self._reported.get(each, (0, now + never))[1] >= self.limits.said_s_max
        ]

    def forget(self, agent: str, incarnation: int) -> None:
        """Drop the report of a lost incarnation, whose leases ended with it."""
        if agent in self._reported and self._reported[agent][0] <= incarnation:
            self._drop(agent)

    def _drop(self, agent: str) -> None:
        self._reported.pop(agent, None)
        for transport in TRANSPORTS:
            self._loads.pop((agent, transport), None)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for (agent, transport), report in self._loads.items():
            assert report.at == self._reported[agent][1], f"{agent} said of {transport} what is not of its last report"
            assert report.all.readers > 0, f"{agent} is idle by {transport}"


def _load_report(serving: ServingLoad, now: float) -> LoadReport:
    everything = Load(min(serving.readers, READERS_MAX), _possible(serving.nbytes))
    return LoadReport(now, everything, tuple(_named(each) for each in serving.served[:SERVED_MAX]))


def _named(each: ReaderLoad) -> ReportedReader:
    return ReportedReader(
        ReaderId(each.job, each.model, each.replica, each.shard), each.decided, _possible(each.nbytes)
    )


def _possible(nbytes: int) -> int:
    return min(max(nbytes, 0), NBYTES_MAX)
