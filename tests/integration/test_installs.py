"""`install="staged"` and `install="mapped"` against a real hub."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import assert_same_bytes, full, shown, write
from tests.kit.waiting import until, until_answer
from torch import nn

import tensorhub
from tensorhub import AgentUnavailable, DrainTimeout, NotFilled, ReplicaConflict, RoundTimeout, VersionUnavailable
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")
SHORT_S = 0.3
STAGED: Final = ("in-place", "staged")
MAPPED: Final = ("staged", "mapped")
"""How trainer and engine are installed; beside a mapped engine the trainer has two memories."""


async def engine_at(hub: tensorhub.AsyncHub, replica: str = "engine") -> tensorhub.AsyncShard:
    return await hub.register("m", full(0), replica=replica, install="mapped")


async def assert_not_drained(shard: tensorhub.AsyncShard, timeout_s: float = SHORT_S) -> None:
    with pytest.raises(DrainTimeout, match="still mapped"):
        await shard.unpublish(timeout_s=timeout_s)


def mapped_segments() -> list[str]:
    """Return the segments that this process maps and can't write."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[5] for line in maps if " r--s " in line and ".seg" in line]


async def overwrite(shard: tensorhub.AsyncShard, value: float, *, publish: bool = True) -> None:
    async with shard.overwriting(publish=publish, timeout_s=WAIT_S):
        write(shard, full(value))


@pytest.mark.long
@pytest.mark.parametrize("installs", [STAGED, MAPPED], ids=lambda installs: installs[1])
async def test_a_module_swaps_beneath_its_parameters(hub: RunningHub, installs: tuple[Install, Install]) -> None:
    model, engine_model = nn.Linear(8, 8), nn.Linear(8, 8)
    weight, probe = engine_model.weight, torch.ones(1, 8)
    async with hub.pair(model, engine_model, installs=installs) as it:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for version in (1, 2, 3, 4):
            await it.trainer.publish()
            assert await it.engine.update() == version
            assert torch.equal(engine_model(probe), model(probe))
            assert engine_model.weight is weight
            model(probe).sum().backward()
            before = engine_model(probe).clone()
            async with it.trainer.overwriting():
                optimizer.step()
            assert torch.equal(engine_model(probe), before)
            assert not torch.equal(engine_model(probe), model(probe))
        await it.engine.release()


@pytest.mark.parametrize("install", MAPPED)
async def test_all_shards_of_a_replica_swap_together_and_a_round_that_fails_leaves_the_old_version(
    hub: RunningHub, install: Install
) -> None:
    async with hub.connected() as hubs:
        trainers, engines = [
            [await at.register("m", full(value), replica=replica, shard=n, shards=2, install=how) for n in range(2)]
            for at, replica, value, how in zip(hubs, ("trainer", "engine"), (1, 0), ("staged", install), strict=True)
        ]
        await asyncio.gather(*(trainer.publish(1) for trainer in trainers))
        assert await asyncio.gather(*(engine.replicate() for engine in engines)) == [1, 1]
        await asyncio.gather(*(trainer.unpublish(timeout_s=WAIT_S) for trainer in trainers))
        for trainer in trainers:
            write(trainer, full(2))
        await asyncio.gather(*(trainer.publish() for trainer in trainers))
        with pytest.raises(RoundTimeout):
            await engines[0].update(wait_s=0.5, timeout_s=1)
        assert [(engine.version, shown(engine)) for engine in engines] == [(1, {1.0})] * 2
        assert await asyncio.gather(*(engine.update() for engine in engines)) == [2, 2]
        assert [shown(engine) for engine in engines] == [{2.0}, {2.0}]
        await asyncio.gather(*(engine.release() for engine in engines))


async def test_staged_tensors_swap_and_stay_the_objects_that_they_are(hub: RunningHub) -> None:
    given = {**full(1), "b": torch.ones(3, dtype=torch.bfloat16), "e": torch.ones(0)}
    async with hub.pair(given, installs=STAGED) as it:
        tensors, addresses = dict(it.engine.tensors), set()
        for version in range(1, 5):
            await it.trainer.publish(version)
            view = it.engine.tensors["w"].view(-1)
            before = view[0].item()
            assert await it.engine.replicate() == it.engine.version == version
            assert shown(it.engine) == {float(version)}
            assert all(it.engine.tensors[name] is tensor for name, tensor in tensors.items())
            assert view.unique().tolist() == [before]
            addresses.add(it.engine.tensors["w"].data_ptr())
            async with it.trainer.overwriting() as mine:
                for tensor in mine.values():
                    tensor.fill_(version + 1)
        assert len(addresses) == 2


async def test_nothing_changes_before_the_swap_and_the_lock_is_held_for_it(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        with tensorhub.connect(job, agent=hub.file.agents[1].socket, nats=hub.file.nats) as sync_hub:
            engine = await asyncio.to_thread(sync_hub.register, "m", full(0), replica="engine", install="staged")
            step = threading.Lock()
            step.acquire()
            reading = asyncio.create_task(asyncio.to_thread(engine.replicate, swap_under=step))
            await until_answer(lambda: here.replicas("m"), lambda found: found[1].version == 1)
            assert engine.tensors["w"].unique().tolist() == [0]
            assert engine.version is None
            step.release()
            assert await reading == 1
            assert engine.tensors["w"].unique().tolist() == [1]
            assert not step.locked()
            await asyncio.to_thread(engine.release)


@pytest.mark.long
async def test_an_agent_that_is_killed_takes_both_segments_back(hub: RunningHub) -> None:
    """Whichever of the two the shard is in: the first after an even number of swaps, the other after an odd one."""
    async with hub.pair(full(1), installs=STAGED) as it:
        await it.trainer.publish(1)
        assert await it.engine.replicate() == 1
        for version in (1, 2, 3):
            hub.kill("agent-1")
            assert shown(it.engine) == {float(version)}
            assert await it.step(full(version + 1)) == version + 1
            # The engine's call waits for its agent; what it has meanwhile is the old version, whole.
            assert await it.engine.replicate(version + 1, timeout_s=WAIT_S) == version + 1
            assert shown(it.engine) == {version + 1.0}


async def test_the_published_memory_is_mapped_and_its_bytes_are_the_publishers(hub: RunningHub) -> None:
    given = {"a": torch.randn(1000, 33), "b": torch.randn(7).bfloat16(), "e": torch.ones(0), "s": torch.tensor(3)}
    async with hub.pair(given, installs=MAPPED) as it:
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


async def test_a_kept_view_of_an_older_version_keeps_its_memory(hub: RunningHub) -> None:
    """The trainer has two memories: a view of version 1 stops it only when both are mapped."""
    async with hub.pair(full(1), installs=MAPPED) as it:
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


@pytest.mark.parametrize(
    "killed", ["", pytest.param("agent-0", marks=pytest.mark.long), pytest.param("agent-1", marks=pytest.mark.long)]
)
async def test_an_engine_lets_go_of_the_only_memory_and_maps_the_next_version(hub: RunningHub, killed: str) -> None:
    """Its publisher waits until then; it asks again where its agent is killed, and the engine's may be."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer")
        engine = await engine_at(there)

        def is_asked_back() -> bool:
            return engine.is_asked_back

        with pytest.raises(ReplicaConflict, match="only a shard with install='mapped'"):
            trainer.let_go()
        await trainer.publish(1)
        assert await engine.replicate() == 1
        assert not is_asked_back()
        await assert_not_drained(trainer)
        assert is_asked_back()
        if killed:
            hub.kill(killed)
        overwriting = asyncio.create_task(overwrite(trainer, 2))
        await until(is_asked_back, "the publisher waits")
        assert shown(engine) == {1.0}
        engine.let_go()
        assert (engine.version, shown(engine), is_asked_back()) == (None, {0.0}, False)
        await overwriting
        assert await engine.replicate(timeout_s=WAIT_S) == engine.version == 2
        assert (shown(engine), is_asked_back()) == ({2.0}, False)
        engine.let_go()
        assert await engine.replicate(timeout_s=WAIT_S) == 2, "it may come back to what is published still"
        assert shown(engine) == {2.0}
        engine.let_go()
        await engine.release()


async def test_an_engine_is_not_asked_for_what_its_publisher_can_do_without(hub: RunningHub) -> None:
    """With two memories the one is asked back that shows the older version, once both are mapped."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", full(1), replica="trainer", install="staged")
        behind, ahead = [await engine_at(there, name) for name in ("behind", "ahead")]
        await trainer.publish(1)
        for engine in (behind, ahead):
            await engine.replicate()
        await overwrite(trainer, 2)
        assert await ahead.update() == 2
        assert (behind.is_asked_back, ahead.is_asked_back) == (False, False)
        overwriting = asyncio.create_task(overwrite(trainer, 3))
        await until(lambda: behind.is_asked_back, "the publisher waits")
        assert not ahead.is_asked_back
        behind.let_go()
        await overwriting
        assert (shown(ahead), shown(behind)) == ({2.0}, {0.0})
        for engine in (behind, ahead):
            assert await engine.update(timeout_s=WAIT_S) == 3
            assert shown(engine) == {3.0}
            await engine.release()


@pytest.mark.parametrize("ends", ["writes", "is killed", "forks"])
async def test_a_process_that_maps_ends(hub: RunningHub, ends: str) -> None:
    """A write kills the writer and changes nothing; one that is killed lets go; a forked child keeps what it shows."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        async with hub.worker(job, 1) as reader:
            await reader.ask("register_full", "m", "engine", 1000, 0.0, {"install": "mapped"})
            assert await reader.ask("replicate", "engine") == 1
            assert await reader.ask("shown", "engine") == [1.0]
            await assert_not_drained(trainer)
            if ends == "writes":
                reader.say('["fill", "engine", 9.0]')
                assert await reader.code() == -signal.SIGSEGV
                assert shown(trainer) == {1.0}
            if ends == "forks":
                await reader.ask("fork")
                assert await reader.code() == 0, "the parent has ended"
                await assert_not_drained(trainer)
                assert await reader.ask("shown", "engine") == [1.0]
                reader.end_orders()
                await trainer.unpublish(timeout_s=WAIT_S)
                return
        await overwrite(trainer, 2)
        engine = await engine_at(there)
        assert engine.version is None
        assert await engine.update() == 2
        assert shown(engine) == {2.0}
        await engine.release()
        # What it still shows is the trainer's one memory, whose release would wait for that.
        del engine


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
            await overwrite(trainer, 2)
        assert (engine.version, shown(engine)) == (1, {1.0})
        if install == "staged":
            assert await engine.replicate(2, timeout_s=WAIT_S) == 2
            assert shown(engine) == {2.0}
        await engine.release()
        del engine
        await overwrite(trainer, 3, publish=False)


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


async def test_a_mapped_replica_is_no_holder_and_no_source(hub: RunningHub) -> None:
    async with hub.pair(full(1), installs=MAPPED) as it:
        await it.trainer.publish(1)
        await it.engine.replicate()
        replicas = [(each.replica, each.mapped, each.version) for each in await it.here.replicas("m")]
        assert replicas == [("trainer", False, 1), ("engine", True, 1)]
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
