"""Partitions: bytes alone, messages alone, or both, between two hosts or around one process; healed later."""

from typing import TYPE_CHECKING, Final

from tensorhub_simulator.engine.clock import Node

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.world import World

CUT_S: Final = (0.3, 2.0, 6.0)


class Partitions:
    """Cuts what stands between processes."""

    def __init__(self, world: "World") -> None:
        """Begin with nothing cut."""
        self.world, self.rng = world, world.clock.rng
        self.count = 0

    def between(self, one: "AgentNode", other: "AgentNode") -> None:
        """Let no bytes pass between two agents; both reach NATS."""
        cut_s = self._cut(f"no bytes pass between {one.name} and {other.name}")
        self.world.net.cut(one, other, cut_s)

    def bytes_alone(self) -> None:
        """No bytes pass between one host and all others; all of them reach NATS."""
        host = self._any_host()
        self._bytes(host, self._cut(f"no bytes leave or reach {host}"))

    def messages_alone(self) -> None:
        """One host or one process does not reach NATS; bytes pass."""
        nodes: list[list[Node]] = [[registry] for registry in self.world.registries]
        nodes += [[self.world.planner], *(self._agents(host) for host in self._hosts())]
        chosen = self.rng.choice(nodes)
        cut_s = self._cut(f"{[node.name for node in chosen]} do not reach NATS")
        for node in chosen:
            self.world.net.cut_off(node, cut_s)

    def both(self) -> None:
        """One host is cut off from everything."""
        host = self._any_host()
        cut_s = self._cut(f"{host} is cut off")
        self._bytes(host, cut_s)
        for node in self._agents(host):
            self.world.net.cut_off(node, cut_s)

    def _bytes(self, host: str, cut_s: float) -> None:
        agents = self.world.agents.values()
        for one in (agent for agent in agents if agent.host == host):
            for other in (agent for agent in agents if agent.host != host):
                self.world.net.cut(one, other, cut_s)

    def _hosts(self) -> list[str]:
        return sorted({agent.host for agent in self.world.agents.values()})

    def _any_host(self) -> str:
        return self.rng.choice(self._hosts())

    def _agents(self, host: str) -> list[Node]:
        return [agent for agent in self.world.agents.values() if agent.host == host]

    def _cut(self, what: str) -> float:
        self.count += 1
        cut_s = self.rng.choice(CUT_S)
        self.world.note(f"{what} for {cut_s} s")
        return cut_s
