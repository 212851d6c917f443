"""What goes wrong in one job, or for want of room, costs no other job anything, and is told."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.integration.agent_faulty import MODEL, NOBODYS
from tests.integration.hubs import RunningHub, running_hub

from tensorhub import AsyncHub, TensorSpec, connect_async
from tensorhub.local.hub import LocalHub, ServiceCommands
from tensorhub_common.bus.connection import connect
from tensorhub_common.errors import AgentUnavailable, MemoryExhausted
from tensorhub_common.introspection.activity import gather_activity
from tensorhub_common.protocol.activity import Activity

AGENT = "agent-0"
WAIT_S = 30.0
WEIGHTS = {"w": torch.arange(1000.0)}


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    commands = ServiceCommands(agent=(sys.executable, "-m", "tests.integration.agent_faulty"))
    async with LocalHub(tmp_path, agents=1, commands=commands, environment=dict(os.environ)) as up:
        yield RunningHub(up, tmp_path)


async def activity(hub: RunningHub, job: str = "well") -> Activity:
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as bus:
        (agent,) = [each for each in await gather_activity(bus, job, [AGENT]) if each.process == AGENT]
        return agent


async def assert_told_by_commands(hub: RunningHub, kind: str, job: str, why: str) -> None:
    """Look at what `status` and `doctor` say to people and to programs; the job asked about is another one."""
    _, text = await command(hub, "status")
    assert all(each in text for each in (f"! {AGENT}", kind, "->"))
    assert why in " ".join(text.split())
    _, written = await command(hub, "status", "--json")
    (process,) = [each for each in json.loads(written)["processes"] if each["process"] == AGENT]
    (trouble,) = process["troubles"]
    assert (trouble["kind"], trouble["job"], why in trouble["why"]) == (kind, job, True)
    code, findings = await command(hub, "doctor", "--quick", "--json")
    (finding,) = [each for each in map(json.loads, findings.splitlines()) if kind in each["found"]]
    assert (code, why in finding["found"], finding["check"]) == (1, True, "activity")
    assert finding["advice"]


async def command(hub: RunningHub, *arguments: str) -> tuple[int, str]:
    """Run a command of job `well`; return its exit code, and what it wrote."""
    program = str(Path(sys.executable).with_name("tensorhub"))
    where = ("--job", "well", "--dir", str(hub.directory))
    process = await asyncio.create_subprocess_exec(program, *arguments, *where, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(WAIT_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def connected(hub: RunningHub, job: str) -> AsyncHub:
    return await connect_async(job, agent=hub.file.agents[0].socket, nats=hub.file.nats_all)


async def test_a_fault_in_one_job_sets_that_job_aside(hub: RunningHub) -> None:
    """The others go on without noticing; once they have nothing here the agent starts anew, with the memory of all."""
    agent = hub.file.agents[0].pid
    async with await connected(hub, "well") as well:
        trainer = await well.register("policy", WEIGHTS, replica="trainer")
        engine = await well.register("policy", {"w": TensorSpec((1000,), "float32")}, replica="engine")
        await trainer.publish(1)
        async with await connected(hub, "ill") as ill:
            kept = await ill.register("policy", WEIGHTS, replica="trainer")
            await kept.publish(7)
            broken = await ill.register(MODEL, WEIGHTS, replica="trainer")
            with pytest.raises(AgentUnavailable, match=r"has set job 'ill' aside.*a planted fault"):
                await broken.publish(1)
            assert await engine.replicate(1) == 1
            await trainer.unpublish()
            assert await trainer.publish(2) == 2
            assert await engine.update() == 2
            with pytest.raises(AgentUnavailable, match="set job 'ill' aside"):
                await connected(hub, "ill")
            told = await activity(hub)
            assert [(each.kind, each.job) for each in told.troubles] == [("job-set-aside", "ill")]
            assert told.faults == 1
            await assert_told_by_commands(hub, "job-set-aside", "ill", "a planted fault")
            assert hub.file.agents[0].pid == agent
            await engine.release()
            await trainer.release()
            async with asyncio.timeout(WAIT_S):
                while hub.file.agents[0].pid == agent:  # noqa: ASYNC110 (the agent is started anew)
                    await asyncio.sleep(0.05)
            await kept.unpublish(timeout_s=WAIT_S)
            assert torch.equal(kept.tensors["w"], WEIGHTS["w"])
            assert await kept.publish(8) == 8
    assert (await activity(hub)).troubles == ()


@pytest.mark.long
async def test_a_fault_that_no_job_owns_ends_the_agent_which_is_started_anew(
    hub: RunningHub, caplog: pytest.LogCaptureFixture
) -> None:
    """With code 1 and one line that says what was wrong. The worker's call is done by the next process."""
    agent = hub.file.agents[0].pid
    async with await connected(hub, "well") as well:
        trainer = await well.register(NOBODYS, WEIGHTS, replica="trainer")
        assert await trainer.publish(1, timeout_s=WAIT_S) == 1
        async with asyncio.timeout(WAIT_S):
            while hub.file.agents[0].pid == agent:  # noqa: ASYNC110 (the agent is started anew)
                await asyncio.sleep(0.05)
        await trainer.unpublish(timeout_s=WAIT_S)
    ended = next(each for each in caplog.messages if each.startswith(f"agent-0 ({agent})"))
    assert "ended with exit code 1" in ended
    lines = (hub.directory / "logs" / "agent-0.log").read_text().splitlines()
    (last,) = [line for line in lines if line.startswith("tensorhub-agent:")]
    assert "a part: its work failed: ArithmeticError('a planted fault')" in last


@pytest.mark.long
async def test_memory_that_is_full_costs_the_one_who_asks_for_more(tmp_path: Path) -> None:
    async with (
        running_hub(tmp_path, agents=1, TENSORHUB_MEMORY_BYTES_MAX=str(1 << 20)) as hub,
        hub.connected("well", 1) as (well,),
        hub.connected("large", 1) as (large,),
    ):
        trainer = await well.register("policy", WEIGHTS, replica="trainer")
        with pytest.raises(MemoryExhausted, match="TENSORHUB_MEMORY_BYTES_MAX"):
            await large.register("policy", {"w": torch.zeros(1 << 20)}, replica="trainer")
        assert await trainer.publish(1) == 1
        (trouble,) = (await activity(hub)).troubles
        assert (trouble.kind, "TENSORHUB_MEMORY_BYTES_MAX" in trouble.why) == ("no-memory", True)
        await assert_told_by_commands(hub, "no-memory", "", "TENSORHUB_MEMORY_BYTES_MAX")
        await large.register("policy", {"w": torch.zeros(16)}, replica="trainer")
        assert (await activity(hub)).troubles == ()
