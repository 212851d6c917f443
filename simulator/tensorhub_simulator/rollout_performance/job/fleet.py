"""The machines of a job, from when they are taken until they go.

Spot machines come and go as the scenario says, or as its trace does; those at another site stay; the trainer's own are
there while it seeds. A machine that comes boots, and begins with the version that was the newest when it had booted,
unless a newer one was published meanwhile.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from tensorhub_rollout.core.leader import LeaderLimits
from tensorhub_runner.core.runner_events import PreemptionNoticed
from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.config.spot_trace import SpotChange
from tensorhub_simulator.rollout_performance.job.log import MODEL
from tensorhub_simulator.rollout_performance.measures.timeline import Sample, Timeline
from tensorhub_simulator.rollout_performance.models.arrivals import Arrivals
from tensorhub_simulator.rollout_performance.models.machine import Machine, Pace

DELAY_S: Final = 0.001
"""A message takes so long at one site."""
SILENCE_S: Final = LeaderLimits().silence_s
"""So long after a machine has gone the leader finds it lost."""


class Fleet:
    """All machines; what is told of them goes to the job (`make`, `fetch`, `missed`), which also says how many to take.

    `make`: a machine with this name, engine and pace, of the trainer's own or not. `wished`: how many to take of as
    many as there are. `fetch`: a machine comes to have the newest version so many seconds later. `missed`: a machine
    has been silent for so long that it counts as lost. `look_s`: how often one that leaves is looked at.
    """

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        look_s: float,
        *,
        make: Callable[[str, EngineCosts, Pace, bool], Machine],
        wished: Callable[[int], int],
        fetch: Callable[[Machine, float], None],
        missed: Callable[[str], None],
        timeline: Timeline | None,
    ) -> None:
        """Begin with no machine."""
        self.machines: dict[str, Machine] = {}
        self.booting: dict[str, float] = {}
        """When each spot machine that has no engine yet was taken."""
        self.far = frozenset(f"far-{number}" for number in range(scenario.far.instances if scenario.far else 0))
        """The names of those at another site."""
        self.version = 1
        """The newest: what machines fetch."""
        self.spot_s, self.made, self.lost = 0.0, 0, 0
        """Seconds of all spot machines, tokens of all that have gone, and how many of them went with work."""
        self._scenario, self._agenda, self._look_s, self._timeline = scenario, agenda, look_s, timeline
        self._make, self._wished, self._fetch, self._missed = make, wished, fetch, missed
        self._random, self._arrivals = Random(f"machines {scenario.seed}"), Arrivals(scenario)
        self._pace = Pace(scenario.messages)
        self._number = 0
        self._spare: dict[str, None] = {}
        """The machines of a trace that there are, and that were not taken."""
        self._available = 0
        self._is_over = False

    @property
    def spot(self) -> list[Machine]:
        """Return those that come and go and have an engine."""
        return [each for each in self.machines.values() if not each.is_local and each.name not in self.far]

    @property
    def _staying(self) -> list[Machine]:
        """Return those of them that were not told to go: no machine goes twice."""
        return [each for each in self.spot if not each.core.is_leaving]

    @property
    def local(self) -> list[Machine]:
        """Return the trainer's own."""
        return [each for each in self.machines.values() if each.is_local]

    @property
    def are_all_gone(self) -> bool:
        """Whether no spot machine is there, nor will be, and no other machine is."""
        spot = self._scenario.spot
        times = [*(at for at, _ in spot.changes), *(each.at_s for each in spot.recorded)]
        is_last = self._available <= 0 and self._agenda.now > max(times, default=0.0)
        return is_last and not (self.machines or self.booting)

    def delay_s(self, name: str) -> float:
        """Return how long a message takes from a machine, or to it."""
        far = self._scenario.far
        return DELAY_S if far is None or name not in self.far else DELAY_S + far.rtt_ms / 2e3

    # ------------------------------------------------------------------------------------------ who comes and goes

    def begin(self) -> None:
        """Have spot machines come and go from now on, and start those at another site."""
        for at, count in self._scenario.spot.changes:
            self._agenda.at(at, partial(self._change_available, count))
        for change in self._scenario.spot.recorded:
            self._agenda.at(change.at_s, partial(self._follow_trace, change))
        for name in sorted(self.far):
            self.start(name, is_local=False)

    def _change_available(self, count: int) -> None:
        self._available = count
        spot = self._staying
        going = len(spot) + len(self.booting) - count
        for name in [*self.booting][: max(0, going)]:
            self.spot_s += self._agenda.now - self.booting.pop(name)
            going -= 1
        if going > 0:
            for machine in self._random.sample(sorted(spot, key=lambda each: each.name), going):
                self._preempt(machine)
        self.start_wished()

    def _follow_trace(self, change: SpotChange) -> None:
        for name in change.goes:
            self._spare.pop(name, None)
            if name in self.booting:
                self.spot_s += self._agenda.now - self.booting.pop(name)
            elif name in self.machines:
                self._preempt(self.machines[name])
        self._spare |= dict.fromkeys(change.comes)
        self._available += len(change.comes) - len(change.goes)
        self.start_wished()

    def _preempt(self, machine: Machine) -> None:
        notice_s = self._scenario.spot.notice_s
        if notice_s:
            machine.tell(PreemptionNoticed())
        self._agenda.after(notice_s, partial(self.end, machine))

    def let_one_go(self) -> None:
        """Have the spot machine go that came last, once it has given back what it has."""
        if spot := self._staying:
            spot[-1].tell(PreemptionNoticed())
            self._agenda.after(self._look_s, partial(self._end_drained, spot[-1]))

    def _end_drained(self, machine: Machine) -> None:
        if machine.is_up and not machine.core.is_drained:
            self._agenda.after(self._look_s, partial(self._end_drained, machine))
            return
        self.end(machine)

    # ------------------------------------------------------------------------------------------ from boot to end

    def start_wished(self) -> None:
        """Take as many spot machines as are wished of those that there are."""
        for _ in range(self._wished(self._available) - len(self.spot) - len(self.booting)):
            name = self._next_name()
            self.booting[name] = self._agenda.now
            self._agenda.after(self._scenario.spot.boot_s, partial(self.load_first, name))

    def _next_name(self) -> str:
        """Return the name of a machine that there is and that is not taken."""
        if self._spare:
            name = next(iter(self._spare))
            del self._spare[name]
            return name
        self._number += 1
        return f"spot-{self._number}"

    def load_first(self, name: str) -> None:
        """Have a machine that has booted load the newest version."""
        if name in self.booting:
            self._agenda.after(self._arrivals.one_s(), partial(self._run_first, name, self.version))

    def _run_first(self, name: str, version: int) -> None:
        if name not in self.booting:
            return
        if version != self.version:
            self.load_first(name)
            return
        taken_at = self.booting.pop(name)
        self.start(name, is_local=False)
        self.machines[name].began_at = taken_at

    def start(self, name: str, *, is_local: bool) -> None:
        """Have a machine run with the newest version in memory."""
        machine = self.machines[name] = self._make(name, self._engine_of(name), self._pace, is_local)
        self._pace.follow(len(self.machines))
        machine.start(MODEL, self.version)

    def _engine_of(self, name: str) -> EngineCosts:
        far = self._scenario.far
        return far.engine if far is not None and far.engine is not None and name in self.far else self._scenario.engine

    def end(self, machine: Machine) -> None:
        """Have a machine go without a word."""
        if not machine.is_up:
            return
        machine.end()
        self.made += machine.tokens
        del self.machines[machine.name]
        self._pace.follow(len(self.machines))
        self._agenda.after(SILENCE_S, partial(self._missed, machine.name))
        if not machine.is_local and machine.name not in self.far:
            self.spot_s += self._agenda.now - machine.began_at
            # What generates for a job that is over loses nothing.
            if machine.engine.has_work and not self._is_over:
                self.lost += 1
                if self._timeline is not None:
                    self._timeline.lost_s.append(self._agenda.now)

    def end_all(self) -> None:
        """Let all go, for the job is over."""
        self._is_over = True
        for machine in [*self.machines.values()]:
            self.end(machine)
        for began_at in self.booting.values():
            self.spot_s += self._agenda.now - began_at

    # ------------------------------------------------------------------------------------------ versions

    def publish(self, version: int) -> None:
        """Have all machines fetch a newer version."""
        self.version = version
        here = [each for each in self.machines.values() if each.name not in self.far]
        there = [each for each in self.machines.values() if each.name in self.far]
        here_s, there_s = self._arrivals.each_s(len(here), len(there))
        for machine, load_s in zip([*here, *there], [*here_s, *there_s], strict=True):
            self._fetch(machine, load_s)

    def fetch_alone(self, machine: Machine) -> None:
        """Have one machine fetch the newest version that others have, or fetch already."""
        self._fetch(machine, self._arrivals.one_s(is_far=machine.name in self.far))

    def sample(self, seen: Timeline) -> None:
        """Note the moment in a timeline, and go on so."""
        made = self.made + sum(each.tokens for each in self.machines.values())
        local = len(self.local)
        seen.add(Sample(self._agenda.now, len(self.machines) - local, len(self.booting), local, made))
        self._agenda.after(seen.every_s, partial(self.sample, seen))
