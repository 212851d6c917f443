"""Deleting a whole job on a hub of real processes: what is freed, what callers get, and how its name is used anew."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Final

import pytest
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, module_hub, new_job
from tests.kit.tensors import assert_same_bytes, weights
from tests.kit.waiting import until, until_answer
from tests.leftovers import memory_of

import tensorhub
from tensorhub import JobGone
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.jetstream import api
from tensorhub_common.protocol import subjects

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

COMMANDS_LEFT_MAX: Final = 5
"""The one that deleted the job, and what came after it in these tests, each with its outcome."""

hub = module_hub(TENSORHUB_CACHE_DISK_BYTES="16MiB", TENSORHUB_CACHE_BYTES="0", TENSORHUB_METRICS="0")


def files_of(hub: RunningHub, job: str) -> list[Path]:
    """Return the manifests, in memory and on disk, that name the job: beside each stands what it is about."""
    disks = [hub.directory / "state" / agent.id / "copies" for agent in hub.file.agents]
    found = []
    for path in [*(path for folder in disks for path in folder.glob("*.json")), *memory_of(hub.directory, end=".json")]:
        with contextlib.suppress(FileNotFoundError):
            found += [path] if f'"job":"{job}"'.encode() in path.read_bytes() else []
    return found


def stores_of(job: str) -> set[str]:
    """The streams beside log and snapshots."""
    return {subjects.blob_stream(job), subjects.rollout_stream(job), subjects.payload_stream(job)}


async def streams_of(hub: RunningHub, job: str) -> dict[str, int]:
    found = {}
    async with await hub.bus(hub.admin_key) as bus:
        for name in (subjects.log_stream(job), subjects.snapshot_stream(job), *stores_of(job)):
            try:
                found[name] = int((await api.api(bus, f"STREAM.INFO.{name}"))["state"]["messages"])
            except StreamFailure as failure:
                if failure.err_code != api.STREAM_NOT_FOUND:
                    raise
    return found


async def cleared(hub: RunningHub, job: str) -> None:
    def are_cleared(found: dict[str, int]) -> bool:
        is_cut = found.get(subjects.log_stream(job), 0) <= 2 * COMMANDS_LEFT_MAX
        return is_cut and stores_of(job).isdisjoint(found)

    await until_answer(lambda: streams_of(hub, job), are_cleared, f"job {job} is cleared up")


async def test_all_that_stands_in_a_job_goes_with_it(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        await here.retain("m", last=1)
        await trainer.publish(1)
        await trainer.unpublish()
        half = await here.register("n", weights(2), replica="trainer", shard=0, shards=2)
        reader = await there.register("m", weights(9), replica="reader")
        await reader.replicate(1)
        publishing = asyncio.create_task(half.publish(7))
        waiting = asyncio.create_task(reader.update(wait_s=60))
        watched = [asyncio.create_task(_watch(here)), asyncio.create_task(_watch(there))]
        await until(lambda: len(files_of(hub, job)) == 4, "three shards and a copy stand")
        await there.delete_job()
        for call in (publishing, waiting, *watched):
            with pytest.raises(JobGone, match=r"was deleted.*--forget"):
                async with asyncio.timeout(WAIT_S):
                    await call
        await until(lambda: not files_of(hub, job), "nothing of the job is left")
        assert_same_bytes(reader.tensors, weights(1))
        for late in (trainer.publish(2), here.versions("m"), here.register("late", weights(3), replica="r")):
            with pytest.raises(JobGone):
                await late
    await cleared(hub, job)


async def _watch(hub: tensorhub.AsyncHub) -> None:
    async for _ in hub.watch("m"):
        pass


async def test_its_name_is_refused_until_it_is_forgotten(hub: RunningHub) -> None:
    """A worker that comes back, and a second deletion, are refused with what to do; then all begins anew."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", weights(1), replica="trainer")
        await trainer.publish(5)
        two = [hub.registry(job) for _ in range(2)]
        calls = (here.delete_job(), *(each.delete_job() for each in two))
        said = await asyncio.gather(*calls, return_exceptions=True)
        assert None in said
        assert all(each is None or isinstance(each, JobGone) for each in said)
        for each in two:
            await each.close()
    code, out, err = await hub.command("status", "--job", job)
    assert (code, out) == (1, "")
    assert "was deleted" in err
    async with hub.connected(job, agents=1) as (again,):
        with pytest.raises(JobGone, match=f"--job {job} --forget"):
            await again.register("m", weights(1), replica="trainer")
        with pytest.raises(JobGone):
            await again.delete_job()
    await cleared(hub, job)
    code, out, err = await hub.command("delete", "--job", job, "--forget", "--json")
    assert (code, json.loads(out), err) == (0, {"job": job, "state": "forgotten"}, "")
    async with hub.connected(job) as (here, there):
        assert await here.versions("m") == []
        trainer = await here.register("m", weights(4), replica="trainer")
        assert await trainer.publish() == 1
        reader = await there.register("m", weights(9), replica="reader")
        assert await reader.replicate() == 1
        assert_same_bytes(reader.tensors, weights(4))


async def test_an_agent_that_was_away_frees_what_it_finds(hub: RunningHub) -> None:
    """It is killed, the job is deleted and cleared up, and the agent's next process finds memory of it."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        await here.register("m", weights(1), replica="trainer")
        await there.register("m", weights(2), replica="other")
        await until(lambda: len(files_of(hub, job)) == 2, "both stand")
        hub.kill(there.agent)
        assert await hub.command("delete", "--job", job, "--yes") == (0, f"job {job} is deleted\n", "")
        await until(lambda: not files_of(hub, job), "the agent has come back, and freed it")
    await cleared(hub, job)
