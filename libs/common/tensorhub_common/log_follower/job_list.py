"""Which jobs have a log: listed every `LIST_S`, and whenever the owner asks."""

import asyncio
from collections.abc import Callable, Collection
from typing import Final, NoReturn

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import job_log
from tensorhub_common.observability.logs import logger
from tensorhub_common.runtime.supervision import Supervisor, result_of

LIST_S: Final = 5.0
"""How often a registry or planner looks for jobs that others opened or deleted."""

_log: Final = logger(__name__)

OnListed = Callable[[Collection[str], float], None]
"""Takes the names of all jobs that have a log, and the loop's time at which they were asked for."""


class JobList:
    """The jobs of one hub, listed for one owner. Lists are read one after another."""

    def __init__(
        self, bus: Bus, work: Supervisor, on_listed: OnListed, retry_s: float, retried: tuple[type[TensorHubError], ...]
    ) -> None:
        """Prepare. After an error of `retried` the jobs are listed again after `retry_s`; any other ends `watch`."""
        self._bus, self._work, self._on_listed = bus, work, on_listed
        self._retry_s, self._retried = retry_s, retried
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def watch(self) -> NoReturn:
        """List the jobs again and again."""
        while True:
            wait_s = LIST_S
            try:
                await self.read()
            except self._retried as why:
                wait_s = self._retry_s
                _log.debug("the jobs could not be listed", why=str(why))
            await asyncio.sleep(wait_s)

    async def read(self) -> None:
        """List the jobs by a request that begins after this call. Callers that wait meanwhile share the next one."""
        if self._next is None:
            self._next = self._work.start(self._read_next(), "listing jobs", awaited=True)
        await result_of(self._next)

    async def _read_next(self) -> None:
        async with self._reading:
            self._next = None
            began = asyncio.get_running_loop().time()
            self._on_listed(await job_log.list_jobs(self._bus), began)
