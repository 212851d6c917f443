"""`install="mapped"` against a real hub: memory that a reader maps is never overwritten, whoever is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.integration.hubs import RunningHub, assert_same_bytes, new_job, running_hub
from tests.integration.programs import fork_program, started
from torch import nn

import tensorhub
from tensorhub_common.errors import DrainTimeout, NotFilled, ReplicaConflict, VersionUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 60.0
SHORT_S = 0.3

READER = """
import sys, torch, tensorhub
hub = tensorhub.connect(sys.argv[1], agent=sys.argv[2])
engine = hub.register("policy", {"w": torch.zeros(100_000)}, replica="rollout", install="mapped")
print(engine.replicate(), engine.tensors["w"].unique().tolist(), flush=True)
"""


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), float(value))}


def values(shard: tensorhub.AsyncShard) -> set[float]:
    return {value for tensor in shard.tensors.values() for value in tensor.float().unique().tolist()}


def lent_segments() -> list[str]:
    """Return the segments that this process maps and can't write."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[5] for line in maps if " r--s " in line and ".seg" in line]


async def test_the_published_memory_is_mapped_and_its_bytes_are_the_publishers(hub: RunningHub) -> None:
    given = {"a": torch.randn(1000, 33), "b": torch.randn(7).bfloat16(), "e": torch.ones(0), "s": torch.tensor(3)}
    blank = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", given, replica="trainer", install="staged")
        engine = await there.register("policy", blank, replica="rollout", install="mapped")
        tensors = dict(engine.tensors)
        await trainer.publish(4)
        assert await engine.replicate() == engine.version == 4
        assert_same_bytes(engine.tensors, given)
        assert all(engine.tensors[name] is tensor for name, tensor in tensors.items())
        assert len(lent_segments()) == 1
        report = engine.last_read
        assert report is not None
        assert [source.why for source in report.sources] == ["mapped from the same host (0 readers): nothing is copied"]
        await engine.release()
        assert_same_bytes(tensors, given)


async def test_a_trainer_with_two_memories_publishes_on_while_the_version_before_is_mapped(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer", install="staged")
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        weight = trainer.tensors["w"]
        addresses = set()
        await trainer.publish(1)
        for version in range(1, 6):
            assert await engine.update(wait_s=WAIT_S) == version
            addresses.add(weight.data_ptr())
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
                assert mine["w"] is weight
                assert weight.unique().tolist() == [version]
                weight.fill_(version + 1)
                assert values(engine) == {float(version)}
            assert values(engine) == {float(version)}
        assert len(addresses) == 2
        await engine.release()


async def test_a_module_is_mapped_beneath_its_parameters(hub: RunningHub) -> None:
    model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
    weight = engine_model.weight
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", model, replica="trainer", install="staged")
        engine = await there.register("policy", engine_model, replica="rollout", install="mapped")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        probe = torch.ones(1, 8)
        for _ in range(4):
            await trainer.publish()
            await engine.update()
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            model(probe).sum().backward()
            shown = engine_model(probe).clone()
            async with trainer.overwriting():
                optimizer.step()
            assert torch.equal(engine_model(probe), shown)
            assert not torch.equal(engine_model(probe), model(probe))
        await engine.release()


async def test_one_memory_is_drained_and_the_call_may_be_made_again(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        await trainer.publish(1)
        await engine.replicate()
        for _ in range(2):
            with pytest.raises(DrainTimeout, match="still mapped"):
                await trainer.unpublish(timeout_s=SHORT_S)
        with pytest.raises(ReplicaConflict, match="draining"):
            await trainer.publish(2)
        assert values(engine) == {1.0}
        await engine.release()
        with pytest.raises(DrainTimeout):
            # The tensors are valid while they are referenced, and so is what they show.
            await trainer.unpublish(timeout_s=SHORT_S)
        del engine
        await trainer.unpublish(timeout_s=WAIT_S)
        trainer.tensors["w"].fill_(2)
        assert await trainer.publish() == 2


async def test_a_kept_view_of_an_older_version_keeps_its_memory(hub: RunningHub) -> None:
    """The trainer has two memories: a view of version 1 stops it only when both are mapped."""
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer", install="staged")
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        await trainer.publish(1)
        await engine.replicate()
        kept = engine.tensors["w"].view(-1)
        async with trainer.overwriting(publish=True) as mine:
            mine["w"].fill_(2)
        assert await engine.update() == 2
        with pytest.raises(DrainTimeout):
            await trainer.unpublish(timeout_s=SHORT_S)
        assert kept.unique().tolist() == [1]
        assert values(engine) == {2.0}
        del kept
        async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
            mine["w"].fill_(3)
        assert values(engine) == {2.0}
        assert await engine.update() == 3
        await engine.release()


async def test_a_write_through_a_mapped_tensor_kills_the_writer_and_changes_nothing(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("policy", weights(5), replica="trainer")
        await trainer.publish(1)
        program = READER + 'engine.tensors["w"][7] = 9.0\nprint("written", flush=True)\n'
        code, said, err = await asyncio.to_thread(fork_program, hub, program, job, hub.file.agents[1].id)
        assert (code, said) == (-signal.SIGSEGV, "1 [5.0]\n"), err
        assert values(trainer) == {5.0}
        await trainer.unpublish(timeout_s=WAIT_S)


async def test_a_reader_that_is_killed_lets_go_and_its_successor_maps_anew(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        await trainer.publish(1)
        async with started(hub, READER + "sys.stdin.read()", job, there.agent) as reader:
            assert await reader.line() == "1 [1.0]"
            with pytest.raises(DrainTimeout):
                await trainer.unpublish(timeout_s=SHORT_S)
        await trainer.unpublish(timeout_s=WAIT_S)
        trainer.tensors["w"].fill_(2)
        await trainer.publish(2)
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        assert engine.version is None
        assert await engine.update() == 2
        assert values(engine) == {2.0}
        await engine.release()
        # What it still shows is the trainer's one memory, whose release would wait for that.
        del engine


async def test_a_child_that_was_forked_keeps_what_it_shows(hub: RunningHub) -> None:
    job = new_job()
    fork = """
import os
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.readline()
    print("child shows", set(engine.tensors["w"].tolist()), flush=True)
    os._exit(0)
os._exit(0)
"""
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        await trainer.publish(1)
        async with started(hub, READER + fork, job, there.agent) as reader:
            assert [await reader.line(), await reader.line()] == ["1 [1.0]", "child"]
            assert await reader.code() == 0
            with pytest.raises(DrainTimeout):
                await trainer.unpublish(timeout_s=SHORT_S)
            reader.go_on()
            assert await reader.line() == "child shows {1.0}"
            await trainer.unpublish(timeout_s=WAIT_S)


@pytest.mark.long
@pytest.mark.parametrize("install", ["in-place", pytest.param("staged", marks=pytest.mark.slow)])
async def test_agents_that_are_killed_overwrite_nothing_that_is_mapped(hub: RunningHub, install: str) -> None:
    """The holder's comes back knowing from the lock alone that its memory is mapped, and the reader's is not needed."""
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer", install=install)
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        await trainer.publish(1)
        await engine.replicate()
        if install == "in-place":
            with pytest.raises(DrainTimeout):
                await trainer.unpublish(timeout_s=SHORT_S)
        for connection in (here, there):
            os.kill(next(agent.pid for agent in hub.file.agents if agent.id == connection.agent), signal.SIGKILL)
        if install == "in-place":
            with pytest.raises((DrainTimeout, tensorhub.AgentUnavailable)):
                await trainer.unpublish(timeout_s=3)
            assert values(engine) == {1.0}
            assert engine.version == 1
            await engine.release()
            del engine
            async with trainer.overwriting(timeout_s=WAIT_S) as mine:
                mine["w"].fill_(2)
            return
        async with trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
            mine["w"].fill_(2)
        assert values(engine) == {1.0}
        assert engine.version == 1
        assert await engine.replicate(2, timeout_s=WAIT_S) == 2
        assert values(engine) == {2.0}
        await engine.release()


async def test_a_trainer_that_is_killed_leaves_what_is_mapped_and_its_successor_writes_elsewhere(
    hub: RunningHub,
) -> None:
    job = new_job()
    program = """
import os, sys, torch, tensorhub
hub = tensorhub.connect(sys.argv[1], agent=sys.argv[2])
trainer = hub.register("policy", {"w": torch.full((100_000,), 1.0)}, replica="trainer", install="staged")
print(trainer.publish(1), flush=True)
sys.stdin.readline()
with trainer.overwriting() as mine:
    mine["w"].fill_(2)
    os.kill(os.getpid(), 9)
"""
    async with hub.connected(job) as (here, there):
        async with started(hub, program, job, here.agent) as first:
            assert await first.line() == "1"
            engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
            await engine.replicate()
            first.go_on()
            assert await first.code() == -signal.SIGKILL
        assert values(engine) == {1.0}
        trainer = await here.register("policy", weights(3), replica="trainer", install="staged")
        assert await trainer.publish() == 2
        assert values(engine) == {1.0}
        assert await engine.update() == 2
        assert values(engine) == {3.0}
        await engine.release()


async def test_all_shards_of_a_mapped_replica_swap_together(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainers = [
            await here.register("policy", weights(1), replica="trainer", shard=n, shards=2, install="staged")
            for n in range(2)
        ]
        engines = [
            await there.register("policy", weights(0), replica="rollout", shard=n, shards=2, install="mapped")
            for n in range(2)
        ]
        await asyncio.gather(*(trainer.publish(1) for trainer in trainers))
        assert await asyncio.gather(*(engine.replicate() for engine in engines)) == [1, 1]
        await asyncio.gather(*(trainer.unpublish(timeout_s=WAIT_S) for trainer in trainers))
        for trainer in trainers:
            trainer.tensors["w"].fill_(2)
        await asyncio.gather(*(trainer.publish() for trainer in trainers))
        assert [values(engine) for engine in engines] == [{1.0}, {1.0}]
        assert await asyncio.gather(*(engine.update() for engine in engines)) == [2, 2]
        assert [values(engine) for engine in engines] == [{2.0}, {2.0}]
        for engine in engines:
            await engine.release()


async def test_a_mapped_replica_is_no_holder_and_nobodys_source(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer", install="staged")
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        await trainer.publish(1)
        await engine.replicate()
        assert [(each.replica, each.mapped, each.version) for each in await here.replicas("policy")] == [
            ("trainer", False, 1),
            ("rollout", True, 1),
        ]
        assert (await here.versions("policy"))[0].holders == ("trainer",)
        await trainer.unpublish(timeout_s=WAIT_S)
        assert (await here.versions("policy"))[0].state == "unavailable"
        other = await there.register("policy", weights(0), replica="other")
        with pytest.raises(VersionUnavailable):
            await other.replicate(1, timeout_s=2)
        with pytest.raises(NotFilled, match="publish there"):
            await engine.publish(2)
        for way in (engine.unpublish, lambda: engine.overwriting().__aenter__()):
            with pytest.raises(ReplicaConflict, match="read-only"):
                await way()
        assert values(engine) == {1.0}
        await engine.release()


async def test_a_holder_that_maps_nothing_itself_may_be_mapped_and_is_then_filled_beside(hub: RunningHub) -> None:
    """A staged engine's own next read waits for whoever maps its other memory."""
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer")
        holder = await there.register("policy", weights(0), replica="holder", install="staged")
        await trainer.publish(1)
        await holder.replicate()
        await trainer.unpublish()
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        assert await engine.replicate(1) == 1
        trainer.tensors["w"].fill_(2)
        await trainer.publish(2)
        assert await holder.update() == 2
        assert (values(holder), values(engine)) == ({2.0}, {1.0})
        await trainer.unpublish(timeout_s=WAIT_S)
        trainer.tensors["w"].fill_(3)
        await trainer.publish(3)
        with pytest.raises(DrainTimeout, match="still mapped"):
            await holder.replicate(3, timeout_s=1)
        assert (holder.version, values(holder), values(engine)) == (2, {2.0}, {1.0})
        assert await engine.update() == 3
        assert await holder.replicate(3, timeout_s=WAIT_S) == 3
        await engine.release()
        # What it still shows is the trainer's one memory, whose release would wait for that.
        del engine


@pytest.mark.long
async def test_an_engine_in_one_memory_that_is_mapped_updates_once_that_is_let_go(hub: RunningHub) -> None:
    """Its update says that a reader maps the memory; calling again works as soon as that reader has let go."""
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(1), replica="trainer", install="staged")
        engine = await there.register("policy", weights(0), replica="engine")
        await trainer.publish(1)
        assert await engine.update() == 1
        await trainer.unpublish()
        reader = await there.register("policy", weights(0), replica="reader", install="mapped")
        assert await reader.replicate(1) == 1
        trainer.tensors["w"].fill_(2)
        await trainer.publish(2)
        for _ in range(2):
            with pytest.raises(DrainTimeout, match="still mapped"):
                await engine.update(timeout_s=1)
            assert (values(engine), values(reader)) == ({1.0}, {1.0})
        assert await reader.update() == 2
        assert await engine.update(timeout_s=WAIT_S) == 2
        assert values(engine) == {2.0}
        await reader.release()
        del reader


@pytest.mark.long
async def test_where_no_holder_stands_on_the_host_that_is_said(tmp_path: Path) -> None:
    async with (
        running_hub(tmp_path / "hub", agents=2, hosts=2, TENSORHUB_UCXX="off") as two_hosts,
        two_hosts.connected() as (here, there),
    ):
        trainer = await here.register("policy", weights(1), replica="trainer")
        engine = await there.register("policy", weights(0), replica="rollout", install="mapped")
        await trainer.publish(1)
        with pytest.raises(VersionUnavailable, match="install='staged'") as refused:
            await engine.replicate(timeout_s=WAIT_S)
        assert "trainer/0 on" in str(refused.value)
