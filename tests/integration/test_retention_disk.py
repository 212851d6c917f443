"""Copies past the limit of memory, on real processes: their files have the bytes, and outlive the host's memory."""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tests.kit.hubs import RunningHub, copies_of, module_hub, new_job
from tests.kit.tensors import WEIGHTS_BYTES, assert_same_bytes, weights, write
from tests.kit.transports import UCXX_AND_SLOW_LOCAL
from tests.kit.waiting import Missed, met, until, until_answer
from tests.leftovers import memory_of
from tests.stopping import stop

import tensorhub

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
VERSIONS: Final = (1, 2, 3)

LARGE: Final = 32_000_000
"""Elements of a model whose copy takes long enough to be killed while it is written."""

ATTEMPTS_MAX: Final = 5


# Each agent keeps one copy of the small model in memory, and many on its disk.
hub = module_hub(
    over=UCXX_AND_SLOW_LOCAL, TENSORHUB_CACHE_BYTES=str(WEIGHTS_BYTES), TENSORHUB_CACHE_DISK_BYTES="256MiB"
)
Copies = dict[tuple[str, str], tuple[Path, dict[str, Any]]]


def copies_on_disk(hub: RunningHub, job: str) -> Copies:
    """Return the copies of a job on all disks by (agent, replica): where the file is, and its manifest."""
    found: Copies = {}
    for agent in hub.file.agents:
        for path in (hub.directory / "state" / agent.id / "copies").glob("*.json"):
            manifest = msgspec.json.decode(path.read_bytes())
            if manifest["job"] == job:
                found[agent.id, manifest["replica"]] = path.with_suffix(""), manifest
    return found


async def until_one_is_named(hub: RunningHub, job: str) -> tuple[str, Path]:
    await until(lambda: [path.exists() for path, _ in copies_on_disk(hub, job).values()] == [True])
    [((agent, _), (path, _))] = copies_on_disk(hub, job).items()
    return agent, path


async def killed(hub: RunningHub, job: str, agent: str) -> None:
    before = (await hub.agent_info(job, agent)).incarnation
    hub.kill(agent)
    await until_answer(lambda: hub.agent_info(job, agent), lambda found: found.incarnation > before)


async def all_kept(here: tensorhub.AsyncHub) -> None:
    trainer = await here.register("m", weights(1), replica="trainer")
    await here.retain("m", last=len(VERSIONS))
    for version in VERSIONS:
        await trainer.publish(version)
        async with trainer.overwriting():
            write(trainer, weights(version + 1))
    await trainer.release()


async def read(hub: tensorhub.AsyncHub, version: int) -> dict[str, torch.Tensor]:
    reader = await hub.register("m", weights(99), replica="reader")
    assert await reader.replicate(version) == version
    tensors = {name: tensor.clone() for name, tensor in reader.tensors.items()}
    await reader.release()
    return tensors


async def let_go(hub: RunningHub, here: tensorhub.AsyncHub, job: str) -> None:
    await here.retain("m", last=0)
    await until_answer(lambda: here.replicas("m"), lambda found: not found and copies_on_disk(hub, job) == {})


async def test_what_memory_does_not_hold_is_in_files_with_its_bytes(hub: RunningHub) -> None:
    """Readers get the bytes from the mapped file; and so does any program that opens it."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        await all_kept(here)
        copies = {(each.members[0].agent, each.replica) for each in await here.replicas("m")}

        await until(lambda: all(path.exists() for path, _ in copies_on_disk(hub, job).values()))
        files = copies_on_disk(hub, job)
        in_memory = [agent for agent, _ in copies - files.keys()]
        assert sorted(in_memory) == sorted({agent for agent, _ in copies})
        for path, manifest in files.values():
            version = manifest["version"]
            tensors = load_file(path)
            assert_same_bytes({name: tensors[name] for name in ("a", "b")}, weights(version))
            for each in (here, there):
                assert_same_bytes(await read(each, version), weights(version))
        await let_go(hub, here, job)


async def test_files_are_found_again_after_the_memory_of_the_hosts_was_lost(hub: RunningHub) -> None:
    """What agents had in memory goes with their processes; what they have on disk is trusted for its digests."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        await all_kept(here)
        kept = copies_on_disk(hub, job)
        for agent in hub.file.agents:
            stop(agent.pid)
            for path in memory_of(hub.directory, f"{agent.id}-"):
                path.unlink()
            await killed(hub, job, agent.id)
        versions = sorted(manifest["version"] for _, manifest in kept.values())
        assert versions
        assert copies_on_disk(hub, job).keys() == kept.keys()
        assert [each.version for each in await here.versions("m") if each.state == "available"] == versions
        async with hub.connected(job) as (_, there):
            for version in versions:
                assert_same_bytes(await read(there, version), weights(version))
        await let_go(hub, here, job)


def is_filling(hub: RunningHub, job: str) -> bool:
    return any(manifest["state"] == "filling" for _, manifest in copies_on_disk(hub, job).values())


async def test_an_agent_that_is_killed_while_it_writes_a_file_begins_it_anew(hub: RunningHub) -> None:
    """What half a file holds is never counted: the shard stays published until another attempt is whole."""
    values = {"w": torch.arange(LARGE, dtype=torch.float32)}

    async def attempt(number: int) -> None:
        job = new_job()
        async with hub.connected(job) as (here, there):
            trainer = await there.register("m", values, replica="trainer")
            await here.retain("m", last=1)
            publishing = asyncio.create_task(trainer.publish(1))
            await until(lambda: is_filling(hub, job))
            [(agent, _)] = copies_on_disk(hub, job)
            hub.kill(agent)
            await publishing
            [(path, manifest)] = copies_on_disk(hub, job).values()
            was_writing = (manifest["state"], path.exists()) == ("filling", False)
            await trainer.unpublish()
            trainer.tensors["w"].zero_()
            async with hub.connected(job) as (again, _):
                reader = await again.register("m", {"w": torch.zeros(LARGE)}, replica="reader")
                assert await reader.replicate(1) == 1
                assert_same_bytes(reader.tensors, values)
                await reader.release()
            await trainer.release()
            await let_go(hub, here, job)
        if not was_writing:
            raise Missed

    await met(attempt, ATTEMPTS_MAX)


async def test_a_damaged_file_is_not_believed_and_written_anew(hub: RunningHub) -> None:
    """The trainer holds the version still, so the copy is read again, and has the right bytes in the end."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await there.register("m", {"w": torch.arange(200_000.0)}, replica="trainer")
        await here.retain("m", last=1)
        await trainer.publish(1)

        agent, path = await until_one_is_named(hub, job)
        stop(hub.pid(agent))
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 4096)
            file.write(b"\xff" * 64)
        await killed(hub, job, agent)
        await until(lambda: copies_of(here, "m", 1))
        # An agent that was away for long finds that its copy was placed on another one, and removes the damaged file.
        _, path = await until_one_is_named(hub, job)
        assert_same_bytes({"w": load_file(path)["w"]}, {"w": torch.arange(200_000.0)})
        await trainer.release()
        await let_go(hub, here, job)
