"""Has the programs of `upcoming_programs` compiled while their readers wait for a version. I/O: it decides nothing.

A program that can't be compiled is left to the read, which says why.

Invariant: one look at a job is in progress at a time, and at most `TRIED_MAX` tried programs are remembered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.log.events import Event, RoundJoined, ShardRegistered
from tensorhub_common.runtime.gather_bounded import gather_bounded
from tensorhub_common.runtime.supervision import Supervisor, log_only
from tensorhub_planner.catalog_view.upcoming_programs import UpcomingProgram, upcoming_programs
from tensorhub_planner.context.program_store import PROGRAMS_MAX, ProgramStore

SETTLE_S: Final = 0.2
"""A job is looked at this long after a shard joined: thousands of shards do, one after another."""
PREPARED_MAX: Final = PROGRAMS_MAX // 2
"""Limit of the programs compiled in one look, so that they don't displace others that are used."""
TRIED_MAX: Final = 2 * PROGRAMS_MAX

_log: Final = logger(__name__)


class ProgramPrefetcher:
    """Looks at the catalogs of jobs in which shards have joined."""

    def __init__(self, programs: ProgramStore, catalog: Callable[[str], Catalog | None], work: Supervisor) -> None:
        """Prepare with these programs; `catalog` returns what is folded of a job, or None."""
        self._programs, self._catalog, self._work = programs, catalog, work
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._tried: OrderedDict[tuple[str, UpcomingProgram], None] = OrderedDict()

    def see(self, job: str, event: Event) -> None:
        """Take an event of a job's log."""
        if not isinstance(event, RoundJoined | ShardRegistered):
            return
        if job in self._looks:
            self._again.add(job)
            return
        # A fault is only logged: the read has its program compiled when it asks.
        self._looks[job] = self._work.start(self._look(job), f"preparing programs of job {job!r}", on_fault=log_only)

    @property
    def looks(self) -> list[asyncio.Task[None]]:
        """Those that are under way."""
        return list(self._looks.values())

    async def _look(self, job: str) -> None:
        try:
            while True:
                self._again.discard(job)
                await asyncio.sleep(SETTLE_S)
                await self._prepare(job)
                if job not in self._again:
                    return
        finally:
            del self._looks[job]

    async def _prepare(self, job: str) -> None:
        catalog = self._catalog(job)
        found = () if catalog is None else upcoming_programs(catalog)
        wanted = list(islice((one for one in found if (job, one) not in self._tried), PREPARED_MAX))

        async def prepare(number: int) -> None:
            one = wanted[number]
            self._tried[job, one] = None
            try:
                await self._programs.compiled(job, one.layout, one.sources)
            except TensorHubError as why:
                _log.debug("a program could not be compiled ahead", job=job, layout=one.layout, why=str(why))

        await gather_bounded(range(len(wanted)), prepare)
        while len(self._tried) > TRIED_MAX:
            self._tried.popitem(last=False)
        if wanted:
            _log.debug("programs are compiled ahead", job=job, programs=len(wanted))
