"""A planner of the simulation: the production fold and its whole way to an answer."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Final

from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs.program import encoded
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.plans import PlanAnswer, PlanRequest
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.compiler.compiler import CompiledProgram, compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.planning.unregistered import Unregistered, global_names, unregistered
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.build import OLD, built
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.job_log import Entry, Follower
from tensorhub_simulator.faultsim.models.layouts import Layouts
from tensorhub_simulator.faultsim.observations import PlanAsked

LATE_S: Final = 0.05
TRIES_MAX: Final = 14


class PlannerNode(Node):
    """One planner."""

    fold: CatalogReplica
    ledger: LoadLedger
    known: "Known"

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
            snapshot = self.job.log.shelf.newest(self.job.name, self.fold.position)
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
        serving = reader_loads(reader for each in agent.family if each.up for reader in each.core.table.readers())
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


class Known:
    """What a planner of the simulation knows: see `answering.Knowledge`. Nothing of it takes any time."""

    def __init__(self, layouts: Layouts, fold: Callable[[], CatalogReplica], now: Callable[[], float]) -> None:
        """Look it up there."""
        self._layouts, self._fold, self._now = layouts, fold, now
        self._made: dict[tuple[str, LayoutSet], CompiledProgram | LayoutMismatch] = {}
        self._by_digest: dict[str, CompiledProgram] = {}

    async def fold(self, _at_seq: int) -> CatalogReplica:
        """Return the log, folded so far already."""
        return self._fold()

    async def sizes(self, layout: str) -> PieceSizes:
        """Return the sizes of a layout's pieces."""
        return PieceSizes(self._layouts.table(layout).nbytes)

    async def compiled(self, layout: str, sources: LayoutSet) -> CompiledProgram:
        """Return the program that fills a layout from those."""
        key = layout, sources
        if key not in self._made:
            self._made[key] = self._make(layout, sources)
        made = self._made[key]
        if isinstance(made, LayoutMismatch):
            raise made
        return made

    def _make(self, layout: str, sources: LayoutSet) -> CompiledProgram | LayoutMismatch:
        index, destination = self._index(sources), self._layouts.layout(layout)
        try:
            program = compile_program(layout, destination, index)
        except LayoutMismatch as why:
            return why
        execution = self._layouts.put(encoded(program))
        made = CompiledProgram(execution.digest, execution, PieceSizes(execution.nbytes()), global_names(destination))
        self._by_digest[execution.digest] = made
        return made

    async def program(self, digest: str) -> CompiledProgram:
        """Return a program that a reader names, perhaps one that the planner before this one has made."""
        execution = self._layouts.executions[digest]
        return self._by_digest.get(digest) or CompiledProgram(digest, execution, PieceSizes(execution.nbytes()))

    async def unregistered(self, layouts: Sequence[str], sources: LayoutSet) -> Unregistered:
        """Return of which of the sources' tensors none of these layouts has anything."""
        registered = [(await self.compiled(layout, sources)).names or () for layout in layouts]
        return unregistered(registered, self._index(sources))

    def _index(self, sources: LayoutSet) -> LayoutIndex:
        layouts = {digest: self._layouts.layout(digest) for digest in sources.layouts}
        return LayoutIndex(layouts, sources.originals)

    async def heard(self, agents: Collection[str]) -> None:
        """Wait for nobody: who has not told yet is told of later."""

    def now(self) -> float:
        """Return the planner's time."""
        return self._now()


def at_once(answering: Coroutine[None, None, PlanAnswer]) -> PlanAnswer:
    """Carry out what waits for nothing."""
    try:
        answering.send(None)
    except StopIteration as end:
        answer: PlanAnswer = end.value
        return answer
    raise Violation("at once", "the planner waits for something in a world in which nothing takes it any time")
