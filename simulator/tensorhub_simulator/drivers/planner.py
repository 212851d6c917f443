"""The driver of the planner: its whole way from a request to an answer, in a world in which nothing takes any time.

`Layouts` is the blob store. `Known` is what a planner looks up: layouts, compiled programs, the log, the time.
`PlannerDriver` answers requests over any catalog, with a ledger of its own.
"""

from collections.abc import Callable, Collection, Coroutine, Sequence
from hashlib import sha256

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, PieceTable, layout_digest, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import decoded, encoded
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
from tensorhub_simulator.engine.violation import Violation


class Layouts:
    """Layouts and transfer programs by their digests: the blob store of a job."""

    def __init__(self) -> None:
        """Know none."""
        self._tables: dict[str, PieceTable] = {}
        self.executions: dict[str, NumberedProgram] = {}

    def add(self, layout: Layout) -> str:
        """Keep a layout; return its digest."""
        digest = layout_digest(layout)
        if digest not in self._tables:
            self._tables[digest] = pieces(layout)
        return digest

    def table(self, digest: str) -> PieceTable:
        """Return the pieces of a layout."""
        return self._tables[digest]

    def layout(self, digest: str) -> Layout:
        """Return a layout."""
        return self._tables[digest].layout

    def put(self, program: bytes) -> NumberedProgram:
        """Keep a program as it is sent; return it ready to be carried out."""
        digest = sha256(program).hexdigest()
        if digest not in self.executions:
            self.executions[digest] = NumberedProgram(decoded(program), digest)
        return self.executions[digest]


class Known:
    """What a planner knows: layouts, programs that it compiles, the log, and the time. Nothing of it takes any time."""

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
        """Wait for no heartbeat."""

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


class PlannerDriver:
    """One planner that has folded the whole log of one job."""

    def __init__(self, job: str, catalog: Catalog, layouts: Layouts, limits: PlanLimits | None = None) -> None:
        """Answer by this catalog, whatever is in it when a request comes."""
        self.limits = PlanLimits() if limits is None else limits
        self.ledger = LoadLedger(self.limits)
        self.now = 0.0
        known = Known(layouts, lambda: CatalogReplica(catalog, catalog.seq), lambda: self.now)
        self._planner = DemandPlanner(job, known, self.ledger, self.limits)

    def answer(self, request: PlanRequest) -> PlanAnswer:
        """Answer a request, and check the ledger."""
        answer = at_once(self._planner.answer(request))
        self.ledger.check()
        return answer
