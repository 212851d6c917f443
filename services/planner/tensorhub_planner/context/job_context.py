"""What planning asks of one job, answered with I/O."""

import time
from collections.abc import Collection, Sequence

from tensorhub_planner.catalog_view.catalog_replica import Fold
from tensorhub_planner.compiler.compiler import Compiled
from tensorhub_planner.context.catalogs import Catalogs
from tensorhub_planner.context.layout_store import Layouts
from tensorhub_planner.context.load_subscriber import Hearing
from tensorhub_planner.context.program_store import Programs
from tensorhub_planner.planning.unregistered import Unregistered
from tensorhub_planner.primitives.piece_sizes import Sizes
from tensorhub_planner.primitives.source_set import SourceSet


class Known:
    """What this planner knows of one job: see `answering.Knowledge`."""

    def __init__(self, job: str, catalogs: Catalogs, layouts: Layouts, programs: Programs, hearing: Hearing) -> None:
        """Ask each about this job."""
        self._job, self._catalogs, self._layouts = job, catalogs, layouts
        self._programs, self._hearing = programs, hearing

    async def fold(self, at_seq: int) -> Fold:
        """Return the log, folded at least so far."""
        return await self._catalogs.at(self._job, at_seq)

    async def sizes(self, layout: str) -> Sizes:
        """Return the sizes of a layout's pieces."""
        return await self._layouts.sizes(self._job, layout)

    async def compiled(self, layout: str, sources: SourceSet) -> Compiled:
        """Return the program that fills a layout from those."""
        return await self._programs.compiled(self._job, layout, sources)

    async def program(self, digest: str) -> Compiled:
        """Return a program that a reader names."""
        return await self._programs.known(self._job, digest)

    async def unregistered(self, layouts: Sequence[str], sources: SourceSet) -> Unregistered:
        """Return of which of the sources' tensors none of these layouts has anything."""
        return await self._programs.unregistered(self._job, layouts, sources)

    async def heard(self, agents: Collection[str]) -> None:
        """Return once these have told who reads from them, or won't soon."""
        await self._hearing.wait_for(agents)

    def now(self) -> float:
        """Return the planner's time."""
        return time.monotonic()
