"""Trouble: what is killed, stopped and cut off, and when it comes back."""

from typing import TYPE_CHECKING, Final

from tensorhub_simulator.clock import Node

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode
    from tensorhub_simulator.link import Link
    from tensorhub_simulator.planner import PlannerNode
    from tensorhub_simulator.registry import RegistryNode
    from tensorhub_simulator.workers import Rank
    from tensorhub_simulator.world import World

STOP_S: Final = (0.1, 0.6, 2.0, 4.0)

STOP_SOURCE_S: Final = (0.6, 2.0, 10.0, 30.0)
"""The longest is for ever, as far as a read can know."""

AWAIT_S: Final = 4.0
LOOK_S: Final = 0.02
CUT_S: Final = (0.3, 2.0, 6.0)
DRAG: Final = (30.0, 300.0)
DRAG_S: Final = (1.0, 4.0)

KINDS: Final = {
    "agent": 2,
    "agent-mid": 2,
    "stop-agent": 2,
    "kill-source": 2,
    "stop-source": 3,
    "slow-source": 2,
    "cut-source": 2,
    "registry": 2,
    "stop-registry": 1,
    "planner": 1,
    "worker": 3,
    "outage": 1,
}
"""What can happen, and how likely it is. A source is an agent that is being read just then."""


class Faults:
    """Makes trouble for a while."""

    def __init__(self, world: "World") -> None:
        """Plan the seed's troubles."""
        self.world, self.clock = world, world.clock
        self.kills = self.stops = self.outages = self.cuts = 0
        rng, setting = self.clock.rng, world.plan
        for agent in world.agents.values():
            agent.drag = rng.choice(DRAG) if rng.random() < setting.slow_agents else 1.0
        for _ in range(setting.troubles):
            self.clock.after(0.5 + rng.random() * setting.trouble_s, None, self._trouble)

    def _trouble(self) -> None:
        world, rng = self.world, self.clock.rng
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        agent = rng.choice(list(world.agents.values()))
        match kind:
            case "agent":
                self._kill_agent(agent)
            case "agent-mid":
                if agent.up:
                    agent.dies_in = rng.randint(0, 12)
            case "stop-agent":
                self._stop(agent, rng.choice(STOP_S))
            case "registry":
                self._kill(rng.choice(world.registries))
            case "stop-registry":
                self._stop(rng.choice(world.registries), rng.choice(STOP_S))
            case "planner":
                self._kill(world.planner)
            case "worker":
                self._kill_worker(rng.choice(world.ranks))
            case "outage":
                self._outage()
            case _:
                self._await_source(kind, self.clock.now + AWAIT_S)

    def _await_source(self, kind: str, until: float) -> None:
        """Strike a source in mid-read: as soon as there is one."""
        links = [link for link in self.world.links.values() if link.reads]
        if links:
            self._trouble_source(kind, self.clock.rng.choice(links))
        elif self.clock.now < until:
            self.clock.after(self.clock.rng.random() * LOOK_S, None, lambda: self._await_source(kind, until))

    def _trouble_source(self, kind: str, link: "Link") -> None:
        rng, source = self.clock.rng, link.source
        match kind:
            case "kill-source":
                self._kill_agent(source)
            case "stop-source":
                self._stop(source, rng.choice(STOP_SOURCE_S))
            case "slow-source":
                self._drag(source, rng.choice(DRAG), rng.choice(DRAG_S))
            case "cut-source":
                self._cut(link.reader, source, rng.choice(CUT_S))

    def _drag(self, agent: "AgentNode", drag: float, drag_s: float) -> None:
        self.world.note(f"{agent.name} sends {drag:g} times slower for {drag_s} s")
        before, agent.drag = agent.drag, drag

        def over() -> None:
            if agent.drag == drag:
                agent.drag = min(before, 1.0)

        self.clock.after(drag_s, None, over)

    def _cut(self, one: "AgentNode", other: "AgentNode", cut_s: float) -> None:
        self.cuts += 1
        self.world.note(f"nothing passes between {one.name} and {other.name} for {cut_s} s, other than by NATS")
        self.world.net.cut(one, other, cut_s)

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

    def _stop(self, node: Node, stop_s: float) -> None:
        if not node.runs:
            return
        self.stops += 1
        life = node.life
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
