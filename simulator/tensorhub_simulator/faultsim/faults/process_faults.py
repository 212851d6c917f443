"""Trouble: what is killed, stopped and lost, whose clock jumps, who leaves, and when it comes back.

What is cut off stands in `cuts.py`. Every trouble ends by itself; what is left after the last one is to be put right by
the production code.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.faults.partitions import Partitions
from tensorhub_simulator.faultsim.faults.rolling_upgrade import NEW

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
    from tensorhub_simulator.faultsim.nodes.registry import RegistryNode
    from tensorhub_simulator.faultsim.nodes.worker import WorkerNode
    from tensorhub_simulator.faultsim.transfers.source_session import ReadSession
    from tensorhub_simulator.faultsim.world import World

STOP_S: Final = (0.1, 0.6, 2.0, 4.0)

STOP_SOURCE_S: Final = (0.6, 2.0, 10.0, 30.0)
"""The longest is for ever, as far as a read can know."""

AWAIT_S: Final = 4.0
LOOK_S: Final = 0.02
DRAG: Final = (30.0, 300.0)
DRAG_S: Final = (1.0, 4.0)
JUMP_S: Final = (0.3, 3.0, 30.0)
WALL_CLOCK_S: Final = (-60.0, -1.0, 1.0, 3600.0)
RATES: Final = (0.99, 1.0, 1.0, 1.01)
AHEAD_S: Final = (0.0, 5.0, 100_000.0)
LATE_START_S: Final = 5.0
LEAVE_AGENTS: Final = 2
"""So many agents stay, whoever leaves."""


class Faults:
    """Makes trouble for a while."""

    def __init__(self, world: "World") -> None:
        """Plan the seed's troubles."""
        self.world, self.clock = world, world.clock
        self.kills = self.stops = self.outages = self.jumps = self.losses = 0
        self.cuts = Partitions(world)
        self._kinds: dict[Callable[[], None], int] = {
            self._agent: 2,
            self._agent_mid: 2,
            self._stop_agent: 2,
            self._lose_disk: 1,
            self._leave: 1,
            self._registry: 2,
            self._resign: 1,
            self._stop_registry: 1,
            self._planner: 1,
            self._stop_planner: 1,
            self._worker: 3,
            self._stop_worker: 1,
            self._outage: 1,
            self._stop_nats: 1,
            self._jump: 2,
            self._wall_clock: 1,
            self.cuts.bytes_alone: 1,
            self.cuts.messages_alone: 2,
            self.cuts.both: 1,
            lambda: self._await_source(self._kill_source): 2,
            lambda: self._await_source(self._stop_source): 3,
            lambda: self._await_source(self._slow_source): 2,
            lambda: self._await_source(self._cut_source): 2,
        }
        """What can happen, and how likely it is. A source is an agent that is being read just then."""
        rng, setting = self.clock.rng, world.plan
        for agent in world.agents.values():
            agent.drag = rng.choice(DRAG) if rng.random() < setting.slow_agents else 1.0
        for node in world.processes() if setting.skewed else ():
            node.state.rate, node.state.offset_s = rng.choice(RATES), rng.choice(AHEAD_S) * rng.random()
        for _ in range(setting.troubles):
            self.clock.after(0.5 + rng.random() * setting.trouble_s, None, self._trouble)

    def starts_in(self, number: int) -> float:
        """Return when an agent starts for the first time: some come late."""
        setting, rng = self.world.plan, self.clock.rng
        return rng.random() * LATE_START_S if setting.late_agents and number >= LEAVE_AGENTS else 0.0

    def _trouble(self) -> None:
        self.clock.rng.choices(list(self._kinds), list(self._kinds.values()))[0]()

    # Agents.

    def _any_agent(self) -> "AgentNode":
        return self.clock.rng.choice(list(self.world.agents.values()))

    def _agent(self) -> None:
        self._kill_agent(self._any_agent())

    def _agent_mid(self) -> None:
        agent = self._any_agent()
        if agent.up:
            agent.dies_in = self.clock.rng.randint(0, 12)

    def _stop_agent(self) -> None:
        self._stop(self._any_agent(), self.clock.rng.choice(STOP_S))

    def _lose_disk(self) -> None:
        """A host is set up anew: neither memory nor the agent's last number is left."""
        agent = self._any_agent()
        if agent.up:
            self.losses += 1
            agent.kill()
            agent.lose_disk()

    def _leave(self) -> None:
        """An agent goes away; it may come back, much later, and its shards have moved."""
        agent, rng = self._any_agent(), self.clock.rng
        here = [each for each in self.world.agents.values() if not each.state.left]
        if agent.up and len(here) > LEAVE_AGENTS:
            self.world.note(f"{agent.name} leaves")
            agent.state.left = True
            agent.kill()
            if rng.random() < 0.5:  # noqa: PLR2004 (odds)
                self.clock.after(3.0 + 4.0 * rng.random(), None, lambda: self._return(agent))

    def _return(self, agent: "AgentNode") -> None:
        agent.state.left = False
        self._start(agent)

    def _kill_agent(self, agent: "AgentNode") -> None:
        if agent.up:
            agent.kill()

    def agent_died(self, agent: "AgentNode") -> None:
        """Bring an agent back, by and by, whoever killed it."""
        self.kills += 1
        if not agent.state.left:
            self.clock.after(self.clock.rng.choice((0.05, 0.5, 3.0)), None, lambda: self._start(agent))

    # Sources of reads.

    def _await_source(self, strike: "Callable[[ReadSession], None]", until: float | None = None) -> None:
        """Strike a source in mid-read: as soon as there is one."""
        until = self.clock.now + AWAIT_S if until is None else until
        links = [link for link in self.world.links.values() if link.reads]
        if links:
            strike(self.clock.rng.choice(links))
        elif self.clock.now < until:
            self.clock.after(self.clock.rng.random() * LOOK_S, None, lambda: self._await_source(strike, until))

    def _kill_source(self, link: "ReadSession") -> None:
        self._kill_agent(link.source)

    def _stop_source(self, link: "ReadSession") -> None:
        self._stop(link.source, self.clock.rng.choice(STOP_SOURCE_S))

    def _slow_source(self, link: "ReadSession") -> None:
        agent, drag = link.source, self.clock.rng.choice(DRAG)
        drag_s = self.clock.rng.choice(DRAG_S)
        self.world.note(f"{agent.name} sends {drag:g} times slower for {drag_s} s")
        before, agent.drag = agent.drag, drag

        def over() -> None:
            if agent.drag == drag:
                agent.drag = min(before, 1.0)

        self.clock.after(drag_s, None, over)

    def _cut_source(self, link: "ReadSession") -> None:
        self.cuts.between(link.reader, link.source)

    # Registries, the planner, workers.

    def _any_registry(self) -> "RegistryNode":
        return self.clock.rng.choice(self.world.registries)

    def _registry(self) -> None:
        self._kill(self._any_registry())

    def _resign(self) -> None:
        """A registry ends in order, as in an upgrade."""
        registry = self._any_registry()
        if registry.runs:
            self.world.note(f"{registry.name} resigns")
            for each in registry.family:
                each.resign()
            life = registry.life
            self.clock.after(
                self.clock.rng.random() * 1.5, None, lambda: self._kill(registry) if registry.life == life else None
            )

    def upgrade(self, node: "RegistryNode | PlannerNode") -> None:
        """Begin a process anew with the new build."""
        self._kill(node)
        for each in node.family:
            each.build = NEW

    def _stop_registry(self) -> None:
        self._stop(self._any_registry(), self.clock.rng.choice(STOP_S))

    def _planner(self) -> None:
        self._kill(self.world.planner)

    def _stop_planner(self) -> None:
        self._stop(self.world.planner, self.clock.rng.choice(STOP_S))

    def _worker(self) -> None:
        rank = self.clock.rng.choice(self.world.ranks)
        if rank.up:
            self.kills += 1
            rank.kill()
            self.clock.after(self.clock.rng.choice((0.01, 0.3, 2.0)), None, lambda: self._start(rank))

    def _stop_worker(self) -> None:
        self._stop(self.clock.rng.choice(self.world.ranks), self.clock.rng.choice(STOP_S))

    def _kill(self, node: "RegistryNode | PlannerNode") -> None:
        if node.up:
            self.kills += 1
            for each in node.family:
                each.kill()
            self.clock.after(self.clock.rng.choice((0.05, 0.5, 2.5)), None, lambda: self._start(node))

    def _start(self, node: "AgentNode | RegistryNode | PlannerNode | WorkerNode") -> None:
        if not node.up:
            self.world.note(f"{node.name} starts")
            node.start()
            for each in node.family[1:]:
                # An agent begins in all of its jobs by itself.
                if not each.up:
                    each.start()

    def stop(self, node: Node, stop_s: float) -> None:
        """SIGSTOP a process, and SIGCONT it after this."""
        self._stop(node, stop_s)

    def _stop(self, node: Node, stop_s: float) -> None:
        if not node.runs:
            return
        self.stops += 1
        node.state.stops += 1
        number = node.state.stops
        self.world.note(f"{node.name} is stopped for {stop_s} s")
        node.state.paused = True

        def resume() -> None:
            if node.state.stops == number and node.state.paused:
                self.world.note(f"{node.name} goes on")
                node.state.slept_s += stop_s
                self.clock.resume(node)
                for job in self.world.jobs:
                    job.log.wake()

        self.clock.after(stop_s, None, resume)

    # NATS and clocks.

    def _outage(self) -> None:
        if not self.world.log.up:
            return
        self.outages += 1
        self.world.note("the log can't be reached")
        for job in self.world.jobs:
            job.log.up = False

        def back() -> None:
            self.world.note("the log is back")
            for job in self.world.jobs:
                job.log.back()

        self.clock.after(self.clock.rng.choice((0.2, 1.0, 4.0)), None, back)

    def _stop_nats(self) -> None:
        """What was on its way comes late, and is stored then."""
        self._stop(self.world.nats, self.clock.rng.choice(STOP_S))

    def _jump(self) -> None:
        """One process's clock jumps, and it believes that much has happened meanwhile."""
        node, by_s = self.clock.rng.choice(self.world.processes()), self.clock.rng.choice(JUMP_S)
        if node.runs:
            self.jumps += 1
            self.world.note(f"the clock of {node.name} jumps {by_s} s")
            node.jump(by_s)

    def _wall_clock(self) -> None:
        """NATS's wall clock is set: entries have later, or earlier, times from now on."""
        self.jumps += 1
        self.world.log.skew_s += self.clock.rng.choice(WALL_CLOCK_S)
