"""The network: what gets lost, which processes do not reach NATS, and between which hosts no bytes pass.

Bytes and messages go different ways, so either may be cut while the other is whole. What is cut is healed later.
"""

from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.faultsim.models.job_log import JobLogModel


class Network:
    """What passes now."""

    def __init__(self, clock: Clock, nats: Node, loss_odds: float) -> None:
        """Begin whole. `loss_odds` are those of a message to be lost, until the faults end."""
        self.clock, self.nats, self.loss_odds = clock, nats, loss_odds
        self.is_quiet = False
        """The last fault is over, so no message is lost."""
        self.logs: list[JobLogModel] = []
        self._cut: dict[frozenset[str], float] = {}
        """Until when no bytes pass between two agents."""

    def is_cut(self, one: Node, other: Node) -> bool:
        """Tell whether no bytes pass between two agents now."""
        return self.clock.now < self._cut.get(frozenset((one.name, other.name)), 0.0)

    def cut(self, one: Node, other: Node, cut_s: float) -> None:
        """Let no bytes pass between two agents for a while."""
        self._cut[frozenset((one.name, other.name))] = self.clock.now + cut_s

    def reaches_log(self, node: Node) -> bool:
        """Tell whether a process reaches the log now."""
        return self.is_up and not node.state.cut_off

    @property
    def is_up(self) -> bool:
        """Whether NATS answers."""
        return self.logs[0].up and not self.nats.state.paused

    def loses(self, sender: Node, *others: Node) -> bool:
        """Tell whether a message by NATS is lost."""
        if not self.is_up or any(node.state.cut_off for node in (sender, *others)):
            return True
        return not self.is_quiet and sender.happens(self.loss_odds)

    def cut_off(self, node: Node, cut_s: float) -> None:
        """Let a process not reach NATS for a while."""
        if node.state.cut_off:
            return
        node.state.cut_off = True

        def heal() -> None:
            node.state.cut_off = False
            for log in self.logs:
                log.wake()

        self.clock.after(cut_s, None, heal)
