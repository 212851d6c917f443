"""The SDK against a real hub: what its interface promises, in one process and in several."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
import torch
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import fork_program, run_program
from torch import nn

import tensorhub
from tensorhub import AsyncHub, TensorSpec
from tensorhub_common.errors import (
    LayoutMismatch,
    NotPublished,
    ReplicaConflict,
    RoundTimeout,
    VersionConflict,
    VersionUnavailable,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (another process has no event to wait for)
            await asyncio.sleep(0.01)


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value, dtype=torch.float32), "b": torch.full((3,), value, dtype=torch.bfloat16)}


# ------------------------------------------------------------------------------------------------------ one process


async def test_the_readmes_lines_work_as_they_stand(hub: RunningHub) -> None:
    """In a shell where nothing but TENSORHUB_DIR is set."""
    program = """
import tensorhub, torch
hub = tensorhub.connect()
hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)
engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
print(engine.replicate("latest"), engine.tensors["w"])
hub.close()
"""
    ended = await asyncio.to_thread(run_program, hub, program)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("1 tensor([[1., 1., 1., 1.],")


async def test_a_training_run_on_two_agents(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(0), replica="trainer")
        engine = await there.register("policy", weights(-1), replica="rollout")
        assert engine.version is None
        for step in range(3):
            trainer.tensors["w"].fill_(step)
            assert await trainer.publish() == step + 1
            assert await (engine.update() if step else engine.replicate()) == step + 1
            assert {trainer.version, engine.version} == {step + 1}
            assert engine.tensors["w"].tolist() == [step] * 1000
            await trainer.unpublish()
            assert repr(trainer) == "<policy/trainer shard 0 of 1, version None>"
        assert engine.last_read is not None
        assert engine.last_read.nbytes == 4006
        assert await engine.update() is None
        versions = await here.versions("policy")
        assert [(each.version, each.state) for each in versions] == [
            (1, "unavailable"),
            (2, "unavailable"),
            (3, "available"),
        ]
        assert versions[2].holders == ("rollout",)
        await engine.release()
        assert [each.replica for each in await here.replicas("policy")] == ["trainer"]


async def test_modules_keep_their_parameters_and_train_in_place(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        module, reader = nn.Linear(8, 8), nn.Linear(8, 8)
        weight = module.weight
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        trainer = await here.register("policy", module, replica="trainer")
        engine = await there.register("policy", reader, replica="rollout")
        for _ in range(2):
            module(torch.ones(8)).sum().backward()
            optimizer.step()
            await trainer.publish()
            await engine.replicate()
            assert torch.equal(reader.weight, weight)
            await trainer.unpublish()
        assert module.weight is weight


async def test_shards_of_a_replica_publish_and_read_together(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):

        def part(index: int) -> dict[str, TensorSpec]:
            return {"w": TensorSpec((2, 4), "float32", (4, 4), (2 * index, 0))}

        trainers = [
            await here.register("policy", part(index), replica="trainer", shard=index, shards=2) for index in (0, 1)
        ]
        engines = [
            await there.register("policy", part(index), replica="rollout", shard=index, shards=2) for index in (0, 1)
        ]
        for index, trainer in enumerate(trainers):
            trainer.tensors["w"].fill_(index + 1)
        assert await asyncio.gather(*(trainer.publish(5) for trainer in trainers)) == [5, 5]
        reads = engines[0].replicate("latest"), engines[1].replicate(5)
        assert list(await asyncio.gather(*reads)) == [5, 5]
        assert [engine.tensors["w"].unique().tolist() for engine in engines] == [[1], [2]]
        assert await asyncio.gather(*(engine.update() for engine in engines)) == [None, None]


async def test_update_waits_for_something_newer(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(), replica="trainer")
        engine = await there.register("policy", weights(), replica="rollout")
        await trainer.publish()
        await engine.replicate()
        waiting = asyncio.create_task(engine.update(wait_s=30, timeout_s=30))
        await trainer.unpublish()
        trainer.tensors["w"].fill_(3)
        await trainer.publish()
        assert await waiting == 2
        assert engine.tensors["w"].sum() == 3000
        assert await engine.update(wait_s=0.2) is None


async def test_questions_may_be_the_first_thing_that_is_asked(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        assert await here.versions("policy") == []
    async with hub.connected() as (here, there):
        watching = asyncio.create_task(first(there, 1))
        await (await here.register("policy", weights(), replica="trainer")).publish()
        assert [each.version for each in await watching] == [1]


async def test_watch_resumes_where_it_was_left(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        trainer = await here.register("policy", weights(), replica="trainer")
        for _ in range(2):
            await trainer.publish()
            await trainer.unpublish()
        told = await first(here, 4)
        assert [(each.kind, each.version) for each in told] == [
            ("version.published", 1),
            ("version.unavailable", 1),
            ("version.published", 2),
            ("version.unavailable", 2),
        ]
        assert await first(here, 2, after=told[1].seq) == told[2:]
        assert [each.seq for each in told] == sorted(each.seq for each in told)


async def test_a_watch_ends_with_its_hub(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        watching = asyncio.create_task(first(here, 1))
        await asyncio.sleep(0)
        await here.close()
        with pytest.raises(tensorhub.AgentUnavailable, match="closed"):
            await watching


async def first(hub: AsyncHub, count: int, after: int | None = None) -> list[tensorhub.Watched]:
    told: list[tensorhub.Watched] = []
    async with asyncio.timeout(WAIT_S):
        async for event in hub.watch("policy", after=after):
            told.append(event)
            if len(told) == count:
                return told
    raise AssertionError


# ----------------------------------------------------------------------------------------------------------- errors


async def test_errors_say_what_was_wrong(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(), replica="trainer")
        engine = await there.register("policy", weights(), replica="rollout")
        with pytest.raises(NotPublished):
            await trainer.unpublish()
        with pytest.raises(VersionUnavailable, match="policy"):
            await engine.replicate(timeout_s=0.3)
        assert await trainer.publish(3) == 3
        assert await trainer.publish(3) == 3
        with pytest.raises(VersionConflict, match="unpublish 3 first"):
            await trainer.publish(4)
        with pytest.raises(VersionUnavailable):
            await engine.replicate(9, timeout_s=0.3)
        await trainer.unpublish()
        with pytest.raises(VersionConflict, match="not newer"):
            await trainer.publish(2)
        assert await trainer.publish() == 4


async def test_layouts_that_do_not_fit_are_refused_by_the_tensors_names(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        await here.register("policy", {"w": torch.ones(4)}, replica="trainer", shard=0, shards=2)
        with pytest.raises(LayoutMismatch, match="'w'"):
            await there.register("policy", {"w": torch.ones(5)}, replica="trainer", shard=1, shards=2)
        with pytest.raises(LayoutMismatch):
            await there.register("policy", {"w": torch.ones(4)}, replica="trainer", shard=1, shards=3)
        await (await here.register("other", {"w": torch.ones(4)}, replica="trainer")).publish()
        engine = await there.register("other", {"w": torch.ones(5)}, replica="rollout")
        with pytest.raises(LayoutMismatch, match="'w'"):
            await engine.replicate(timeout_s=5)


async def test_a_shard_has_one_worker_and_one_agent(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there), hub.connected(job, agents=1) as (again,):
        await here.register("policy", weights(), replica="trainer")
        for other in (here, again, there):
            with pytest.raises(ReplicaConflict):
                await other.register("policy", weights(), replica="trainer")


async def test_a_missing_sibling_is_named(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        half = {"w": TensorSpec((2,), "float32", (4,), (0,))}
        trainer = await here.register("policy", half, replica="trainer", shard=0, shards=2)
        trainer.tensors["w"].fill_(1)
        with pytest.raises(RoundTimeout, match=r"\[1\]"):
            await trainer.publish(timeout_s=0.3)
        with pytest.raises(RoundTimeout, match=r"\[1\]"):
            await trainer.replicate(timeout_s=0.3)


# ------------------------------------------------------------------------------------------------- several processes


async def test_processes_bring_a_model_to_each_other(hub: RunningHub) -> None:
    """Two trainer ranks and two engines, each a process, on both agents."""
    rank = """
import sys, torch, tensorhub
index, job = int(sys.argv[1]), sys.argv[2]
with tensorhub.connect(job, agent=f"agent-{index}") as hub:
    spec = tensorhub.TensorSpec((2, 3), "float32", (4, 3), (2 * index, 0))
    shard = hub.register("policy", {"w": spec}, replica="trainer", shard=index, shards=2)
    shard.tensors["w"].fill_(index + 1)
    shard.publish(1)
    for event in hub.watch("policy", kinds=("replica.ready",)):
        if event.replica == "last":
            break
"""
    engine = """
import sys, torch, tensorhub
index, job = int(sys.argv[1]), sys.argv[2]
with tensorhub.connect(job, agent=f"agent-{1 - index}") as hub:
    spec = tensorhub.TensorSpec((2, 3), "float32", (4, 3), (2 * index, 0))
    shard = hub.register("policy", {"w": spec}, replica="last", shard=index, shards=2)
    print(shard.replicate(), shard.tensors["w"].tolist())
    shard.release()
"""
    job = new_job()
    programs = [(program, str(index)) for program in (rank, engine) for index in (0, 1)]
    ended = await asyncio.gather(
        *(asyncio.to_thread(fork_program, hub, program, index, job) for program, index in programs)
    )
    assert [err for _, _, err in ended] == [""] * 4
    assert [out for _, out, _ in ended] == [
        "",
        "",
        "1 [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n",
        "1 [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]\n",
    ]


async def test_a_worker_that_was_killed_finds_its_published_memory(hub: RunningHub) -> None:
    program = """
import sys, os, torch, tensorhub
hub = tensorhub.connect(sys.argv[1])
shard = hub.register("policy", {"w": torch.full((9,), 5.0)}, replica="trainer")
print(shard.publish(3), flush=True)
os.kill(os.getpid(), 9)
"""
    job = new_job()
    code, said, _ = await asyncio.to_thread(fork_program, hub, program, job)
    assert (code, said) == (-signal.SIGKILL, "3\n")
    async with hub.connected(job) as (here, there):
        shard = await here.register("policy", {"w": torch.zeros(9)}, replica="trainer")
        assert shard.version == 3
        assert shard.tensors["w"].tolist() == [5] * 9
        engine = await there.register("policy", {"w": torch.zeros(9)}, replica="rollout")
        assert await engine.replicate() == 3


async def test_an_agent_that_is_killed_comes_back_to_its_worker(hub: RunningHub) -> None:
    async with hub.connected() as (here, there):
        trainer = await here.register("policy", weights(4), replica="trainer")
        engine = await there.register("policy", weights(0), replica="rollout")
        await trainer.publish(7)
        before = hub.file.agents[0].pid
        os.kill(before, signal.SIGKILL)
        await until(lambda: hub.file.agents[0].pid != before)
        # It holds version 7 already, so this says no more than that it is attached again.
        assert await trainer.publish(7) == 7
        assert await engine.replicate(7, timeout_s=WAIT_S) == 7
        assert engine.tensors["w"].sum() == 4000
        await trainer.unpublish()
        trainer.tensors["w"].fill_(5)
        assert await trainer.publish() == 8
        assert await engine.update(wait_s=WAIT_S) == 8
        assert engine.tensors["w"].sum() == 5000
