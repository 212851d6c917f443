"""A trainer with no SDK: the example runs as printed, and its request has one outcome."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.processes import Run, clean_environment, executed
from tests.kit.tensors import full, shown

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLE = Path(__file__).parents[2] / "examples" / "no_sdk_trainer.py"


async def run_example(hub: RunningHub, job: str, *arguments: str) -> tuple[int, list[str]]:
    command = (sys.executable, str(EXAMPLE), hub.file.nats, hub.file.credentials, job, *arguments)
    code, out, err = await asyncio.to_thread(Run(executed(command, clean_environment())).ended)
    return code, [line.strip() for line in (out + err).splitlines()]


async def test_a_version_is_published(hub: RunningHub) -> None:
    """The agent gates the memory, digests it and says ready; then readers get it like any other version.

    The same bytes under the number that was taken back are that version again.
    """
    async with hub.pair(full(7)) as it:
        status, lines = await run_example(hub, it.job, "m", "trainer", "7")
        assert lines[0].endswith("asked for its outcome: publish.wished")
        assert (status, lines[1:]) == (0, ["inbox: publish.wished", "event: version.published 7"])
        assert await it.engine.replicate() == it.trainer.version == 7
        assert shown(it.engine) == {7.0}
        await it.engine.release()
        await it.trainer.unpublish()
        status, lines = await run_example(hub, it.job, "m", "trainer", "7")
        assert (status, lines[-1]) == (0, "event: version.available 7")
        await it.trainer.unpublish()


async def test_every_agent_with_a_shard_of_the_replica_takes_part(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as both:
        for number, each in enumerate(both):
            await each.register("m", full(1, 5), replica="trainer", shard=number, shards=2)
        status, lines = await run_example(hub, job, "m", "trainer", "1")
        assert (status, lines[-1]) == (0, "event: version.published 1")


async def test_a_request_that_is_refused(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        await it.trainer.publish(5)
        await it.trainer.unpublish()
        for arguments in (("m", "trainer", "4"), ("m", "nobody", "6"), ("unknown", "trainer", "6")):
            status, lines = await run_example(hub, it.job, *arguments)
            assert status == 1, lines
            assert lines[0].endswith("asked for its outcome: command.rejected")
            assert lines[1].startswith("inbox: command.rejected ")
        assert lines[1].endswith(f"is unknown in job '{it.job}': register a replica of it first")
        assert list(await it.versions()) == [5]
        assert await it.trainer.publish() == 6


async def test_the_same_request_twice(hub: RunningHub) -> None:
    """One message id is in the log once, however often it is sent within the window."""
    job = new_job()
    async with hub.connected(job) as (here, _):
        await here.register("m", {"w": torch.ones(5)}, replica="trainer")
        body = b'{"verb":"publish","model":"m","replica":"trainer","version":1}'
        headers = {"Nats-Msg-Id": f"{job}-once"}
        async with hub.raw_client() as client:
            publish = client.jetstream().publish
            acks = [await publish(f"tensorhub.v1.{job}.cmd.publish", body, headers=headers) for _ in range(3)]
        assert len({ack.seq for ack in acks}) == 1
        assert [bool(ack.duplicate) for ack in acks] == [False, True, True]
        async with asyncio.timeout(WAIT_S):
            async for event in here.watch("m"):
                if event.kind == "version.published":
                    break
        assert [each.version for each in await here.versions("m")] == [1]
