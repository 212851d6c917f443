"""What planning needs of one job, obtained by I/O."""

import time
from collections.abc import Collection, Sequence

from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.compiler.compiler import CompiledProgram
from tensorhub_planner.context.catalogs import CatalogReplicas
from tensorhub_planner.context.layout_store import LayoutStore
from tensorhub_planner.context.load_subscriber import LoadSubscriber
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.planning.unregistered import Unregistered
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet


class BusJobContext:
    """The `planning.request.JobContext` of one job, by catalogs, stores and loads of this planner."""

    def __init__(
        self, job: str, catalogs: CatalogReplicas, layouts: LayoutStore, programs: ProgramStore, loads: LoadSubscriber
    ) -> None:
        """Ask each about this job."""
        self._job, self._catalogs, self._layouts = job, catalogs, layouts
        self._programs, self._loads = programs, loads

    async def fold(self, at_seq: int) -> CatalogReplica:
        """Return the log, folded at least so far."""
        return await self._catalogs.at(self._job, at_seq)

    async def sizes(self, layout: str) -> PieceSizes:
        """Return the sizes of a layout's pieces."""
        return await self._layouts.sizes(self._job, layout)

    async def compiled(self, layout: str, sources: LayoutSet) -> CompiledProgram:
        """Return the program that fills a layout from those."""
        return await self._programs.compiled(self._job, layout, sources)

    async def program(self, digest: str) -> CompiledProgram:
        """Return a program that a reader names."""
        return await self._programs.known(self._job, digest)

    async def unregistered(self, layouts: Sequence[str], sources: LayoutSet) -> Unregistered:
        """Return the tensors of the sources of which none of these layouts has a part."""
        return await self._programs.unregistered(self._job, layouts, sources)

    async def heard(self, agents: Collection[str]) -> None:
        """Return once these agents have reported their readers, or had their time."""
        await self._loads.wait_for(agents)

    def now(self) -> float:
        """Return the planner's time."""
        return time.monotonic()
