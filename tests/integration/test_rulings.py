"""What users rule, through the SDK and the commands, on a hub of real processes: drain, quota, delete, rewind, pins."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from tests.integration.hubs import RunningHub, assert_same_bytes, new_job, running_hub
from tests.integration.programs import command

import tensorhub
from tensorhub_common.protocol.log.commands import DrainAgent
from tensorhub_common.protocol.queries import AgentInfo, ReplicaInfo

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

AGENTS: Final = ("agent-0", "agent-1", "agent-2")

NBYTES: Final = 2 * 77 * 1003 * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    directory = tmp_path_factory.mktemp("hub")
    async with running_hub(
        directory, agents=len(AGENTS), TENSORHUB_CACHE_BYTES="16MiB", TENSORHUB_METRICS="0"
    ) as running:
        yield running


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(77, 1003, generator=generator) for name in ("a", "b")}


def write(shard: tensorhub.AsyncShard, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in shard.tensors.items():
        tensor.copy_(values[name])


async def done(hub: RunningHub, job: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a command that succeeds and says nothing on stderr; return what it prints with `--json`."""
    code, out, err = await command(hub, *arguments, "--job", job, "--json")
    assert (code, err) == (0, ""), (arguments, out, err)
    return [json.loads(line) for line in out.splitlines()]


async def refused(hub: RunningHub, job: str, *arguments: str, code: int = 1) -> str:
    """Run a command that the hub says no to; return its one line."""
    found, out, err = await command(hub, *arguments, "--job", job)
    assert (found, out) == (code, ""), (arguments, out, err)
    assert code != 1 or err.count("\n") == 1
    return err


async def copies_of(hub: tensorhub.AsyncHub, model: str, version: int) -> list[ReplicaInfo]:
    """Return the cache replicas that hold the version."""
    found = await hub.replicas(model)
    return [each for each in found if each.replica.startswith("_cache-") and each.version == version]


async def told_of(hub: tensorhub.AsyncHub, agent: str) -> AgentInfo:
    return next(each for each in (await hub.registry.status()).agents if each.agent == agent)


async def only_copy(hub: tensorhub.AsyncHub, trainer: tensorhub.AsyncShard) -> str:
    """Publish version 1, and let a copy be all that is left of it; return the agent that has it."""
    await hub.retain("m", last=1)
    await trainer.publish(1)
    await trainer.unpublish()
    write(trainer, weights(99))
    [copy] = await copies_of(hub, "m", 1)
    return copy.members[0].agent


async def test_an_agent_may_stop_once_the_last_copy_stands_elsewhere(hub: RunningHub) -> None:
    """The bytes have moved by the time that `drain` returns; while it drains, the agent takes nothing new."""
    job = new_job()
    async with hub.connected(job, agents=3) as hubs:
        trainer = await hubs[0].register("m", weights(1), replica="trainer")
        before = await only_copy(hubs[0], trainer)
        assert await done(hub, job, "drain", before) == [{"agent": before, "draining": True, "may_stop": True}]
        [copy] = await copies_of(hubs[0], "m", 1)
        assert copy.members[0].agent != before
        drained = next(each for each in hubs if each.agent == before)
        with pytest.raises(tensorhub.TensorHubError, match="drain"):
            await drained.register("m", weights(5), replica="late")
        assert await done(hub, job, "drain", before, "--end") == [
            {"agent": before, "draining": False, "may_stop": False}
        ]
        reader = await drained.register("m", weights(5), replica="late")
        assert await reader.replicate(1) == 1
        assert_same_bytes(reader.tensors, weights(1))
        await hubs[0].retain("m", last=0)


async def test_an_agent_that_nobody_relieves_may_not_stop(hub: RunningHub) -> None:
    """All others are drained as well: the command says so at its bound, and the copy stays where it is."""
    job = new_job()
    async with hub.connected(job, agents=3) as hubs:
        trainer = await hubs[0].register("m", weights(1), replica="trainer")
        holder = await only_copy(hubs[0], trainer)
        for other in AGENTS:
            if other != holder:
                await hubs[0].registry.rule(DrainAgent(agent=other))
        why = await refused(hub, job, "drain", holder, "--timeout", "5")
        assert "TENSORHUB_CACHE_BYTES" in why
        told = await told_of(hubs[0], holder)
        assert (told.draining, told.may_stop) == (True, False)
        [copy] = await copies_of(hubs[0], "m", 1)
        assert copy.members[0].agent == holder
        # One comes back: the copy moves at once, and nobody has to ask again.
        back = next(other for other in AGENTS if other != holder)
        await hubs[0].registry.rule(DrainAgent(agent=back, on=False))
        await done(hub, job, "drain", holder)
        [copy] = await copies_of(hubs[0], "m", 1)
        assert copy.members[0].agent == back
        await hubs[0].retain("m", last=0)


async def test_a_quota_bounds_shards_and_copies(hub: RunningHub) -> None:
    """What is over it is refused with what to do; what stands already stays."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        [said] = await done(hub, job, "quota", str(NBYTES + 1))
        assert (said["kind"], said["nbytes"]) == ("job.quota", NBYTES + 1)
        with pytest.raises(tensorhub.MemoryExhausted, match="'tensorhub quota'"):
            await there.register("m", weights(2), replica="reader")
        await here.retain("m", last=1)
        await trainer.publish(1)
        with pytest.raises(tensorhub.RetentionFull):
            await trainer.unpublish()
        assert trainer.version == 1
        await done(hub, job, "quota", "0")
        await trainer.unpublish()
        reader = await there.register("m", weights(2), replica="reader")
        assert await reader.replicate(1) == 1
        assert_same_bytes(reader.tensors, weights(1))
        await here.retain("m", last=0)


async def test_a_model_is_deleted_once_nobody_holds_it(hub: RunningHub) -> None:
    """Its copies go with it; its name may be used again, and counts from anew."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        await here.retain("m", last=1)
        await trainer.publish(7)
        assert "'trainer'" in await refused(hub, job, "delete", "m")
        with pytest.raises(tensorhub.ReplicaConflict, match="release"):
            await there.delete("m")
        await trainer.release()
        assert [each["kind"] for each in await done(hub, job, "delete", "m")] == ["model.deleted", "shard.released"]
        assert (await here.versions("m"), await here.replicas("m")) == ([], [])
        assert "'m'" in await refused(hub, job, "delete", "m")
        again = await here.register("m", weights(2), replica="trainer")
        assert await again.publish(1) == 1
        reader = await there.register("m", weights(3), replica="reader")
        assert await reader.replicate() == 1
        assert_same_bytes(reader.tensors, weights(2))


async def test_rulings_through_commands_are_those_of_the_sdk(hub: RunningHub) -> None:
    """Retain, pin, rewind and unpin by command; what the SDK then sees, and what it refuses, is the same."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        await trainer.publish(1)
        [kept, *_] = await done(hub, job, "retain", "m", "--last", "1")
        assert (kept["kind"], kept["last"]) == ("model.retention", 1)
        await trainer.unpublish()
        write(trainer, weights(2))
        await trainer.publish(2)
        [pinned, *_] = await done(hub, job, "pin", "m", "2")
        assert (pinned["kind"], pinned["version"]) == ("version.pinned", 2)
        [info] = (await here.registry.status()).models
        assert (info.retain, info.pins) == (1, (2,))
        assert "pinned" in await refused(hub, job, "rewind", "m", "--to", "1")
        with pytest.raises(tensorhub.VersionConflict, match="unpin"):
            await here.rewind("m", to=1)
        await done(hub, job, "unpin", "m", "2")
        said = await done(hub, job, "rewind", "m", "--to", "1")
        assert [each["version"] for each in said if each["kind"] == "version.retired"] == [2]
        reader = await there.register("m", weights(9), replica="reader")
        with pytest.raises(tensorhub.VersionUnavailable):
            await reader.replicate(2, timeout_s=5)
        assert [each.version for each in await here.versions("m") if each.state == "retired"] == [2]
        await trainer.unpublish()
        assert await trainer.publish() == 3


async def test_what_is_kept_has_its_bytes_long_after_it_was_overtaken(hub: RunningHub) -> None:
    """A pinned version outlives `retain(last=1)`, and `unpin` lets it go."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        await trainer.publish(1)
        await here.pin("m", 1)
        await here.retain("m", last=1)
        for version in (2, 3):
            await trainer.unpublish()
            write(trainer, weights(version))
            await trainer.publish(version)
        assert [each.version for each in await here.versions("m") if each.retained] == [1, 3]
        reader = await there.register("m", weights(9), replica="reader")
        assert await reader.replicate(1) == 1
        assert_same_bytes(reader.tensors, weights(1))
        await reader.release()
        await here.unpin("m", 1)
        assert await copies_of(here, "m", 1) == []
        await here.retain("m", last=0)


WRONG: Final = (
    (("retain", "m"), 2, "--last"),
    (("retain", "m", "--last", "33"), 2, "0 to 32"),
    (("retain", "not a name", "--last", "1"), 2, "not a name"),
    (("pin", "m", "9"), 1, "available now: [1]"),
    (("rewind", "m", "--to", "9"), 1, "the last published one is 1"),
    (("delete", "unknown"), 1, "unknown"),
    (("quota", "-1"), 2, "-1"),
    (("drain", "nobody"), 1, "has not joined"),
)


async def test_what_is_wrong_is_said_in_one_line(hub: RunningHub) -> None:
    """Wrong usage is 2, what the hub says no to is 1, and nothing has changed."""
    job = new_job()
    async with hub.connected(job, agents=1) as (here,):
        trainer = await here.register("m", weights(1), replica="trainer")
        await trainer.publish(1)
        said = await asyncio.gather(*(refused(hub, job, *arguments, code=code) for arguments, code, _ in WRONG))
        for line, (_, _, says) in zip(said, WRONG, strict=True):
            assert says in line
        [info] = (await here.registry.status()).models
        assert (info.last, info.retain, info.pins) == (1, 0, ())
