"""Runners beside servers: versions are read out of hub memory by the servers' own workers, which are killed too."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.fake_engine import WEIGHT, logprob_of, token_of
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.waiting import until

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub.local.hub import LocalRollouts

TOKENS = 300
PROMPTS = 24
ROUNDS = 3


@dataclass
class Server:
    """One fake server in a process of its own."""

    kind: str
    environment: dict[str, str]
    port: int = 0
    process: "subprocess.Popen[str] | None" = None

    async def start(self) -> None:
        command = [sys.executable, "-m", f"tests.kit.fake_{self.kind}", str(self.port)]
        self.process = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 (it starts at once)
        assert self.process.stdout is not None
        url = await asyncio.to_thread(self.process.stdout.readline)
        self.port = int(url.strip().rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def running(self) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/running") as answer:
            return int(await answer.text())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            # With its end its pipe is closed.
            self.process.communicate()


@asynccontextmanager
async def instance(hub: RunningHub, job: str, name: str, agent: int, kind: str) -> AsyncIterator[Server]:
    """Run a server and the runner beside it."""
    server = Server(kind, hub.environment(PYTHONPATH=str(Path(__file__).parents[3])))
    await server.start()
    command = [sys.executable, "-m", "tensorhub_launcher", "runner", "--engine", kind, "--url", server.url]
    command += ["--replica", name, "--agent", hub.file.agents[agent].socket, "--dir", str(hub.directory), "--job", job]
    with (hub.directory / "logs" / f"{name}.log").open("ab") as log:
        runner = subprocess.Popen(command, env=hub.environment(), stdout=log, stderr=log)  # noqa: ASYNC220 (it starts at once)
    try:
        yield server
    finally:
        runner.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(runner.wait, WAIT_S)
        runner.kill()
        runner.wait()
        server.kill()


async def publish(shard: tensorhub.AsyncShard, version: int) -> None:
    async with shard.overwriting(publish=True, version=version):
        shard.tensors[WEIGHT].fill_(version)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_servers_that_are_killed_and_updated_cost_no_response_and_no_token_has_another_version(
    tmp_path: Path, kind: str
) -> None:
    """Versions come over one transport to one server, and over the other to the other."""
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            running_hub(tmp_path, hosts=2, rollouts=LocalRollouts(), TENSORHUB_METRICS="0")
        )
        job = new_job()
        here = await stack.enter_async_context(await hub.connect(job))
        shard = await here.register("policy", {WEIGHT: torch.zeros(1 << 18)}, replica="trainer")
        victim = await stack.enter_async_context(instance(hub, job, "one", 0, kind))
        await stack.enter_async_context(instance(hub, job, "other", 1, kind))
        await publish(shard, 1)
        rollouts = await here.rollouts("policy", staleness=1 << 20, sampling=Sampling(max_tokens=TOKENS))
        came: list[tensorhub.Response] = []
        for round_ in range(ROUNDS):
            # What a fake server's tokens follow from stands in the prompt: how long it is, and a seed.
            await rollouts.submit([Prompt([2, 100 * round_ + each], id=f"{round_}-{each}") for each in range(PROMPTS)])
            await until(victim.running, "the server generates")
            victim.kill()
            await publish(shard, round_ + 2)
            came += await asyncio.wait_for(all_of(rollouts), WAIT_S)
            await victim.start()
        await rollouts.close()
    asked = [100 * round_ + each for round_ in range(ROUNDS) for each in range(PROMPTS)]
    assert sorted(int(each.prompt_ids[1]) for each in came) == asked
    for each in came:
        assert each.finish_reason == "length", each.error
        seed = int(each.prompt_ids[1])
        assert each.token_ids.tolist() == [token_of(seed, position) for position in range(TOKENS)]
        # The log-probability says which weights the server had when it made the token.
        made_of = [logprob_of(float(version), position) for position, version in enumerate(each.versions)]
        assert each.logprobs.tolist() == pytest.approx(made_of, abs=1e-3)
    assert any(len({run.instance for run in each.runs}) > 1 for each in came)


async def all_of(rollouts: tensorhub.AsyncRollouts) -> list[tensorhub.Response]:
    came: list[tensorhub.Response] = []
    async for batch in rollouts.batches(min_responses=1, wait_s=WAIT_S):
        came += batch.responses
        await batch.done()
    return came
