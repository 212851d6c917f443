"""Readers on hosts of their own read one version from each other, and whoever stood between them may die or stop."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.chaos.content import MIB, Content
from tests.chaos.two_holders import Blow, kill, wake
from tests.integration.transports import UCXX
from tests.stopping import stop

import tensorhub
from tensorhub import AsyncShard, ReadReport
from tensorhub.local.hub import LocalHub

MODEL: Final = "policy"
READERS: Final = 4
NBYTES: Final = 256 * MIB
VERSION: Final = 3
READ_S: Final = 60.0
BEGIN_S: Final = 60.0
ATTEMPTS_MAX: Final = 6
SETTINGS: Final = {"TENSORHUB_WINDOW_BYTES": str(4 * MIB), "TENSORHUB_STALL_S": "2"}
"""A small window makes a read long enough to be struck."""


class Missed(Exception):
    """The blow did not meet a reader in the middle of a chain."""


@dataclass
class Stage:
    """A hub of five agents, each on a host of its own, and a replica on each."""

    up: LocalHub
    content: Content
    trainer: AsyncShard
    readers: list[AsyncShard] = field(default_factory=list)

    def pid(self, agent: str) -> int:
        return next(each.pid for each in self.up.hub.agents if each.id == agent)

    def check(self, shard: AsyncShard) -> ReadReport:
        wrong = self.content.wrong(shard.tensors, VERSION)
        assert wrong is None, wrong
        assert shard.last_read is not None
        return shard.last_read


@asynccontextmanager
async def stage(directory: Path, **settings: str) -> AsyncIterator[Stage]:
    content = Content(seed=5, shard=0, shards=1, nbytes=NBYTES)
    async with AsyncExitStack() as stack:
        agents = 1 + READERS
        environment = {**os.environ, **SETTINGS, **settings}
        up = await stack.enter_async_context(LocalHub(directory, agents=agents, hosts=agents, environment=environment))
        shards = []
        for agent in up.hub.agents:
            hub = await tensorhub.connect_async("pipeline", agent=agent.socket, nats=up.hub.nats)
            stack.push_async_callback(hub.close)
            shards.append(await hub.register(MODEL, content.specs, replica=agent.id))
        content.write(shards[0].tensors, VERSION)
        yield Stage(up, content, shards[0], shards[1:])


async def all_read(hub: Stage) -> list["asyncio.Task[int]"]:
    """Let all readers wait for the version, and publish it: one command decides for all of them."""
    reading = [asyncio.create_task(shard.replicate("latest", timeout_s=READ_S)) for shard in hub.readers]
    await asyncio.sleep(0)
    await hub.trainer.publish(VERSION)
    return reading


def taken_from(reports: list[ReadReport], agent: str) -> int:
    return sum(source.nbytes for report in reports for source in report.sources if source.agent == agent)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("_hosts", [UCXX])
async def test_four_readers_take_the_trainers_bytes_once(tmp_path: Path, _hosts: int) -> None:
    """Equal bytes everywhere, each byte read once, and the trainer gave them about once."""
    async with stage(tmp_path) as hub:
        assert await asyncio.gather(*await all_read(hub)) == [VERSION] * READERS
        reports = [hub.check(shard) for shard in hub.readers]
    assert all(report.got_bytes == report.nbytes and not report.wasted_bytes for report in reports)
    given = taken_from(reports, "agent-0") / reports[0].nbytes
    assert given < READERS / 2, reports


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("_hosts", [UCXX])
async def test_without_pipelining_all_is_read_from_the_trainer(tmp_path: Path, _hosts: int) -> None:
    async with stage(tmp_path, TENSORHUB_PIPELINING="off") as hub:
        await asyncio.gather(*await all_read(hub))
        reports = [hub.check(shard) for shard in hub.readers]
    assert taken_from(reports, "agent-0") == READERS * reports[0].nbytes


@pytest.mark.timeout(240)
@pytest.mark.parametrize("_hosts", [UCXX])
@pytest.mark.slow
@pytest.mark.parametrize("blow", [kill, stop])
async def test_readers_behind_a_middle_that_is_struck_move_on(tmp_path: Path, _hosts: int, blow: Blow) -> None:
    """Whoever can still end has the version, and has read nothing again but what was under way."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            await struck(tmp_path / str(attempt), attempt % READERS, blow)
        except Missed:
            continue
        return
    pytest.fail("no blow met the middle of a chain")


def begun(shard: AsyncShard) -> bool:
    marks = (tensor.reshape(-1).view(torch.uint8)[:64] for tensor in shard.tensors.values() if tensor.numel())
    return any(bool(mark.any()) for mark in marks)


async def struck(directory: Path, number: int, blow: Blow) -> None:
    """Strike one reader once all have begun, and look at the others."""
    async with stage(directory) as hub:
        reading = await all_read(hub)
        middle = hub.readers.pop(number)
        its = reading.pop(number)
        agent = f"agent-{1 + number}"
        async with asyncio.timeout(BEGIN_S):
            # Nobody but the memory tells when its first byte has come; the last in the chain has it from the others.
            while not all(begun(shard) for shard in (middle, *hub.readers)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        pid = hub.pid(agent)
        blow(pid)
        try:
            done = await asyncio.gather(*reading)
        finally:
            wake(pid)
        was_over = its.done() and its.exception() is None
        await asyncio.gather(its, return_exceptions=True)
        assert done == [VERSION] * (READERS - 1)
        reports = [hub.check(shard) for shard in hub.readers]
        if was_over or not taken_from(reports, agent):
            raise Missed
    for report in reports:
        assert report.got_bytes == report.nbytes
        assert report.wasted_bytes < NBYTES / 2, report
