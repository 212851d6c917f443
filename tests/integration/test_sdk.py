"""The SDK against a real hub: what its interface promises, in one process and in several.

What callers get wrong is refused in test_bad_input.py; versions in a row, shards and modules are in
test_bytes_versions.py.
"""

import asyncio
import signal

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full, shown

import tensorhub
from tensorhub import AsyncHub
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")

README = """
import tensorhub, torch
hub = tensorhub.connect()
hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)
engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
print(engine.replicate("latest"), engine.tensors["w"])
hub.close()
"""


async def test_the_lines_of_the_readme_work_as_printed(hub: RunningHub) -> None:
    """In a shell where nothing but TENSORHUB_DIR is set."""
    code, out, err = await hub.run_interpreter(README)
    assert (code, err) == (0, "")
    assert out.startswith("1 tensor([[1., 1., 1., 1.],")


async def test_a_training_run_on_two_agents(hub: RunningHub) -> None:
    tensors = {"w": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.bfloat16)}
    async with hub.pair(tensors) as it:
        assert it.engine.version is None
        for step in (1, 2, 3):
            it.trainer.tensors["w"].fill_(step)
            assert await it.trainer.publish() == step
            assert await it.trainer.publish(step) == step, "it is published already"
            assert await (it.engine.replicate() if step == 1 else it.engine.update()) == step
            assert {it.trainer.version, it.engine.version} == {step}
            assert it.engine.tensors["w"].tolist() == [step] * 1000
            await it.trainer.unpublish()
            assert repr(it.trainer) == "<m/trainer shard 0 of 1, version None>"
        assert it.engine.last_read is not None
        assert it.engine.last_read.nbytes == 4006
        assert await it.engine.update() is None
        assert await it.versions() == {1: "unavailable", 2: "unavailable", 3: "available"}
        assert (await it.here.versions("m"))[2].holders == ("engine",)
        await it.engine.release()
        assert [each.replica for each in await it.here.replicas("m")] == ["trainer"]


async def test_update_waits_for_something_newer(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        await it.trainer.publish()
        await it.engine.replicate()
        waiting = asyncio.create_task(it.engine.update(wait_s=30, timeout_s=30))
        assert await it.step(full(3)) == 2
        assert await waiting == 2
        assert shown(it.engine) == {3.0}
        assert await it.engine.update(wait_s=0.2) is None


async def first(hub: AsyncHub, count: int, after: int | None = None) -> list[tensorhub.Watched]:
    """Return the next events of a watch."""
    events: list[tensorhub.Watched] = []
    async with asyncio.timeout(WAIT_S):
        async for event in hub.watch("m", after=after):
            events.append(event)
            if len(events) == count:
                return events
    raise AssertionError


async def test_questions_may_be_the_first_thing_that_is_asked(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        assert await here.versions("m") == []
    async with hub.connected() as (here, there):
        watching = asyncio.create_task(first(there, 1))
        await (await here.register("m", full(1), replica="trainer")).publish()
        assert [each.version for each in await watching] == [1]


async def test_watch_resumes_where_it_was_left_and_ends_with_its_hub(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        for version in (1, 2):
            await it.trainer.publish(version)
            await it.trainer.unpublish()
        events = await first(it.here, 4)
        assert [(each.kind, each.version) for each in events] == [
            (f"version.{what}", version) for version in (1, 2) for what in ("published", "unavailable")
        ]
        assert await first(it.here, 2, after=events[1].seq) == events[2:]
        assert [each.seq for each in events] == sorted(each.seq for each in events)
    async with hub.connected(agents=1) as (here,):
        watching = asyncio.create_task(first(here, 1))
        await asyncio.sleep(0)
        await here.close()
        with pytest.raises(tensorhub.AgentUnavailable, match="closed"):
            await watching


RANK = """
import sys, torch, tensorhub
role, index, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with tensorhub.connect(job, agent=f"agent-{index if role == 'trainer' else 1 - index}") as hub:
    spec = tensorhub.TensorSpec((2, 3), "float32", (4, 3), (2 * index, 0))
    shard = hub.register("m", {"w": spec}, replica=role, shard=index, shards=2)
    if role == "engine":
        print(shard.replicate(), shard.tensors["w"].tolist())
    else:
        shard.tensors["w"].fill_(index + 1)
        shard.publish(1)
        next(event for event in hub.watch("m", kinds=("replica.ready",)) if event.replica == "engine")
"""


async def test_processes_bring_a_model_to_each_other(hub: RunningHub) -> None:
    """Two trainer ranks and two engines, each a process, on both agents."""
    job = new_job()
    roles = [(role, index) for role in ("trainer", "engine") for index in (0, 1)]
    ended = await asyncio.gather(*(hub.run(RANK, role, str(index), job) for role, index in roles))
    assert [err for _, _, err in ended] == [""] * 4
    assert [out for _, out, _ in ended] == ["", "", *(f"1 {[[float(n)] * 3] * 2}\n" for n in (1, 2))]


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_worker_that_was_killed_finds_its_memory(hub: RunningHub, install: Install) -> None:
    """A trainer what it published. A staged engine what was swapped in: after one swap that is its second segment."""
    async with hub.pair(full(5, 9)) as it:
        await it.trainer.publish(3)
        async with hub.worker(it.job) as first_life:
            await first_life.ask("register_full", "m", "worker", 9, 0.0, {"install": install})
            assert await first_life.ask("replicate", "worker") == 3
            first_life.say('["die"]')
            assert await first_life.code() == -signal.SIGKILL
        worker = await it.here.register("m", full(0, 9), replica="worker", install=install)
        assert (worker.version, shown(worker)) == (3, {5.0})
        assert await it.step(full(6, 9)) == 4
        assert await worker.update() == 4
        assert shown(worker) == {6.0}


async def test_an_agent_that_is_killed_comes_back_to_its_worker(hub: RunningHub) -> None:
    async with hub.pair(full(4)) as it:
        await it.trainer.publish(7)
        await hub.until_back("agent-0", hub.kill("agent-0"))
        # It holds version 7 already, so this shows no more than that it is attached again.
        assert await it.trainer.publish(7) == 7
        assert await it.engine.replicate(7, timeout_s=WAIT_S) == 7
        assert shown(it.engine) == {4.0}
        assert await it.step(full(5)) == 8
        assert await it.engine.update(wait_s=WAIT_S) == 8
        assert shown(it.engine) == {5.0}


async def test_one_shard_has_one_worker(hub: RunningHub) -> None:
    """Another connection, another agent and another process are each refused, and nothing is taken from the first."""
    async with hub.pair(full(1)) as it, hub.connected(it.job, agents=1) as (again,):
        await it.trainer.publish(5)
        before = await hub.catalog(it.job)
        for other in (it.here, again, it.there):
            with pytest.raises(tensorhub.ReplicaConflict, match="m/trainer"):
                await other.register("m", full(1), replica="trainer")
        for agent in (0, 1):
            async with hub.worker(it.job, agent) as other_process:
                with pytest.raises(Exception, match=r"ReplicaConflict: [^\n]*m/trainer[^\n]*$"):
                    await other_process.ask("register_full", "m", "trainer", 1000, 1.0, {})
        assert await hub.catalog(it.job) == before
        assert await it.step(full(2)) == 6
