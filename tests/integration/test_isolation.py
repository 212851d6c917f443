"""What goes wrong in one job, or for want of room, costs no other job anything, and is reported."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from tests.bounds import WAIT_S
from tests.kit.agents import FAULT, FAULTY_MODEL, UNOWNED_FAULT_MODEL
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.tensors import full, shown
from tests.kit.waiting import until

from tensorhub import AgentUnavailable, MemoryExhausted

AGENT = "agent-0"


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path, agents=1, agent="faulty") as running:
        yield running


async def assert_reported(hub: RunningHub, kind: str, job: str, why: str) -> None:
    """Look at the agent's activity, and at what `status` and `doctor` print; the job asked about is another one."""
    (trouble,) = (await hub.activity("well", AGENT)).troubles
    _, written, _ = await hub.command("status", "--json", "--job", "well")
    (process,) = [each for each in json.loads(written)["processes"] if each["process"] == AGENT]
    (reported,) = process["troubles"]
    for found in (structs.asdict(trouble), reported):
        assert (found["kind"], found["job"], why in found["why"]) == (kind, job, True)
    _, text, _ = await hub.command("status", "--job", "well")
    assert all(each in " ".join(text.split()) for each in (f"! {AGENT}", kind, "->", why))
    code, findings, _ = await hub.command("doctor", "--quick", "--json", "--job", "well")
    (finding,) = [each for each in map(json.loads, findings.splitlines()) if kind in each["found"]]
    assert (code, why in finding["found"], finding["check"]) == (1, True, "activity")
    assert finding["advice"]


async def test_a_fault_in_one_job_sets_that_job_aside(hub: RunningHub) -> None:
    """The others go on without noticing; once they have nothing here the agent starts anew, with the memory of all."""
    agent = hub.pid(AGENT)
    async with hub.connected("well", 1) as (well,), hub.connected("ill", 1) as (ill,):
        trainer = await well.register("m", full(1), replica="trainer")
        engine = await well.register("m", full(0), replica="engine")
        await trainer.publish(1)
        kept = await ill.register("m", full(7), replica="trainer")
        await kept.publish(7)
        broken = await ill.register(FAULTY_MODEL, full(1), replica="trainer")
        with pytest.raises(AgentUnavailable, match=rf"has set job 'ill' aside.*{FAULT}"):
            await broken.publish(1)
        assert await engine.replicate(1) == 1
        await trainer.unpublish()
        assert await trainer.publish(2) == 2
        assert await engine.update() == 2
        with pytest.raises(AgentUnavailable, match="set job 'ill' aside"):
            await hub.connect("ill")
        assert (await hub.activity("well", AGENT)).faults == 1
        await assert_reported(hub, "job-set-aside", "ill", FAULT)
        assert hub.pid(AGENT) == agent
        await engine.release()
        await trainer.release()
        await until(lambda: hub.pid(AGENT) != agent, "the agent is started anew")
        await kept.unpublish(timeout_s=WAIT_S)
        assert shown(kept) == {7.0}
        assert await kept.publish(8) == 8
    assert (await hub.activity("well", AGENT)).troubles == ()


@pytest.mark.long
async def test_a_fault_that_no_job_owns_ends_the_agent_which_is_started_anew(
    hub: RunningHub, caplog: pytest.LogCaptureFixture
) -> None:
    """With code 1 and one line that says what was wrong. The worker's call is done by the next process."""
    agent = hub.pid(AGENT)
    async with hub.connected("well", 1) as (well,):
        trainer = await well.register(UNOWNED_FAULT_MODEL, full(1), replica="trainer")
        assert await trainer.publish(1, timeout_s=WAIT_S) == 1
        await until(lambda: hub.pid(AGENT) != agent, "the agent is started anew")
        await trainer.unpublish(timeout_s=WAIT_S)
    ended = next(each for each in caplog.messages if each.startswith(f"agent-0 ({agent})"))
    assert "ended with exit code 1" in ended
    (last,) = [line for line in hub.log(AGENT).splitlines() if line.startswith("tensorhub-agent:")]
    assert f"a part: its work failed: ArithmeticError('{FAULT}')" in last


@pytest.mark.long
async def test_memory_that_is_full_costs_the_job_that_asks_for_more(tmp_path: Path) -> None:
    async with (
        running_hub(tmp_path, agents=1, TENSORHUB_MEMORY_BYTES_MAX=str(1 << 20)) as hub,
        hub.connected("well", 1) as (well,),
        hub.connected("large", 1) as (large,),
    ):
        trainer = await well.register("m", full(1), replica="trainer")
        with pytest.raises(MemoryExhausted, match="TENSORHUB_MEMORY_BYTES_MAX"):
            await large.register("m", {"w": torch.zeros(1 << 20)}, replica="trainer")
        assert await trainer.publish(1) == 1
        await assert_reported(hub, "no-memory", "", "TENSORHUB_MEMORY_BYTES_MAX")
        await large.register("m", full(0, 16), replica="trainer")
        assert (await hub.activity("well", AGENT)).troubles == ()
