"""Detection of lost agents: agents silent for a whole window in which this registry could receive their beats. Pure.

Agents beat once for all jobs. Each job's catalog says which incarnation of an agent is live in that job, and only that
incarnation is watched. A beat keeps alive only the incarnation that it names. A new process under an old name
therefore does not hide the loss of the old memory.

A leader's own silence does not count as an agent's. The window begins anew in three cases: the registry begins to
lead, its connection comes back, or it finds that it was stopped itself. The sign of a stop is a gap above
`pause_max_s` between two calls of `handle`. `handle` must therefore be called at `deadline()`, which is never farther
away than a part of that bound.

`LostAgentLog` reduces lost agents to one line each in the registry's own log, in however many jobs an agent is lost.

Invariants:
- An agent is expired only after `lost_after_s` without its beat and without any pause of this registry.
- A lost agent is reported once until it beats again, and its return is then reported.
- At most `LOST_MAX` lost agents are remembered.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.heartbeat import Heartbeat

PAUSE_S_MAX: Final = 1.0
"""A longer gap between two calls counts as a pause of this process; shorter ones are usual on a busy host."""

PAUSES_PER_WINDOW: Final = 3
"""With short windows, a pause is this part of the window instead."""

TICKS_PER_PAUSE: Final = 4


class MonitoringStarted(msgspec.Struct, frozen=True):
    """From now on this registry leads, in this term, and receives every beat: an agent silent for a window is lost."""

    term: int


class MonitoringStopped(msgspec.Struct, frozen=True):
    """From now on this registry does not lead, or may miss beats: it expires no agent."""


class WatchAgent(msgspec.Struct, frozen=True):
    """In this job, this incarnation of the agent is live; an older one no longer is."""

    job: str
    agent: str
    incarnation: int


class UnwatchAgent(msgspec.Struct, frozen=True):
    """In this job the agent is lost."""

    job: str
    agent: str


class UnwatchJob(msgspec.Struct, frozen=True):
    """The job is not folded any more."""

    job: str


class ExpireAgent(msgspec.Struct, frozen=True):
    """Append to this job's log that this incarnation of the agent is lost."""

    job: str
    agent: str
    incarnation: int
    term: int


Input = Heartbeat | MonitoringStarted | MonitoringStopped | WatchAgent | UnwatchAgent | UnwatchJob | Tick
Incarnation = tuple[str, int]


@dataclass(slots=True)
class Liveness:
    """The agents of all jobs and when each beat last."""

    lost_after_s: float
    term: int | None = None
    """The term in which this registry receives every beat, or None while it does not."""
    _since: float = 0.0
    """Since when it has received every beat, without a pause."""
    _last_call: float | None = None
    _last_beat: OrderedDict[Incarnation, float] = field(default_factory=OrderedDict)
    """The last beat of each watched incarnation; the one that was silent longest comes first."""
    _watchers: dict[Incarnation, dict[str, None]] = field(default_factory=dict)
    """The jobs in which it is live."""
    _live: dict[str, dict[str, int]] = field(default_factory=dict)
    """The live incarnation of each agent, by job."""

    @property
    def pause_max_s(self) -> float:
        """A longer gap between two calls begins the window anew."""
        return min(PAUSE_S_MAX, self.lost_after_s / PAUSES_PER_WINDOW)

    def handle(self, event: Input, now: float) -> list[ExpireAgent]:
        """Take one event and return the agents that are lost by now."""
        if self._last_call is not None and now - self._last_call > self.pause_max_s:
            self._since = now
        self._last_call = now
        match event:
            case Heartbeat(agent=agent, incarnation=incarnation):
                self._note_beat((agent, incarnation), now)
            case Tick():
                return self._expire(now)
            case MonitoringStarted(term):
                self.term, self._since = term, now
            case MonitoringStopped():
                self.term = None
            case WatchAgent(job, agent, incarnation):
                self._watch(job, agent, incarnation, now)
            case UnwatchAgent(job, agent):
                self._unwatch(job, agent)
            case UnwatchJob(job):
                for agent in list(self._live.get(job, {})):
                    self._unwatch(job, agent)
        return []

    def deadline(self) -> float | None:
        """Return when to call `handle(Tick())` next, also where nothing runs out, so that a pause here shows."""
        if self.term is None or self._last_call is None:
            return None
        tick = self._last_call + self.pause_max_s / TICKS_PER_PAUSE
        oldest = next(iter(self._last_beat.values()), None)
        return tick if oldest is None else min(tick, max(oldest, self._since) + self.lost_after_s)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert set(self._last_beat) == set(self._watchers)
        times = list(self._last_beat.values())
        assert times == sorted(times)
        watched = {(who, job) for who, jobs in self._watchers.items() for job in jobs}
        live = {((agent, inc), job) for job, agents in self._live.items() for agent, inc in agents.items()}
        assert watched == live

    def _note_beat(self, who: Incarnation, now: float) -> None:
        if who in self._last_beat:
            self._last_beat[who] = now
            self._last_beat.move_to_end(who)

    def _expire(self, now: float) -> list[ExpireAgent]:
        if self.term is None:
            return []
        lost: list[ExpireAgent] = []
        for who, heard in list(self._last_beat.items()) if self._is_due(now) else []:
            if max(heard, self._since) + self.lost_after_s > now:
                break
            agent, incarnation = who
            lost += [ExpireAgent(job, agent, incarnation, self.term) for job in self._watchers[who]]
            # Should the log not take the command, it is repeated after another window.
            self._note_beat(who, now)
        return lost

    def _is_due(self, now: float) -> bool:
        oldest = next(iter(self._last_beat.values()), None)
        return oldest is not None and max(oldest, self._since) + self.lost_after_s <= now

    def _watch(self, job: str, agent: str, incarnation: int, now: float) -> None:
        self._unwatch(job, agent)
        who = (agent, incarnation)
        self._live.setdefault(job, {})[agent] = incarnation
        self._watchers.setdefault(who, {})[job] = None
        if who not in self._last_beat:
            self._last_beat[who] = now

    def _unwatch(self, job: str, agent: str) -> None:
        agents = self._live.get(job, {})
        incarnation = agents.pop(agent, None)
        if incarnation is None:
            return
        if not agents:
            del self._live[job]
        who = (agent, incarnation)
        del self._watchers[who][job]
        if not self._watchers[who]:
            del self._watchers[who], self._last_beat[who]


LOST_MAX: Final = 4096


class LostAgentLog:
    """The agents that this registry, while it leads, has found lost."""

    def __init__(self) -> None:
        """Begin with none."""
        self._since: dict[str, float] = {}

    def lost(self, expiries: Iterable[ExpireAgent], now: float) -> list[tuple[str, int]]:
        """Return the agents that were not lost before, and in how many jobs each is lost."""
        jobs: dict[str, int] = {}
        for each in expiries:
            jobs[each.agent] = jobs.get(each.agent, 0) + 1
        new = [(agent, count) for agent, count in jobs.items() if agent not in self._since]
        for agent, _ in new:
            while len(self._since) >= LOST_MAX:
                del self._since[next(iter(self._since))]
            self._since[agent] = now
        return new

    def beats(self, agent: str, now: float) -> float | None:
        """Return for how long an agent was lost that beats again; None for one that was not."""
        since = self._since.pop(agent, None)
        return None if since is None else now - since
