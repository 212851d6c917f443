"""The network: what gets lost, who does not reach NATS, and between which hosts no bytes pass.

Bytes and messages go different ways, so either may be cut while the other is whole. What is cut is healed later.
"""

from typing import TYPE_CHECKING

from tensorhub_simulator.engine.clock import Node

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.world import World


class Net:
    """What passes now."""

    def __init__(self, world: "World") -> None:
        """Begin whole."""
        self.world, self.clock = world, world.clock
        self._cut: dict[frozenset[str], float] = {}
        """Until when no bytes pass between two agents."""

    def is_cut(self, one: Node, other: Node) -> bool:
        """Tell whether no bytes pass between two agents now."""
        return self.clock.now < self._cut.get(frozenset((one.name, other.name)), 0.0)

    def cut(self, one: Node, other: Node, cut_s: float) -> None:
        """Let no bytes pass between two agents for a while."""
        self._cut[frozenset((one.name, other.name))] = self.clock.now + cut_s

    def loses(self, *nodes: Node) -> bool:
        """Tell whether a message by NATS that these have to do with is lost; the first one has sent it."""
        world = self.world
        if not world.log.up or world.nats.state.paused or any(node.state.cut_off for node in nodes):
            return True
        return world.quiet_since is None and nodes[0].happens(world.plan.loss_odds)

    def cut_off(self, node: Node, cut_s: float) -> None:
        """Let a process not reach NATS for a while."""
        if node.state.cut_off:
            return
        node.state.cut_off = True

        def heal() -> None:
            node.state.cut_off = False
            for job in self.world.jobs:
                job.log.wake()

        self.clock.after(cut_s, None, heal)
