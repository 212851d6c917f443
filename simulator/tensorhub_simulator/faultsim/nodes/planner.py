"""A planner of the simulation: the production fold and its whole way to an answer."""

from collections.abc import Callable
from typing import Final

from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.plans import PlanAnswer, PlanRequest
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.drivers.planner import Known, at_once
from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.build import OLD, built
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.job_log import Entry, Follower
from tensorhub_simulator.faultsim.observations import PlanAsked

LATE_S: Final = 0.05
TRIES_MAX: Final = 14


class PlannerNode(Node):
    """One planner."""

    fold: CatalogReplica
    ledger: LoadLedger
    known: Known

    def __init__(self, job: Job, limits: PlanLimits) -> None:
        """Stand ready to start."""
        super().__init__("planner", job.stream("messages", "planner"))
        self.job, self.clock, self.limits = job, job.clock, limits
        self.build = OLD

    def start(self) -> None:
        """Begin a life: fold the newest snapshot and the log from there."""
        self.life += 1
        self.up, self.state.paused = True, False
        self.backlog.clear()
        self.fold, self.ledger = (
            CatalogReplica(Catalog(self.job.name, level=self.job.first_level)),
            LoadLedger(self.limits),
        )
        self.known = Known(self.job.layouts, lambda: self.fold, lambda: self.now)
        self._restore()

    def _restore(self) -> None:
        """Go on from the newest snapshot that lies ahead, and follow the log from there."""
        with built(self.build, self.fold.catalog):
            snapshot = self.job.log.snapshots.newest(self.job.name, self.fold.position)
        if snapshot is not None:
            self.fold = CatalogReplica(snapshot.catalog, snapshot.seq)
        elif self.fold.position + 1 < self.job.log.first:
            raise Violation("no way back", f"the planner has folded {self.fold.position}; the log begins later")
        Follower(self.job.log, self, self.fold.position, self._on_entry, events=False, gap=self._restore)

    def kill(self) -> None:
        """SIGKILL."""
        self.job.log_line("the planner is killed")
        self.up = self.state.paused = False
        self.life += 1

    def _on_entry(self, entry: Entry) -> None:
        with built(self.build, self.fold.catalog):
            events = self.fold.take(entry)
        for event in events:
            self.ledger.see(self.job.name, entry.seq, event)

    def heartbeat(self, agent: AgentHost) -> None:
        """Take an agent's heartbeat, in which it lists its readers of all jobs."""
        serving = reader_loads(reader for each in agent.family if each.up for reader in each.core.leases.readers())
        self.ledger.hear(Heartbeat(agent=agent.name, incarnation=agent.core.incarnation, serving=serving), self.now)
        self.ledger.check()

    def asked(self, demand: PlanRequest, reply: Callable[[PlanAnswer], None], tries: int = 0) -> None:
        """Answer once the log is folded as far as the demand rests on; say nothing if that takes too long."""
        if self.fold.position < demand.at_seq:
            if tries < TRIES_MAX:
                self.clock.after(LATE_S, self, lambda: self.asked(demand, reply, tries + 1))
            return
        reply(self._plan(demand))

    def _plan(self, demand: PlanRequest) -> PlanAnswer:
        self.job.observe(PlanAsked(self.fold.catalog))
        answer = at_once(DemandPlanner(self.job.name, self.known, self.ledger, self.limits).answer(demand))
        self.ledger.check()
        return answer
