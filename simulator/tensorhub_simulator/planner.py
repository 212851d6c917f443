"""A planner of the simulation: the production fold, search and plan."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tensorhub_agent.serving import summed
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.table import RoundState
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.wire.asks import Beat
from tensorhub_common.wire.transfer import Demand, PlanAnswer, Refusal, Turn
from tensorhub_planner.deciding import Question, found_in
from tensorhub_planner.fold import Fold
from tensorhub_planner.limits import Limits
from tensorhub_planner.load import Ledger
from tensorhub_planner.plan import LayoutsDiffer
from tensorhub_planner.ranges import Sizes
from tensorhub_planner.resharding import cannot_be_filled
from tensorhub_simulator.clock import Node
from tensorhub_simulator.log import Entry, Follower
from tensorhub_simulator.memory import Violation
from tensorhub_simulator.upgrading import OLD, built

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode
    from tensorhub_simulator.world import World

LATE_S: Final = 0.05
TRIES_MAX: Final = 14


class PlannerNode(Node):
    """One planner."""

    fold: Fold
    ledger: Ledger

    def __init__(self, world: "World", limits: Limits) -> None:
        """Stand ready to start."""
        super().__init__("planner")
        self.world, self.clock, self.limits = world, world.clock, limits
        self.build = OLD

    def start(self) -> None:
        """Begin a life: fold the newest snapshot and the log from there."""
        self.life += 1
        self.up, self.state.paused = True, False
        self.backlog.clear()
        self.fold, self.ledger = Fold(Catalog(self.world.job)), Ledger(self.limits)
        self._restore()

    def _restore(self) -> None:
        """Go on from the newest snapshot that lies ahead, and follow the log from there."""
        snapshot = self.world.log.shelf.newest(self.world.job, self.fold.position)
        if snapshot is not None:
            self.fold = Fold(snapshot.catalog, snapshot.seq)
        elif self.fold.position + 1 < self.world.log.first:
            raise Violation("no way back", f"the planner has folded {self.fold.position}; the log begins later")
        Follower(self.world.log, self, self.fold.position, self._on_entry, events=False, gap=self._restore)

    def kill(self) -> None:
        """SIGKILL."""
        self.world.note("the planner is killed")
        self.up = self.state.paused = False
        self.life += 1

    def _on_entry(self, entry: Entry) -> None:
        with built(self.build, self.fold.catalog):
            events = self.fold.take(entry)
        for event in events:
            self.ledger.see(self.world.job, event)

    def hear(self, agent: "AgentNode") -> None:
        """Hear an agent's beat, in which it says who reads from it in all jobs."""
        jobs = [job.agents[agent.name] for job in self.world.jobs]
        serving = summed(reader for each in jobs if each.up for reader in each.core.table.readers())
        self.ledger.hear(Beat(agent=agent.name, incarnation=agent.core.incarnation, serving=serving), self.now)
        self.ledger.check()

    def asked(self, demand: Demand, reply: Callable[[PlanAnswer], None], tries: int = 0) -> None:
        """Answer once the log is folded as far as the demand rests on; say nothing if that takes too long."""
        if self.fold.position < demand.at_seq:
            if tries < TRIES_MAX:
                self.clock.after(LATE_S, self, lambda: self.asked(demand, reply, tries + 1))
            return
        reply(self._plan(demand))

    def check_turns(self) -> None:
        """Raise `Violation` if it has folded all that the log has, and not which rounds are decided, and when."""
        truth = self.world.truth
        if self.fold.catalog.seq != truth.catalog.seq:
            return
        for model in self.fold.catalog.models.values():
            for replica in model.replicas.values():
                current, told = replica.round, truth.rules.turns.get((model.name, replica.name))
                if current is None or current.state is RoundState.JOINING:
                    continue
                if told != Turn(current.decided, current.number):
                    what = f"{current.decided} for that of {replica.name}, and its agents were told {told}"
                    raise Violation("turns are the log's", f"the planner takes {what}")

    def _plan(self, demand: Demand) -> PlanAnswer:
        self.check_turns()
        found = found_in(self.fold, demand, self.limits)
        if isinstance(found, Refusal):
            return found
        sizes = Sizes(self.world.sizes_of(found.seat.layout))
        answer = Question(self.world.job, demand, found, sizes).decide(self.ledger, self.limits, self.now)
        self.ledger.check()
        if isinstance(answer, LayoutsDiffer):
            why = LayoutMismatch("nobody reshards in this simulation")
            return cannot_be_filled(demand, why, found.holders, could_be=False)
        return answer
