"""What every fault is made of: when it strikes, and how processes are killed, stopped and started again.

A fault has a random stream of its own. Its stream decides whether the fault is in a seed, when it strikes, and whom. So
a new fault changes nothing in the seeds in which it does not strike.

Every fault ends by itself. The production code must repair what is left after the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.models.build import NEW
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.job_processes import FoldingNode, JobProcesses
from tensorhub_simulator.faultsim.nodes.worker import WorkerNode
from tensorhub_simulator.faultsim.observations import AgentDied, FaultStruck

DRAG: Final = (30.0, 300.0)
RATES: Final = (0.99, 1.0, 1.0, 1.01)
AHEAD_S: Final = (0.0, 5.0, 100_000.0)
LATE_START_S: Final = 5.0
LEAVE_AGENTS: Final = 2
"""This many agents never leave, and start at once."""
FIRST_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. A seed with `n` troubles gives it `n` chances to strike, each with these odds."""

    name: str
    odds: float
    strike: Callable[["Injector", Random], None]


class Injector:
    """Lets faults strike the processes of one world, which are those of its first job."""

    def __init__(self, processes: JobProcesses, jobs: Sequence[Job], faults: Sequence[Fault]) -> None:
        """Plan the seed's faults."""
        self.processes, self.jobs = processes, jobs
        self.job, self.clock = processes.job, processes.job.clock
        self.job.subscribe(AgentDied, lambda died: self._agent_died(processes.agents[died.agent]))
        self._restarts = {node.name: self._stream("restart", node) for node in self._all()}
        setting = self.job.config
        for agent in processes.agents.values():
            rng = self._stream("slow-agent", agent)
            agent.drag = rng.choice(DRAG) if rng.random() < setting.slow_agents else 1.0
        for node in processes.all() if setting.skewed else ():
            rng = self._stream("skewed-clock", node)
            node.state.rate, node.state.offset_s = rng.choice(RATES), rng.choice(AHEAD_S) * rng.random()
        for fault in faults:
            rng = self.job.streams.of("fault", fault.name)
            for _ in range(setting.troubles):
                if rng.random() < fault.odds:
                    at_s = FIRST_S + rng.random() * setting.trouble_s
                    self.clock.after(at_s, None, partial(fault.strike, self, rng))

    def _stream(self, name: str, node: Node) -> Random:
        return self.job.streams.of("fault", name, node.name)

    def _all(self) -> list[Node]:
        return [*self.processes.all(), *self.processes.workers]

    def starts_in(self, agent: AgentNode, number: int) -> float:
        """Return when an agent starts for the first time: some start late."""
        late = self.job.config.late_agents and number >= LEAVE_AGENTS
        return self._stream("late-start", agent).random() * LATE_START_S if late else 0.0

    def struck(self, kind: str) -> None:
        """Count a fault."""
        self.job.observe(FaultStruck(kind))

    # Killed, and started again.

    def kill(self, node: FoldingNode) -> None:
        """SIGKILL a registry or the planner, and start it again later."""
        if node.up:
            self.struck("kills")
            for each in node.family:
                each.kill()
            self.clock.after(self._restarts[node.name].choice((0.05, 0.5, 2.5)), None, lambda: self.start(node))

    def kill_worker(self, rank: WorkerNode) -> None:
        """SIGKILL a worker, and start it again later."""
        if rank.up:
            self.struck("kills")
            rank.kill()
            self.clock.after(self._restarts[rank.name].choice((0.01, 0.3, 2.0)), None, lambda: self.start(rank))

    def _agent_died(self, agent: AgentNode) -> None:
        """Start an agent again later, whatever killed it."""
        self.struck("kills")
        if not agent.state.left:
            self.clock.after(self._restarts[agent.name].choice((0.05, 0.5, 3.0)), None, lambda: self.start(agent))

    def start(self, node: AgentNode | FoldingNode | WorkerNode) -> None:
        """Start a process that is down."""
        if not node.up:
            self.job.log_line(f"{node.name} starts")
            node.start()
            for each in node.family[1:]:
                # An agent begins in all of its jobs by itself.
                if not each.up:
                    each.start()

    def upgrade(self, node: FoldingNode) -> None:
        """Start a process again with the new build."""
        self.kill(node)
        for each in node.family:
            each.build = NEW

    # Stopped, and woken.

    def stop(self, node: Node, stop_s: float) -> None:
        """SIGSTOP a process, and SIGCONT it after this."""
        if not node.runs:
            return
        self.struck("stops")
        node.state.stops += 1
        number = node.state.stops
        self.job.log_line(f"{node.name} is stopped for {stop_s} s")
        node.state.paused = True

        def resume() -> None:
            if node.state.stops == number and node.state.paused:
                self.job.log_line(f"{node.name} goes on")
                node.state.slept_s += stop_s
                self.clock.resume(node)
                for job in self.jobs:
                    job.log.wake()

        self.clock.after(stop_s, None, resume)
