"""What is retained, on a hub of real processes: copies have the bytes, and outlive their agent's process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
import torch
from tests.integration.hubs import RunningHub, assert_same_bytes, new_job, running_hub
from tests.integration.transports import UCXX_AND_SLOWLY_LOCAL

import tensorhub
from tensorhub_common.protocol.queries import ReplicaInfo

pytestmark = pytest.mark.asyncio(loop_scope="module")

WITHIN_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=UCXX_AND_SLOWLY_LOCAL)
async def hub(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[RunningHub]:
    room = {"TENSORHUB_CACHE_BYTES": "64MiB"}
    async with running_hub(tmp_path_factory.mktemp("hub"), agents=3, hosts=request.param, **room) as running:
        yield running


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(77, 1003, generator=generator) for name in ("a", "b")}


def write(shard: tensorhub.AsyncShard, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in shard.tensors.items():
        tensor.copy_(values[name])


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds, within a bound."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.05)


async def cache_of(hub: tensorhub.AsyncHub, model: str, version: int) -> ReplicaInfo | None:
    """Return the cache replica that holds the version, or None."""
    found = [each for each in await hub.replicas(model) if each.replica.startswith("_cache-")]
    return next((each for each in found if each.version == version), None)


async def incarnation_of(hub: tensorhub.AsyncHub, agent: str) -> int:
    """Return the incarnation of an agent that the log believes."""
    return next(each.incarnation for each in (await hub.registry.status()).agents if each.agent == agent)


async def test_a_trainer_overwrites_once_a_copy_stands_and_the_copy_has_its_bytes(hub: RunningHub) -> None:
    """Nobody else held version 1; a reader gets its bytes all the same, from the copy."""
    async with hub.connected(agents=3) as (here, there, _):
        trainer = await here.register("m", weights(1), replica="trainer")
        await here.retain("m", last=2)
        await trainer.publish(1)
        await trainer.unpublish()
        write(trainer, weights(2))
        await trainer.publish(2)
        reader = await there.register("m", weights(99), replica="reader")
        assert await reader.replicate(1) == 1
        assert_same_bytes(reader.tensors, weights(1))
        assert await reader.update() == 2
        assert_same_bytes(reader.tensors, weights(2))
        kept = [version.version for version in await here.versions("m") if version.retained]
        assert kept == [1, 2]
        await here.retain("m", last=0)


@pytest.mark.long
async def test_a_copy_outlives_the_process_of_its_agent(hub: RunningHub) -> None:
    """The caching agent is killed by SIGKILL when its copy is the only one: it is found again and serves."""
    job = new_job()
    async with hub.connected(job, agents=3) as hubs:
        trainer = await hubs[0].register("m", weights(1), replica="trainer")
        await hubs[0].retain("m", last=1)
        await trainer.publish(1)
        await trainer.unpublish()
        write(trainer, weights(7))
        copy = await cache_of(hubs[0], "m", 1)
        assert copy is not None
        holder = copy.members[0].agent
        victim = next(agent for agent in hub.file.agents if agent.id == holder)
        before = await incarnation_of(hubs[0], holder)
        os.kill(victim.pid, signal.SIGKILL)

        async def is_back() -> bool:
            # Until it has joined again the log goes on believing its old incarnation.
            joined = await incarnation_of(hubs[0], holder) > before
            return joined and await cache_of(hubs[0], "m", 1) is not None

        await until(is_back)
        reading = next(each for each in hubs if each.agent != holder)
        reader = await reading.register("m", weights(99), replica="reader")
        assert await reader.replicate(1) == 1
        assert_same_bytes(reader.tensors, weights(1))
        await reading.retain("m", last=0)


async def test_what_is_retained_no_longer_is_let_go(hub: RunningHub) -> None:
    async with hub.connected(agents=3) as (here, _, _):
        trainer = await here.register("m", weights(1), replica="trainer")
        await here.retain("m", last=1)
        for version in (1, 2):
            await trainer.publish(version)
            await trainer.unpublish()
            write(trainer, weights(version + 1))
        assert await cache_of(here, "m", 1) is None
        assert await cache_of(here, "m", 2) is not None
        await here.pin("m", 2)
        await here.retain("m", last=0)
        assert await cache_of(here, "m", 2) is not None
        await here.unpin("m", 2)

        async def gone() -> bool:
            return not [each for each in await here.replicas("m") if each.replica.startswith("_cache-")]

        await until(gone)
        await trainer.release()
        await here.delete("m")
        assert await here.versions("m") == []


async def test_without_room_the_shard_stays_published(hub: RunningHub) -> None:
    """The model is larger than what any agent takes in."""
    large = {"w": torch.ones(20_000_000)}
    async with hub.connected(agents=3) as (here, _, _):
        trainer = await here.register("m", large, replica="trainer")
        await here.retain("m", last=1)
        await trainer.publish(1)
        with pytest.raises(tensorhub.RetentionFull, match="TENSORHUB_CACHE_BYTES"):
            await trainer.unpublish()
        assert trainer.version == 1
        await here.retain("m", last=0)
        await trainer.unpublish()


@pytest.mark.long
async def test_a_rewound_model_goes_on_above(hub: RunningHub) -> None:
    """Engines are led back to the checkpoint, and the next version is above all that were retired."""
    async with hub.connected(agents=3) as (here, there, third):
        trainer = await here.register("m", weights(8), replica="trainer")
        old = await there.register("m", weights(99), replica="old")
        engine = await third.register("m", weights(99), replica="engine")
        await trainer.publish(8)
        await old.replicate(8)
        await trainer.unpublish()
        write(trainer, weights(9))
        await trainer.publish(9)
        assert await engine.replicate() == 9
        assert await here.rewind("m", to=8) == [9]
        assert await engine.update() == 8
        assert_same_bytes(engine.tensors, weights(8))
        with pytest.raises(tensorhub.VersionUnavailable, match=r"rewind|holder"):
            await engine.replicate(9, timeout_s=5)
        await trainer.unpublish()
        write(trainer, weights(10))
        assert await trainer.publish() == 10
        assert await engine.update() == 10
        assert_same_bytes(engine.tensors, weights(10))
