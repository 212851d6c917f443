"""Trouble: what is killed, stopped and cut off, and when it comes back."""

from typing import TYPE_CHECKING

from tensorhub_simulator.clock import Node

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode
    from tensorhub_simulator.planner import PlannerNode
    from tensorhub_simulator.registry import RegistryNode
    from tensorhub_simulator.workers import Rank
    from tensorhub_simulator.world import World

STOP_S: tuple[float, ...] = (0.1, 0.6, 2.0, 4.0)


class Faults:
    """Makes trouble for a while."""

    def __init__(self, world: "World") -> None:
        """Plan the seed's troubles."""
        self.world, self.clock = world, world.clock
        self.kills = self.stops = self.outages = 0
        rng, setting = self.clock.rng, world.plan
        for _ in range(setting.troubles):
            self.clock.after(0.5 + rng.random() * setting.trouble_s, None, self._trouble)

    def _trouble(self) -> None:
        world, rng = self.world, self.clock.rng
        kind = rng.choices(
            ("agent", "agent-mid", "stop-agent", "registry", "stop-registry", "planner", "worker", "outage"),
            (3, 2, 3, 2, 1, 1, 3, 1),
        )[0]
        agent = rng.choice(list(world.agents.values()))
        match kind:
            case "agent":
                self._kill_agent(agent)
            case "agent-mid":
                if agent.up:
                    agent.dies_in = rng.randint(0, 12)
            case "stop-agent":
                self._stop(agent)
            case "registry":
                self._kill(rng.choice(world.registries))
            case "stop-registry":
                self._stop(rng.choice(world.registries))
            case "planner":
                self._kill(world.planner)
            case "worker":
                self._kill_worker(rng.choice(world.ranks))
            case "outage":
                self._outage()

    def _kill_agent(self, agent: "AgentNode") -> None:
        if agent.up:
            agent.kill()

    def agent_died(self, agent: "AgentNode") -> None:
        """Bring an agent back, by and by, whoever killed it."""
        self.kills += 1
        self.clock.after(self.clock.rng.choice((0.05, 0.5, 3.0)), None, lambda: self._start(agent))

    def _kill(self, node: "RegistryNode | PlannerNode") -> None:
        if node.up:
            self.kills += 1
            node.kill()
            self.clock.after(self.clock.rng.choice((0.05, 0.5, 2.5)), None, lambda: self._start(node))

    def _kill_worker(self, rank: "Rank") -> None:
        if rank.up:
            self.kills += 1
            rank.kill()
            self.clock.after(self.clock.rng.choice((0.01, 0.3, 2.0)), None, lambda: self._start(rank))

    def _start(self, node: "AgentNode | RegistryNode | PlannerNode | Rank") -> None:
        if not node.up:
            self.world.note(f"{node.name} starts")
            node.start()

    def _stop(self, node: Node) -> None:
        if not node.runs:
            return
        self.stops += 1
        stop_s, life = self.clock.rng.choice(STOP_S), node.life
        self.world.note(f"{node.name} is stopped for {stop_s} s")
        node.paused = True

        def resume() -> None:
            if node.life == life and node.paused:
                self.world.note(f"{node.name} goes on")
                node.slept_s += stop_s
                self.clock.resume(node)

        self.clock.after(stop_s, None, resume)

    def _outage(self) -> None:
        if not self.world.log.up:
            return
        self.outages += 1
        self.world.note("the log can't be reached")
        self.world.log.up = False

        def back() -> None:
            self.world.note("the log is back")
            self.world.log.back()

        self.clock.after(self.clock.rng.choice((0.2, 1.0, 4.0)), None, back)
