"""One agent's jobs: what an attach takes away before a job is opened."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tensorhub_agent.app.service import AgentService
from tensorhub_common.config.settings import load


class Deleted:
    """A job that was deleted, and takes until `goes_on` to stop."""

    core = SimpleNamespace(is_over=True)

    def __init__(self) -> None:
        self.stops = 0
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()

    async def stop(self) -> None:
        self.stops += 1
        self.began.set()
        await self.goes_on.wait()


async def test_two_attach_at_once_while_two_deleted_jobs_stand_here() -> None:
    """The second one takes away what the first was about to, which is no fault of either."""
    service = AgentService(load({}))
    one, other = Deleted(), Deleted()
    jobs: dict[str, Any] = {"one": one, "other": other}
    service._jobs = jobs
    async with asyncio.timeout(60):
        first = asyncio.create_task(service._forget_deleted())
        await one.began.wait()
        second = asyncio.create_task(service._forget_deleted())
        await other.began.wait()
        one.goes_on.set()
        await first
        other.goes_on.set()
        await second
    assert (one.stops, other.stops, service._jobs) == (1, 1, {})
