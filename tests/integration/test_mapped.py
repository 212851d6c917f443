"""`install="mapped"` against a real hub: memory that a reader maps is never overwritten, whatever is killed."""

import asyncio
import signal
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.tensors import assert_same_bytes, full, shown, write
from torch import nn

import tensorhub
from tensorhub import AgentUnavailable, DrainTimeout, NotFilled, ReplicaConflict, VersionUnavailable
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT_S = 0.3
STAGED: Final[tuple[Install, Install]] = ("staged", "mapped")
"""How trainer and engine are installed, where the trainer has two memories."""

MAPPED = {"install": "mapped"}


async def engine_at(hub: tensorhub.AsyncHub, replica: str = "engine") -> tensorhub.AsyncShard:
    return await hub.register("m", full(0), replica=replica, install="mapped")


async def assert_not_drained(shard: tensorhub.AsyncShard, timeout_s: float = SHORT_S) -> None:
    with pytest.raises(DrainTimeout, match="still mapped"):
        await shard.unpublish(timeout_s=timeout_s)


def mapped_segments() -> list[str]:
    """Return the segments that this process maps and can't write."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[5] for line in maps if " r--s " in line and ".seg" in line]


async def test_the_published_memory_is_mapped_and_its_bytes_are_the_publishers(hub: RunningHub) -> None:
    given = {"a": torch.randn(1000, 33), "b": torch.randn(7).bfloat16(), "e": torch.ones(0), "s": torch.tensor(3)}
    async with hub.pair(given, installs=STAGED) as it:
        tensors = dict(it.engine.tensors)
        await it.trainer.publish(4)
        assert await it.engine.replicate() == it.engine.version == 4
        assert_same_bytes(it.engine.tensors, given)
        assert all(it.engine.tensors[name] is tensor for name, tensor in tensors.items())
        assert len(mapped_segments()) == 1
        report = it.engine.last_read
        assert report is not None
        assert [source.why for source in report.sources] == ["mapped from the same host (0 readers): nothing is copied"]
        await it.engine.release()
        assert_same_bytes(tensors, given)


async def test_a_trainer_with_two_memories_publishes_on_while_the_version_before_is_mapped(hub: RunningHub) -> None:
    async with hub.pair(full(1), installs=STAGED) as it:
        weight, addresses = it.trainer.tensors["w"], set()
        await it.trainer.publish(1)
        for version in range(1, 6):
            assert await it.engine.update(wait_s=WAIT_S) == version
            addresses.add(weight.data_ptr())
            async with it.trainer.overwriting(publish=True, timeout_s=WAIT_S) as mine:
                assert mine["w"] is weight
                assert shown(it.trainer) == {float(version)}
                weight.fill_(version + 1)
                assert shown(it.engine) == {float(version)}
            assert shown(it.engine) == {float(version)}
        assert len(addresses) == 2
        await it.engine.release()


async def test_a_module_is_mapped_beneath_its_parameters(hub: RunningHub) -> None:
    model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
    weight, probe = engine_model.weight, torch.ones(1, 8)
    async with hub.pair(model, engine_model, installs=STAGED) as it:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            await it.trainer.publish()
            await it.engine.update()
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            model(probe).sum().backward()
            before = engine_model(probe).clone()
            async with it.trainer.overwriting():
                optimizer.step()
            assert torch.equal(engine_model(probe), before)
            assert not torch.equal(engine_model(probe), model(probe))
        await it.engine.release()


async def test_one_memory_is_drained_and_the_call_may_be_made_again(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer, engine = await here.register("m", full(1), replica="trainer"), await engine_at(there)
        await trainer.publish(1)
        await engine.replicate()
        for _ in range(2):
            await assert_not_drained(trainer)
        with pytest.raises(ReplicaConflict, match="draining"):
            await trainer.publish(2)
        assert shown(engine) == {1.0}
        await engine.release()
        # The tensors are valid while they are referenced, and so is what they show.
        await assert_not_drained(trainer)
        del engine
        async with trainer.overwriting(timeout_s=WAIT_S):
            write(trainer, full(2))
        assert await trainer.publish() == 2


async def test_a_kept_view_of_an_older_version_keeps_its_memory(hub: RunningHub) -> None:
    """The trainer has two memories: a view of version 1 stops it only when both are mapped."""
    async with hub.pair(full(1), installs=STAGED) as it:
        await it.trainer.publish(1)
        await it.engine.replicate()
        kept = it.engine.tensors["w"].view(-1)
        assert await it.step(full(2)) == 2
        assert await it.engine.update() == 2
        await assert_not_drained(it.trainer)
        assert kept.unique().tolist() == [1]
        assert shown(it.engine) == {2.0}
        del kept
        assert await it.step(full(3)) == 3
        assert shown(it.engine) == {2.0}
        assert await it.engine.update() == 3
        await it.engine.release()


# ----------------------------------------------------------------------------------------------- several processes


async def test_a_write_through_a_mapped_tensor_kills_the_writer_and_changes_nothing(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _), hub.worker(job, 1) as reader:
        trainer = await here.register("m", full(5), replica="trainer")
        await trainer.publish(1)
        await reader.ask("register_full", "m", "engine", 1000, 0.0, MAPPED)
        assert await reader.ask("replicate", "engine") == 1
        assert await reader.ask("shown", "engine") == [5.0]
        reader.say('["fill", "engine", 9.0]')
        assert await reader.code() == -signal.SIGSEGV
        assert shown(trainer) == {5.0}
        await trainer.unpublish(timeout_s=WAIT_S)


async def test_a_reader_that_is_killed_lets_go_and_its_successor_maps_anew(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        async with hub.worker(job, 1) as reader:
            await reader.ask("register_full", "m", "engine", 1000, 0.0, MAPPED)
            assert await reader.ask("replicate", "engine") == 1
            await assert_not_drained(trainer)
        async with trainer.overwriting(timeout_s=WAIT_S):
            write(trainer, full(2))
        await trainer.publish(2)
        engine = await engine_at(there)
        assert engine.version is None
        assert await engine.update() == 2
        assert shown(engine) == {2.0}
        await engine.release()
        # What it still shows is the trainer's one memory, whose release would wait for that.
        del engine


async def test_a_child_that_was_forked_keeps_what_it_shows(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _), hub.worker(job, 1) as reader:
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        await reader.ask("register_full", "m", "engine", 1000, 0.0, MAPPED)
        await reader.ask("replicate", "engine")
        await reader.ask("fork")
        assert await reader.code() == 0, "the parent has ended"
        await assert_not_drained(trainer)
        assert await reader.ask("shown", "engine") == [1.0]
        reader.end_orders()
        await trainer.unpublish(timeout_s=WAIT_S)


@pytest.mark.long
@pytest.mark.parametrize("install", ["in-place", pytest.param("staged", marks=pytest.mark.slow)])
async def test_agents_that_are_killed_overwrite_nothing_that_is_mapped(hub: RunningHub, install: Install) -> None:
    """The holder's comes back knowing from the lock alone that its memory is mapped, and the reader's is not needed."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer", install=install)
        engine = await engine_at(there)
        await trainer.publish(1)
        await engine.replicate()
        if install == "in-place":
            await assert_not_drained(trainer)
        for agent in ("agent-0", "agent-1"):
            hub.kill(agent)
        if install == "in-place":
            with pytest.raises((DrainTimeout, AgentUnavailable)):
                await trainer.unpublish(timeout_s=3)
        else:
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                write(trainer, full(2))
        assert (engine.version, shown(engine)) == (1, {1.0})
        if install == "staged":
            assert await engine.replicate(2, timeout_s=WAIT_S) == 2
            assert shown(engine) == {2.0}
        await engine.release()
        del engine
        async with trainer.overwriting(timeout_s=WAIT_S):
            write(trainer, full(3))


async def test_a_trainer_that_is_killed_leaves_what_is_mapped_and_its_successor_writes_elsewhere(
    hub: RunningHub,
) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        async with hub.worker(job) as first:
            await first.ask("register_full", "m", "trainer", 1000, 1.0, {"install": "staged"})
            assert await first.ask("publish", "trainer", 1) == 1
            engine = await engine_at(there)
            await engine.replicate()
            first.say('["die_overwriting", "trainer", 2.0]')
            assert await first.code() == -signal.SIGKILL
        assert shown(engine) == {1.0}
        trainer = await here.register("m", full(3), replica="trainer", install="staged")
        assert await trainer.publish() == 2
        assert shown(engine) == {1.0}
        assert await engine.update() == 2
        assert shown(engine) == {3.0}
        await engine.release()


# ------------------------------------------------------------------------------------------------ several replicas


async def test_all_shards_of_a_mapped_replica_swap_together(hub: RunningHub) -> None:
    async with hub.connected() as hubs:
        trainers, engines = [
            [await at.register("m", full(value), replica=replica, shard=n, shards=2, install=install) for n in range(2)]
            for at, replica, value, install in zip(hubs, ("trainer", "engine"), (1, 0), STAGED, strict=True)
        ]
        await asyncio.gather(*(trainer.publish(1) for trainer in trainers))
        assert await asyncio.gather(*(engine.replicate() for engine in engines)) == [1, 1]
        await asyncio.gather(*(trainer.unpublish(timeout_s=WAIT_S) for trainer in trainers))
        for trainer in trainers:
            write(trainer, full(2))
        await asyncio.gather(*(trainer.publish() for trainer in trainers))
        assert [shown(engine) for engine in engines] == [{1.0}, {1.0}]
        assert await asyncio.gather(*(engine.update() for engine in engines)) == [2, 2]
        assert [shown(engine) for engine in engines] == [{2.0}, {2.0}]
        await asyncio.gather(*(engine.release() for engine in engines))


async def test_a_mapped_replica_is_no_holder_and_no_source(hub: RunningHub) -> None:
    async with hub.pair(full(1), installs=STAGED) as it:
        await it.trainer.publish(1)
        await it.engine.replicate()
        assert [(each.replica, each.mapped, each.version) for each in await it.here.replicas("m")] == [
            ("trainer", False, 1),
            ("engine", True, 1),
        ]
        assert (await it.here.versions("m"))[0].holders == ("trainer",)
        await it.trainer.unpublish(timeout_s=WAIT_S)
        assert await it.versions() == {1: "unavailable"}
        other = await it.there.register("m", full(0), replica="other")
        with pytest.raises(VersionUnavailable):
            await other.replicate(1, timeout_s=2)
        with pytest.raises(NotFilled, match="publish there"):
            await it.engine.publish(2)
        for call in (it.engine.unpublish, lambda: it.engine.overwriting().__aenter__()):
            with pytest.raises(ReplicaConflict, match="read-only"):
                await call()
        assert shown(it.engine) == {1.0}
        await it.engine.release()


@pytest.mark.parametrize("install", ["staged", pytest.param("in-place", marks=pytest.mark.long)])
async def test_a_holder_that_is_mapped_itself_reads_on_once_that_is_let_go(hub: RunningHub, install: Install) -> None:
    """A staged one fills its other memory beside, and a second read waits for the first. Calling again works."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer", install="staged")
        holder = await there.register("m", full(0), replica="holder", install=install)
        await trainer.publish(1)
        await holder.replicate()
        await trainer.unpublish()
        reader = await engine_at(there)
        assert await reader.replicate(1) == 1
        held = 1
        if install == "staged":
            async with trainer.overwriting(publish=True):
                write(trainer, full(2))
            assert await holder.update() == 2
            held = 2
        async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
            write(trainer, full(held + 1))
        for _ in range(2):
            with pytest.raises(DrainTimeout, match="still mapped"):
                await holder.update(timeout_s=1)
            assert (shown(holder), shown(reader)) == ({float(held)}, {1.0})
        assert await reader.update() == held + 1
        assert await holder.update(timeout_s=WAIT_S) == held + 1
        assert shown(holder) == {held + 1.0}
        await reader.release()
        del reader


@pytest.mark.long
async def test_where_no_holder_is_on_the_host_the_error_names_those_elsewhere(tmp_path: Path) -> None:
    async with running_hub(tmp_path / "hub", hosts=2, TENSORHUB_UCXX="off") as two_hosts, two_hosts.connected() as hubs:
        trainer, engine = await hubs[0].register("m", full(1), replica="trainer"), await engine_at(hubs[1])
        await trainer.publish(1)
        with pytest.raises(VersionUnavailable, match="install='staged'") as refused:
            await engine.replicate(timeout_s=WAIT_S)
        assert "trainer/0 on" in str(refused.value)
