"""A job of an older release is raised to today's level: by command, once every registry and planner can fold it."""

import json

import pytest
import torch
from tests.kit.hubs import RunningHub, module_hub, new_job
from tests.kit.tensors import assert_same_bytes

import tensorhub
from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection import ping
from tensorhub_common.introspection.ping import answer_follower_survey
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

pytestmark = pytest.mark.asyncio(loop_scope="module")


# An operator lets new jobs begin as those of the release before.
hub = module_hub(1, TENSORHUB_NEW_JOB_LEVEL="0", TENSORHUB_METRICS="0")


async def level_of(hub: RunningHub, job: str) -> int:
    code, out, err = await hub.command("status", "--job", job, "--json")
    assert (code, err) == (0, "")
    level: int = json.loads(out)["level"]
    return level


@pytest.mark.long
async def test_a_job_goes_on_at_the_new_level(hub: RunningHub) -> None:
    job = new_job()
    values = {"w": torch.arange(77.0)}
    async with hub.connected(job, agents=1) as (connected,):
        trainer = await connected.register("policy", values, replica="trainer")
        await trainer.publish(version=1)
        assert await level_of(hub, job) == 0
        code, out, err = await hub.command("upgrade", "--job", job, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == {"job": job, "before": 0, "level": NEWEST_LEVEL}
        assert await level_of(hub, job) == NEWEST_LEVEL
        code, out, err = await hub.command("upgrade", "--job", job)
        assert (code, err) == (0, "")
        assert out.endswith(f"job {job} is at level {NEWEST_LEVEL}\n")
        await trainer.unpublish()
        await trainer.publish(version=2)
        engine = await connected.register("policy", {"w": torch.zeros(77)}, replica="engine")
        assert await engine.replicate(2) == 2
        assert_same_bytes(engine.tensors, values)


@pytest.mark.long
async def test_nothing_is_raised_while_a_folder_does_not_know_it(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner of the release before answers as one: the command and the registry say who, and raise nothing."""
    job = new_job()
    async with hub.connected(job, agents=1) as (connected,):
        await connected.register("policy", {"w": torch.zeros(7)}, replica="trainer")
        async with await connect(hub.file.nats, name="planner-7", credentials=hub.admin_key) as bus:
            monkeypatch.setattr(ping, "NEWEST_LEVEL", 0)
            await answer_follower_survey(bus, "planner-7", "planner")
            monkeypatch.undo()
            for wanted in ((), ("--level", str(NEWEST_LEVEL))):
                code, _, err = await hub.command("upgrade", "--job", job, *wanted)
                assert code == 1
                assert "planner-7" in err
                assert "upgrade that first" in err
            with pytest.raises(tensorhub.TensorHubError, match=r"planner planner-7 .* can't fold: upgrade it"):
                await connected.registry.raise_level(NEWEST_LEVEL)
            assert await level_of(hub, job) == 0


@pytest.mark.long
async def test_a_level_that_the_registry_does_not_know_is_refused(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job, agents=1) as (connected,):
        await connected.register("policy", {"w": torch.zeros(7)}, replica="trainer")
        with pytest.raises(tensorhub.TensorHubError, match="is not known to the leading registry"):
            await connected.registry.raise_level(NEWEST_LEVEL + 1)
        code, out, _ = await hub.command("upgrade", "--look", "--json", "--job", job)
        assert code == 0
        found = {each["process"]: each["level"] for each in map(json.loads, out.splitlines())}
        assert found == {"planner-0": NEWEST_LEVEL, "registry-0": NEWEST_LEVEL}
