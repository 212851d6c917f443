"""What users decide, through the SDK and the commands: retain, pin, rewind, drain, quota, delete."""

import json
from typing import Any, Final

import pytest
from tests.kit.hubs import RunningHub, copies_of, module_hub, new_job
from tests.kit.tensors import WEIGHTS_BYTES, assert_same_bytes, weights, write
from tests.kit.transports import UCXX_AND_SLOW_LOCAL
from tests.kit.waiting import until, until_answer

import tensorhub
from tensorhub import AsyncHub, AsyncShard
from tensorhub_common.protocol.log.commands import DrainAgent

pytestmark = pytest.mark.asyncio(loop_scope="module")
AGENTS: Final = ("agent-0", "agent-1", "agent-2")
hub = module_hub(len(AGENTS), over=UCXX_AND_SLOW_LOCAL, TENSORHUB_CACHE_BYTES="64MiB", TENSORHUB_METRICS="0")


async def publish_next(trainer: AsyncShard, version: int) -> None:
    async with trainer.overwriting(publish=True, version=version):
        write(trainer, weights(version))


async def only_copy(hub: AsyncHub, trainer: AsyncShard) -> str:
    """Publish version 1, and let a copy be all that is left of it; return the agent that has it."""
    await hub.retain("m", last=1)
    await trainer.publish(1)
    async with trainer.overwriting():
        write(trainer, weights(99))
    return await holder_of_copy(hub)


async def holder_of_copy(hub: AsyncHub) -> str:
    [copy] = await copies_of(hub, "m", 1)
    return copy.members[0].agent


async def assert_read(hub: AsyncHub, version: int, seed: int | None = None) -> None:
    reader = await hub.register("m", weights(98), replica="reader")
    assert await reader.replicate(version) == version
    assert_same_bytes(reader.tensors, weights(version if seed is None else seed))
    await reader.release()


async def done(hub: RunningHub, job: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a command that succeeds and writes nothing to stderr; return what it prints with `--json`."""
    code, out, err = await hub.command(*arguments, "--job", job, "--json")
    assert (code, err) == (0, ""), (arguments, out, err)
    return [json.loads(line) for line in out.splitlines()]


async def refused(hub: RunningHub, job: str, *arguments: str) -> str:
    code, out, err = await hub.command(*arguments, "--job", job)
    assert (code, out, err.count("\n")) == (1, "", 1), (arguments, out, err)
    return err


@pytest.mark.long
async def test_a_copy_outlives_the_process_of_its_agent(hub: RunningHub) -> None:
    """The caching agent is killed by SIGKILL when its copy is the only one: it is found again and serves."""
    job = new_job()
    async with hub.connected(job, agents=3) as hubs:
        holder = await only_copy(hubs[0], await hubs[0].register("m", weights(1), replica="trainer"))
        before = (await hub.agent_info(job, holder)).incarnation
        hub.kill(holder)
        # Until it has joined again the log goes on believing its old incarnation.
        await until_answer(lambda: hub.agent_info(job, holder), lambda info: info.incarnation > before)
        await until(lambda: copies_of(hubs[0], "m", 1))
        reading = next(each for each in hubs if each.agent != holder)
        await assert_read(reading, 1)
        await reading.retain("m", last=0)


@pytest.mark.long
async def test_what_is_retained_no_longer_is_let_go(hub: RunningHub) -> None:
    async with hub.connected(agents=3) as (here, there, _):
        trainer = await here.register("m", weights(1), replica="trainer")
        await trainer.publish(1)
        await here.pin("m", 1)
        await here.retain("m", last=1)
        for version in (2, 3):
            await publish_next(trainer, version)
        assert [each.version for each in await here.versions("m") if each.retained] == [1, 3]
        assert await copies_of(here, "m", 2) == []
        for version in (1, 3):
            await assert_read(there, version)
        await here.unpin("m", 1)
        assert await copies_of(here, "m", 1) == []
        await here.retain("m", last=0)
        await until_answer(lambda: copies_of(here, "m"), lambda found: not found)


@pytest.mark.long
async def test_commands_decide_as_the_sdk_does(hub: RunningHub) -> None:
    """Retain, pin, rewind and unpin by command; what the SDK then sees, and what it refuses, is the same."""
    job = new_job()
    async with hub.connected(job, agents=3) as (here, there, third):
        trainer = await here.register("m", weights(1), replica="trainer")
        engine = await third.register("m", weights(99), replica="engine")
        await trainer.publish(1)
        old = await there.register("m", weights(99), replica="old")
        await old.replicate(1)
        [kept, *_] = await done(hub, job, "retain", "m", "--last", "1")
        assert (kept["kind"], kept["last"]) == ("model.retention", 1)
        await publish_next(trainer, 2)
        assert await engine.replicate() == 2
        [pinned, *_] = await done(hub, job, "pin", "m", "2")
        assert (pinned["kind"], pinned["version"]) == ("version.pinned", 2)
        [info] = (await here.registry.status()).models
        assert (info.retain, info.pins) == (1, (2,))
        assert "pinned" in await refused(hub, job, "rewind", "m", "--to", "1")
        with pytest.raises(tensorhub.VersionConflict, match="unpin"):
            await here.rewind("m", to=1)
        await done(hub, job, "unpin", "m", "2")
        events = await done(hub, job, "rewind", "m", "--to", "1")
        assert [each["version"] for each in events if each["kind"] == "version.retired"] == [2]
        assert [each.version for each in await here.versions("m") if each.state == "retired"] == [2]
        reader = await there.register("m", weights(9), replica="reader")
        with pytest.raises(tensorhub.VersionUnavailable):
            await reader.replicate(2, timeout_s=5)
        assert await engine.update() == 1, "engines are led back, and the next version is above what was retired"
        assert_same_bytes(engine.tensors, weights(1))
        await trainer.unpublish()
        assert await trainer.publish() == 3
        await here.retain("m", last=0)


@pytest.mark.long
async def test_an_agent_may_stop_once_another_has_the_last_copy(hub: RunningHub) -> None:
    """While all others are drained as well the command ends at its bound, and the copy stays where it is."""
    job = new_job()
    async with hub.connected(job, agents=3) as hubs:
        holder = await only_copy(hubs[0], await hubs[0].register("m", weights(1), replica="trainer"))
        others = [agent for agent in AGENTS if agent != holder]
        for other in others:
            await hubs[0].registry.rule(DrainAgent(agent=other))
        assert "TENSORHUB_CACHE_BYTES" in await refused(hub, job, "drain", holder, "--timeout", "5")
        info = await hub.agent_info(job, holder)
        assert (info.draining, info.may_stop) == (True, False)
        assert await holder_of_copy(hubs[0]) == holder
        # One comes back: the copy moves at once, without another call.
        await hubs[0].registry.rule(DrainAgent(agent=others[0], on=False))
        assert await done(hub, job, "drain", holder) == [{"agent": holder, "draining": True, "may_stop": True}]
        assert await holder_of_copy(hubs[0]) == others[0]
        drained = next(each for each in hubs if each.agent == holder)
        with pytest.raises(tensorhub.TensorHubError, match="drain"):
            await drained.register("m", weights(5), replica="late")
        ended = {"agent": holder, "draining": False, "may_stop": False}
        assert await done(hub, job, "drain", holder, "--end") == [ended]
        await assert_read(drained, 1)
        await hubs[0].retain("m", last=0)


@pytest.mark.long
async def test_a_quota_bounds_shards_and_copies(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        [event] = await done(hub, job, "quota", str(WEIGHTS_BYTES + 1))
        assert (event["kind"], event["nbytes"]) == ("job.quota", WEIGHTS_BYTES + 1)
        with pytest.raises(tensorhub.MemoryExhausted, match="'tensorhub quota'"):
            await there.register("m", weights(2), replica="reader")
        await here.retain("m", last=1)
        await trainer.publish(1)
        with pytest.raises(tensorhub.RetentionFull):
            await trainer.unpublish()
        assert trainer.version == 1
        await done(hub, job, "quota", "0")
        await trainer.unpublish()
        await assert_read(there, 1)
        await here.retain("m", last=0)


@pytest.mark.long
async def test_a_model_is_deleted_once_no_replica_holds_it(hub: RunningHub) -> None:
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
        await assert_read(there, 1, seed=2)
