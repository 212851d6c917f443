"""A trainer with no SDK: the example runs as printed, and its wish has one outcome."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.hubs import RunningHub, assert_same_bytes, new_job, raw_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLE = Path(__file__).parents[2] / "examples" / "no_sdk_trainer.py"


async def run_example(hub: RunningHub, job: str, *arguments: str) -> tuple[int, list[str]]:
    command = (sys.executable, str(EXAMPLE), hub.file.nats, hub.file.credentials, job, *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    async with asyncio.timeout(WAIT_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().splitlines()


async def test_a_wish_is_published(hub: RunningHub) -> None:
    """The agent gates the memory, digests it and says ready; then readers get it like any other version."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", {"w": torch.arange(1000.0)}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros(1000)}, replica="reader")
        status, lines = await run_example(hub, job, "m", "trainer", "7")
        assert lines[0].endswith("asked for its outcome: publish.wished")
        assert [line.strip() for line in lines[1:]] == ["inbox: publish.wished", "event: version.published 7"]
        assert status == 0
        assert await reader.replicate() == 7
        assert_same_bytes(reader.tensors, {"w": torch.arange(1000.0)})
        assert trainer.version == 7
        await trainer.unpublish()


async def test_a_wish_of_several_shards(hub: RunningHub) -> None:
    """Every agent with a shard of the replica takes part."""
    job = new_job()
    async with hub.connected(job) as both:
        for number, each in enumerate(both):
            await each.register("m", {"w": torch.ones(5)}, replica="trainer", shard=number, shards=2)
        status, lines = await run_example(hub, job, "m", "trainer", "1")
        assert (status, lines[-1].strip()) == (0, "event: version.published 1")


async def test_a_wish_that_is_refused(hub: RunningHub) -> None:
    """An outcome says why not, and nothing changes."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", {"w": torch.ones(5)}, replica="trainer")
        await trainer.publish(5)
        await trainer.unpublish()
        for arguments in (("m", "trainer", "4"), ("m", "nobody", "6"), ("unknown", "trainer", "6")):
            status, lines = await run_example(hub, job, *arguments)
            assert status == 1, lines
            assert lines[0].endswith("asked for its outcome: command.rejected")
            assert lines[1].startswith("inbox: command.rejected ")
        assert lines[1].endswith(f"is unknown in job '{job}': register a replica of it first")
        assert [each.version for each in await here.versions("m")] == [5]
        assert await trainer.publish() == 6


async def test_a_wish_for_the_last_version(hub: RunningHub) -> None:
    """The same bytes under the number that was taken back are that version again."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", {"w": torch.ones(5)}, replica="trainer")
        await trainer.publish(5)
        await trainer.unpublish()
        status, lines = await run_example(hub, job, "m", "trainer", "5")
        assert (status, lines[-1].strip()) == (0, "event: version.available 5")


async def test_the_same_wish_twice(hub: RunningHub) -> None:
    """One message id stands in the log once, however often it is sent within the window."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        await here.register("m", {"w": torch.ones(5)}, replica="trainer")
        client = await raw_client(hub.file)
        try:
            stream = client.jetstream()
            body = b'{"verb":"publish","model":"m","replica":"trainer","version":1}'
            headers = {"Nats-Msg-Id": f"{job}-once"}
            acks = [await stream.publish(f"tensorhub.v1.{job}.cmd.publish", body, headers=headers) for _ in range(3)]
            assert len({ack.seq for ack in acks}) == 1
            assert [bool(ack.duplicate) for ack in acks] == [False, True, True]
        finally:
            await client.close()
        async with asyncio.timeout(WAIT_S):
            async for event in here.watch("m"):
                if event.kind == "version.published":
                    break
        assert [each.version for each in await here.versions("m")] == [1]
