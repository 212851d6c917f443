"""A worker that comes back with values of its own, against a real hub: nothing of the two is dropped silently."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import fork_program

import tensorhub
from tensorhub import AsyncHub, AsyncShard, DrainTimeout, ReplicaConflict

pytestmark = pytest.mark.asyncio(loop_scope="session")

README = """
import sys, tensorhub, torch
hub = tensorhub.connect(sys.argv[1])
hub.register("policy", {"w": torch.full((4, 4), float(sys.argv[2]))}, replica="trainer").publish(version=1)
engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
print(engine.replicate("latest"), engine.tensors["w"])
"""


@pytest.fixture
async def job(hub: RunningHub) -> AsyncIterator[str]:
    """A job whose shards are released at the end, whoever left them."""
    name = new_job()
    yield name
    async with hub.connected(name, agents=1) as (here,):
        await here.delete_job()


async def test_the_readmes_lines_run_twice_with_other_values_tell(hub: RunningHub, job: str) -> None:
    """The second run must not print the first one's weights as if they were its own."""
    code, out, err = await asyncio.to_thread(fork_program, hub, README, job, "1")
    assert (code, out.split()[0]) == (0, "1"), err
    code, out, err = await asyncio.to_thread(fork_program, hub, README, job, "2")
    assert (code, out) == (1, "")
    assert err.strip().endswith(
        "tensorhub.ReplicaConflict: shard 0 of policy/trainer was found with version 1, and register was given other "
        "values for 'w': register it with resume='memory' to go on from version 1, or with resume='values' to replace "
        "it by the given values"
    )
    code, out, err = await asyncio.to_thread(fork_program, hub, README, job, "1")
    assert code == 0, err


async def put(hub: RunningHub, job: str, value: float, **options: object) -> tuple[AsyncHub, AsyncShard]:
    connected = await tensorhub.connect_async(job, agent=hub.file.agents[0].socket)
    tensors = {"w": torch.full((1000,), value)}
    return connected, await connected.register("policy", tensors, replica="trainer", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_restarted_trainers_checkpoint_becomes_the_next_version(
    hub: RunningHub, job: str, install: str
) -> None:
    first, shard = await put(hub, job, 1.0, install=install)
    await shard.publish()
    await first.close(release=False)
    second, shard = await put(hub, job, 2.0, install=install, resume="values")
    assert (shard.version, shard.tensors["w"].unique().tolist()) == (None, [2.0])
    assert await shard.publish() == 2
    async with hub.connected(job) as (_, there):
        engine = await there.register("policy", {"w": torch.zeros(1000)}, replica="rollout")
        assert await engine.replicate() == 2
        assert engine.tensors["w"].unique().tolist() == [2.0]
    await second.close()


async def test_values_wait_for_whoever_maps_the_memory(hub: RunningHub, job: str) -> None:
    """What a mapped reader shows is not overwritten; the same process may try again, and then waits for it anew."""
    first, shard = await put(hub, job, 1.0)
    await shard.publish()
    async with hub.connected(job, agents=1) as (here,), hub.connected(job, agents=1) as (trainers,):
        reader = await here.register("policy", {"w": torch.zeros(1000)}, replica="rollout", install="mapped")
        await reader.replicate()
        await first.close(release=False)
        for _ in range(2):
            with pytest.raises(DrainTimeout):
                await trainers.register(
                    "policy", {"w": torch.full((1000,), 2.0)}, replica="trainer", resume="values", timeout_s=0.5
                )
            assert reader.tensors["w"].unique().tolist() == [1.0]
        await reader.release()
        reader.tensors.clear()
        shard = await trainers.register("policy", {"w": torch.full((1000,), 2.0)}, replica="trainer", resume="values")
        assert await shard.publish() == 2


async def test_values_of_a_staged_shard_go_beside_what_is_mapped(hub: RunningHub, job: str) -> None:
    """It has other memory to go on in, so nobody is waited for."""
    first, shard = await put(hub, job, 1.0, install="staged")
    await shard.publish()
    async with hub.connected(job, agents=1) as (here,):
        reader = await here.register("policy", {"w": torch.zeros(1000)}, replica="rollout", install="mapped")
        await reader.replicate()
        await first.close(release=False)
        second, shard = await put(hub, job, 2.0, install="staged", resume="values")
        assert await shard.publish() == 2
        assert reader.tensors["w"].unique().tolist() == [1.0]
        await reader.update()
        assert reader.tensors["w"].unique().tolist() == [2.0]
        await reader.release()
        reader.tensors.clear()
        await second.close()


async def test_an_engine_that_comes_back_reads_on(hub: RunningHub, job: str) -> None:
    """Its own values are whatever it was built with; nobody has to choose before it reads."""
    first, shard = await put(hub, job, 1.0)
    await shard.publish()
    for _ in range(2):
        async with hub.connected(job) as (_, there):
            engine = await there.register("policy", {"w": torch.rand(1000)}, replica="rollout")
            if engine.version is not None:
                with pytest.raises(ReplicaConflict, match="resume='memory'"):
                    await engine.unpublish()
            assert await engine.replicate() == 1
            assert engine.tensors["w"].unique().tolist() == [1.0]
            await there.close(release=False)
    await first.close()


async def test_an_engine_that_lacks_a_tensor_is_told_so(
    hub: RunningHub, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may want no more; but a name that was forgotten must not go unnoticed."""
    given = {name: torch.ones(4) for name in "abcdefghijkl"}
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", given, replica="trainer")
        engine = await there.register("policy", {"a": torch.zeros(4)}, replica="rollout")
        whole = await there.register("policy", dict(given), replica="whole")
        for _ in range(2):
            await trainer.publish()
            await asyncio.gather(engine.replicate(), whole.replicate())
            assert engine.last_read is not None
            assert (engine.last_read.unread, engine.last_read.unread_count) == (tuple("bcdefghi"), 11)
            assert (engine.last_read.unregistered, engine.last_read.unregistered_count) == (tuple("bcdefghi"), 11)
            assert whole.last_read is not None
            assert whole.last_read.unread_count == 0
            await trainer.unpublish()
    (told,) = lines_of_unregistered(caplog)
    assert "'b', 'c', 'd' and 8 more" in told


async def test_shards_of_one_replica_are_told_what_all_of_them_lack(
    hub: RunningHub, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each leaves out what the other one has, as pipeline stages do; that is no mistake, and `head` is."""
    given = {name: torch.ones(4) for name in ("a", "b", "head")}
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", given, replica="trainer")
        stages = {
            replica: [
                await client.register(
                    "policy", {name: torch.zeros(4) for name in names}, replica=replica, shard=index, shards=2
                )
                for index, (client, names) in enumerate([(there, first), (here, second)])
            ]
            # No two have a layout in common, or a shard could take its pieces from the other replica, and not be told.
            for replica, first, second in [("whole", ["a", "b"], ["head"]), ("holed", ["a"], ["b"])]
        }
        for _ in range(2):
            await trainer.publish()
            await asyncio.gather(*(shard.replicate() for shards in stages.values() for shard in shards))
            reads = {replica: [shard.last_read for shard in shards] for replica, shards in stages.items()}
            assert [read.unregistered for read in reads["whole"] if read] == [(), ()]
            found = [(read.unregistered, read.unregistered_count) for read in reads["holed"] if read]
            assert found == [(("head",), 1), ((), 0)]
            assert [read.unread for read in reads["holed"] if read] == [("b", "head"), ("a", "head")]
            await trainer.unpublish()
    (told,) = lines_of_unregistered(caplog)
    assert "'head'" in told
    assert "shard 0 of policy/holed" in told


def lines_of_unregistered(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = (str(record.msg) for record in caplog.records)
    return [line for line in lines if "that no shard of the replica registered" in line]
