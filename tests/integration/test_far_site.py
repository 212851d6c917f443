"""Replicas in another site than the trainer bring a part over each and exchange the rest, by real processes."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from tests.integration.cuts import Sharding, assert_holds, columns, model, published, registered, rows, whole
from tests.integration.far_agent import NEAR_HOSTS
from tests.integration.hubs import RunningHub
from tests.integration.transports import UCXX

import tensorhub
from tensorhub.up.up import Commands, Up
from tensorhub_common.bus.connection import connect
from tensorhub_common.bus.joblog import JobLog
from tensorhub_common.subjects import commands_of

JOB: Final = "far"
REPLICAS: Final = 3
WAIT_S: Final = 60.0
AGENT: Final = (sys.executable, "-m", "tests.integration.far_agent")


@contextlib.asynccontextmanager
async def two_sites(directory: Path, hosts: int) -> AsyncIterator[tuple[RunningHub, list[int], list[int]]]:
    """Bring a hub up; yield it, and which of its agents stand near and which far.

    With two hosts all that are far share one; else each has a host of its own.
    """
    near_hosts = 1 if hosts == 2 else 2
    agents = 2 * REPLICAS if hosts == 2 else 2 + REPLICAS
    environment = {**os.environ, NEAR_HOSTS: str(near_hosts)}
    up = Up(directory, agents=agents, hosts=hosts, commands=Commands(agent=AGENT), environment=environment)
    async with up:
        near = [number for number in range(agents) if number % hosts < near_hosts]
        yield RunningHub(up, directory), near, [number for number in range(agents) if number not in near]


async def until_joined(hub: RunningHub, count: int) -> None:
    """Wait until so many have said that they want a version."""
    async with (
        asyncio.timeout(WAIT_S),
        await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as bus,
        contextlib.aclosing(JobLog(bus, JOB).follow(1, commands_of(JOB))) as entries,
    ):
        async for entry in entries:
            count -= ".cmd.want." in entry.subject
            if not count:
                return


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "hosts", [pytest.param(2, id="local"), pytest.param(2 + REPLICAS, id="ucxx", marks=UCXX.marks)]
)
@pytest.mark.parametrize(("cut", "how", "shards"), [(rows, whole, 1), (rows, columns, 2), (columns, whole, 1)])
async def test_a_site_of_another_layout_takes_each_byte_about_once(
    tmp_path: Path, hosts: int, cut: Sharding, how: Sharding, shards: int
) -> None:
    """Each replica has read from its mates, and together they have not read much more than once from the trainer.

    What is cut by columns comes in boxes that lie strided in the readers.
    """
    async with two_sites(tmp_path, hosts) as (hub, near, far), hub.connected(JOB, len(hub.file.agents)) as hubs:
        trainer = await registered([hubs[number] for number in near[:2]], "trainer", cut, 2, model(0))
        readers = [await registered([hubs[far[n]]], f"engine-{n}", how, shards, model(0)) for n in range(REPLICAS)]
        waiting = [
            asyncio.create_task(shard.update(wait_s=WAIT_S, timeout_s=WAIT_S)) for each in readers for shard in each
        ]
        await until_joined(hub, len(waiting))
        assert await published(trainer, cut, model(1)) == 1
        assert set(await asyncio.gather(*waiting)) == {1}
        for each in readers:
            assert_holds(each, how, model(1))
        crossed = [sum(_bytes_of(shard, "trainer") for shard in each) for each in readers]
        nbytes = sum(tensor.nbytes for tensor in model(1).values())
        assert sum(crossed) < 1.5 * nbytes, f"{crossed} of {nbytes} bytes"
        for each in readers:
            assert all(_bytes_of(shard, "engine") > 0 for shard in each)


def _bytes_of(shard: tensorhub.AsyncShard, replica: str) -> int:
    """Return how much a shard has read from replicas whose names begin so."""
    assert shard.last_read is not None
    return sum(source.nbytes for source in shard.last_read.sources if source.replica.startswith(replica))
