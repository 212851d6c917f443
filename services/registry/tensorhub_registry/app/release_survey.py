"""Which level the registries and planners of this hub can all fold: what a new job begins at.

A process that has answered counts for as long as NATS knows it, also while it is stopped or too busy to answer. A
process of a release before levels does not answer; while one runs, `TENSORHUB_NEW_JOB_LEVEL` is 0.

Invariant: new jobs begin at the lowest level among those that the processes know, so that all can fold them.
"""

import asyncio
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.ping import is_known, survey_log_followers
from tensorhub_common.observability import logs
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import Pong
from tensorhub_common.protocol.subjects import is_name
from tensorhub_common.runtime.gather_bounded import gather_bounded

LOOK_S: Final = 5.0
"""How often a registry asks which registries and planners there are."""
FIRST_WAIT_S: Final = 1.0
"""A job waits this long for the first answer, before its level is decided without one."""

ROLE: Final = "registry"

_log: Final = logs.logger(__name__)


class ReleaseSurvey:
    """The last answer of each registry and planner, asked for regularly."""

    def __init__(self, bus: Bus, new_job_level: int | None) -> None:
        """Ask there. `new_job_level`: what the operator allows, None: all that is known."""
        self._bus = bus
        self._allowed = NEWEST_LEVEL if new_job_level is None else min(new_job_level, NEWEST_LEVEL)
        self._there: dict[str, Pong] = {}
        """The last answer of each process that exists, by its name."""
        self.newer_registry: Pong | None = None
        """A registry that folds a higher level than this one, and has answered the last question."""
        self._known = asyncio.Event()

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            try:
                await self._look()
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
        return min(self._allowed, min((pong.level for pong in self._there.values()), default=0))

    async def behind(self, level: int) -> list[Pong]:
        """Return the registries and planners that can't fold this level, asked now.

        Raises `RegistryUnavailable` where none answers: this one is there, so its question has not come through.
        """
        if not await self._look():
            raise RegistryUnavailable("no registry or planner says which level it can fold: call again")
        return [pong for _, pong in sorted(self._there.items()) if pong.level < level]

    async def _look(self) -> bool:
        """Ask who is there; False: there was no answer at all."""
        found = {pong.id: pong for pong in await survey_log_followers(self._bus) if is_name(pong.id)}
        if not found:
            return False
        silent = [name for name in self._there if name not in found]
        gone: set[str] = set()

        async def ask(number: int) -> None:
            if not await is_known(self._bus, silent[number]):
                gone.add(silent[number])

        await gather_bounded(range(len(silent)), ask)
        self._there = {name: pong for name, pong in (self._there | found).items() if name not in gone}
        self.newer_registry = next(
            (pong for pong in found.values() if pong.role == ROLE and pong.level > NEWEST_LEVEL), None
        )
        self._known.set()
        return True
