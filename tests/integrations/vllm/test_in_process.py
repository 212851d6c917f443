"""vLLM in a runner's process: its greedy tokens are those of its versions, and its engine never outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.integrations.trainers import Trainer
from tests.integrations.vllm.processes import ENVIRONMENT, START_S
from tests.integrations.vllm.test_follow import TOKENS, of_fresh_engines
from tests.integrations.vllm.test_rollouts import check, prompts
from tests.kit.hubs import RunningHub, new_job
from tests.kit.waiting import until

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub_runner.servers.server import ServerLost
from tensorhub_runner.servers.vllm_in_process import VllmInProcess

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3 * START_S)]

OPTIONS = "--dtype float32 --enforce-eager --max-model-len 512"
RESPONSES = 24
"""More than the runner has slots."""
STOPPED_S = 10.0
"""What is tried is that time passes; nothing is waited for."""
PROMPTS = [[1, 5, 9, 33, 7], [4, 4], [*range(100, 140)], [511]]


@asynccontextmanager
async def runner(folder: Path, hub: RunningHub, job: str) -> AsyncIterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "tensorhub_launcher", "runner", "--engine", "vllm", "--model", str(folder)]
    command += ["--engine-args", OPTIONS, "--replica", "in", "--agent", hub.file.agents[0].socket]
    command += ["--dir", str(hub.directory), "--job", job]
    with (hub.directory / "logs" / f"in-{job}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 (it starts at once)
            command, env=hub.environment() | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def cores(pid: int) -> list[psutil.Process]:
    """Wait for the processes of the engine that is a runner's now."""

    def found() -> list[psutil.Process]:
        return [each for each in psutil.Process(pid).children(recursive=True) if "EngineCore" in each.name()]

    await until(found, "the runner has an engine core", START_S)
    return found()


async def test_versions_are_those_of_fresh_engines_and_a_killed_core_is_made_anew(
    hub: RunningHub, model_folder: Path, tmp_path: Path
) -> None:
    job = new_job()
    made: dict[str, list[list[int]]] = {}
    async with await hub.connect(job) as here, runner(model_folder, hub, job) as process:
        trainer = await Trainer.at(here, model_folder)
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
        rollouts = await here.rollouts("policy", sampling=sampling, staleness=0)
        for seed in range(3):
            version = await trainer.publish(seed)
            checkpoint = tmp_path / str(version)
            trainer.module.save_pretrained(checkpoint)
            await rollouts.submit([Prompt(each, id=f"{seed}-{at}") for at, each in enumerate(PROMPTS)])
            came: dict[str, tensorhub.Response] = {}
            async for batch in rollouts.batches(min_responses=len(PROMPTS), wait_s=START_S):
                came |= {each.group: each for each in batch.responses}
                await batch.done()
                if len(came) == len(PROMPTS):
                    break
            assert {int(each) for one in came.values() for each in one.versions} == {version}
            made[str(checkpoint)] = [came[f"{seed}-{at}"].token_ids.tolist() for at in range(len(PROMPTS))]
            if seed == 1:
                # The next version is loaded by another one.
                (core,) = await cores(process.pid)
                core.kill()
        await rollouts.close()
        assert core not in await cores(process.pid)
        (last,) = await cores(process.pid)
        process.terminate()
        await until(lambda: process.poll() is not None, "the runner ends", 30)
        assert process.returncode == 0
        await until(lambda: not last.is_running(), "its engine core has ended", 10)
    assert made == of_fresh_engines([tmp_path / str(version + 1) for version in range(3)])


@pytest.mark.usefixtures("vllm_here")
async def test_a_core_that_dies_while_it_is_asked_is_lost_at_once(model_folder: Path) -> None:
    """VLLM does not end what waits for its answer."""
    others = {each.pid for each in psutil.Process().children(recursive=True)}
    server = VllmInProcess(model_folder, OPTIONS)
    try:
        await server.check()
        (core,) = (each for each in await cores(os.getpid()) if each.pid not in others)
        core.suspend()
        asked = asyncio.ensure_future(server.stand_still())
        await until(lambda: server._engine.engine_core.utility_results, "the core is asked")
        core.kill()
        with pytest.raises(ServerLost, match="its core has died"):
            await asyncio.wait_for(asked, 10)
        assert not await server.is_healthy(1)
    finally:
        await server.close()


async def test_a_core_that_stops_and_then_dies_while_it_generates_costs_no_token_and_ends_with_its_runner(
    hub: RunningHub, model_folder: Path
) -> None:
    job = new_job()
    async with await hub.connect(job) as here, runner(model_folder, hub, job) as process:
        trainer = await Trainer.at(here, model_folder)
        await trainer.publish(1)
        rollouts = await here.rollouts("policy", sampling=Sampling(max_tokens=400, temperature=0.0))
        # The first one that ends shows that the others generate.
        await rollouts.submit([Prompt([3, 1], id="short")], sampling=Sampling(max_tokens=20, temperature=0.0))
        await rollouts.submit(prompts(RESPONSES - 1))
        came: list[tensorhub.Response] = []
        async for batch in rollouts.batches(min_responses=1, wait_s=START_S):
            if not came:
                (core,) = await cores(process.pid)
                core.suspend()
                await asyncio.sleep(STOPPED_S)
                core.resume()
                core.kill()
            came += batch.responses
            await batch.done()
            if len(came) == RESPONSES:
                break
        await rollouts.close()
        assert sorted(len(each.token_ids) for each in came) == [20] + [400] * (RESPONSES - 1)
        for each in came:
            check(trainer, each)
        assert any(len(each.runs) > 1 for each in came)
        (core,) = await cores(process.pid)
        process.kill()
        await until(lambda: not core.is_running(), "the core of a killed runner has ended", 10)
