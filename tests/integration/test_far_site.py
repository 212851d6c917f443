"""Replicas in another site than the trainer bring a part over each and exchange the rest, by real processes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import pytest
import pytest_asyncio
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.shardings import Sharding, assert_holds, columns, model, published, registered, rows, whole
from tests.kit.transports import UCXX

import tensorhub

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
REPLICAS: Final = 3


@dataclass(frozen=True)
class TwoSites:
    """A hub, and which of its agents are near and which far."""

    hub: RunningHub
    near: list[int]
    far: list[int]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(2, id="local", marks=pytest.mark.slow),
        pytest.param(2 + REPLICAS, id="ucxx", marks=UCXX.marks),
    ],
)
async def two_sites(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[TwoSites]:
    """With two hosts all agents that are far share one; else each has a host of its own."""
    hosts = int(request.param)
    near_hosts = 1 if hosts == 2 else 2
    agents = 2 * REPLICAS if hosts == 2 else 2 + REPLICAS
    directory = tmp_path_factory.mktemp("hub")
    async with running_hub(directory, agents, hosts, agent="two-sites", NEAR_HOSTS=str(near_hosts)) as hub:
        near = [number for number in range(agents) if number % hosts < near_hosts]
        yield TwoSites(hub, near, [number for number in range(agents) if number not in near])


@pytest.mark.parametrize(("cut", "how", "shards"), [(rows, whole, 1), (rows, columns, 2), (columns, whole, 1)])
async def test_a_site_of_another_layout_takes_each_byte_about_once(
    two_sites: TwoSites, cut: Sharding, how: Sharding, shards: int
) -> None:
    """Each replica has read from its site peers, and together they have not read much more than once from the trainer.

    What is cut by columns comes in boxes that lie strided in the readers.
    """
    hub, near, far, job = two_sites.hub, two_sites.near, two_sites.far, new_job()
    async with hub.connected(job, len(hub.file.agents)) as hubs:
        trainer = await registered([hubs[number] for number in near[:2]], "trainer", cut, 2, model(0))
        readers = [await registered([hubs[far[n]]], f"engine-{n}", how, shards, model(0)) for n in range(REPLICAS)]
        waiting = [
            asyncio.create_task(shard.update(wait_s=WAIT_S, timeout_s=WAIT_S)) for each in readers for shard in each
        ]
        await hub.until_said(job, "want", len(waiting))
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
