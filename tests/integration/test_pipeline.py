"""Readers on hosts of their own read one version from each other, and one between them may die or stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tests.chaos.content import MIB, Content
from tests.chaos.memory_marks import first_bytes
from tests.chaos.scenario import Blow
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.transports import NEEDS_UCX
from tests.kit.waiting import Missed, kill, met, wake
from tests.stopping import stop

from tensorhub import AsyncShard, ReadReport

pytestmark = [pytest.mark.slow, NEEDS_UCX]

READERS: Final = 4
NBYTES: Final = 256 * MIB
VERSION: Final = 3
READ_S: Final = 60.0
ATTEMPTS_MAX: Final = 6
SETTINGS: Final = {"TENSORHUB_WINDOW_BYTES": str(4 * MIB), "TENSORHUB_STALL_S": "2"}
"""A small window makes a read long enough to be struck."""


@dataclass(frozen=True)
class Chain:
    """A hub of five agents, each on a host of its own, and a replica on each."""

    hub: RunningHub
    content: Content
    trainer: AsyncShard
    readers: list[AsyncShard]

    async def begin(self) -> list["asyncio.Task[int]"]:
        reading = [asyncio.create_task(shard.replicate("latest", timeout_s=READ_S)) for shard in self.readers]
        await asyncio.sleep(0)
        await self.trainer.publish(VERSION)
        return reading

    def check(self, shard: AsyncShard) -> ReadReport:
        wrong = self.content.wrong(shard.tensors, VERSION)
        assert wrong is None, wrong
        assert shard.last_read is not None
        return shard.last_read


@asynccontextmanager
async def chain(directory: Path, **more: str) -> AsyncIterator[Chain]:
    content, agents = Content(seed=5, shard=0, shards=1, nbytes=NBYTES), 1 + READERS
    async with (
        running_hub(directory, agents, agents, settings={**SETTINGS, **more}) as hub,
        hub.connected(agents=agents) as hubs,
    ):
        shards = [await each.register("m", content.specs, replica=f"agent-{n}") for n, each in enumerate(hubs)]
        content.write(shards[0].tensors, VERSION)
        yield Chain(hub, content, shards[0], shards[1:])


def taken_from(reports: list[ReadReport], agent: str) -> int:
    return sum(source.nbytes for report in reports for source in report.sources if source.agent == agent)


@pytest.mark.timeout(120)
async def test_four_readers_take_the_trainers_bytes_once(tmp_path: Path) -> None:
    """Equal bytes everywhere, each byte read once, and the trainer gave them about once."""
    async with chain(tmp_path) as it:
        assert await asyncio.gather(*await it.begin()) == [VERSION] * READERS
        reports = [it.check(shard) for shard in it.readers]
    assert all(report.got_bytes == report.nbytes and not report.wasted_bytes for report in reports)
    given = taken_from(reports, "agent-0") / reports[0].nbytes
    assert given < READERS / 2, reports


@pytest.mark.timeout(120)
async def test_without_pipelining_all_is_read_from_the_trainer(tmp_path: Path) -> None:
    async with chain(tmp_path, TENSORHUB_PIPELINING="off") as it:
        await asyncio.gather(*await it.begin())
        reports = [it.check(shard) for shard in it.readers]
    assert taken_from(reports, "agent-0") == READERS * reports[0].nbytes


@pytest.mark.timeout(240)
@pytest.mark.parametrize("blow", [kill, stop])
async def test_readers_behind_a_middle_that_is_struck_move_on(tmp_path: Path, blow: Blow) -> None:
    """Each reader that can still end has the version, and has read nothing again but what was under way."""
    await met(lambda n: struck(tmp_path / str(n), n % READERS, blow), ATTEMPTS_MAX)


async def struck(directory: Path, number: int, blow: Blow) -> None:
    async with chain(directory) as it:
        reading = await it.begin()
        # The last in the chain has its first byte from the others.
        await first_bytes(it.readers, *reading)
        it.readers.pop(number)
        its, agent = reading.pop(number), f"agent-{1 + number}"
        pid = it.hub.pid(agent)
        blow(pid)
        try:
            done = await asyncio.gather(*reading)
        finally:
            wake(pid)
        was_over = its.done() and its.exception() is None
        await asyncio.gather(its, return_exceptions=True)
        assert done == [VERSION] * (READERS - 1)
        reports = [it.check(shard) for shard in it.readers]
        if was_over or not taken_from(reports, agent):
            raise Missed
    for report in reports:
        assert report.got_bytes == report.nbytes
        assert report.wasted_bytes < NBYTES / 2, report
