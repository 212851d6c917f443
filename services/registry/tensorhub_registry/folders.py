"""Which level the registries and planners of this hub can all fold: what a new job begins at.

Always true: where one answers that knows only a lower level, new jobs begin at that level, so that it can fold them. A
process of a release before levels does not answer; while one runs, `TENSORHUB_NEW_JOB_LEVEL` is 0.
"""

import asyncio
from typing import Final

from tensorhub_common import telemetry
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.pings import folders
from tensorhub_common.errors import TensorHubError
from tensorhub_common.levels import NEWEST
from tensorhub_common.wire.asks import Pong

LOOK_S: Final = 5.0
"""How often a registry asks who there is."""
FIRST_WAIT_S: Final = 1.0
"""A job waits so long for the first answer, before its level is decided without one."""

_log: Final = telemetry.logger(__name__)


class Folders:
    """What the registries and planners say of themselves, asked again and again."""

    def __init__(self, bus: Bus, new_job_level: int | None) -> None:
        """Ask there. `new_job_level`: what the operator allows, None: all that is known."""
        self._bus = bus
        self._allowed = NEWEST if new_job_level is None else min(new_job_level, NEWEST)
        self._lowest = 0
        self._known = asyncio.Event()

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            try:
                self._take(await folders(self._bus))
            except TensorHubError as why:
                _log.debug("the registries and planners could not be asked", why=str(why))
            await asyncio.sleep(LOOK_S)

    async def level_for_new_jobs(self) -> int:
        """Return the highest level that all can fold and the operator allows."""
        try:
            async with asyncio.timeout(FIRST_WAIT_S):
                await self._known.wait()
        except TimeoutError:
            _log.warning("a new job begins at level 0: no registry or planner has said which level it can fold")
        return min(self._allowed, self._lowest)

    async def behind(self, level: int) -> list[Pong]:
        """Return the registries and planners that can't fold this level, asked now."""
        found = await folders(self._bus)
        self._take(found)
        return [each for each in found if each.level < level]

    def _take(self, found: list[Pong]) -> None:
        if found:
            self._lowest = min(each.level for each in found)
            self._known.set()
