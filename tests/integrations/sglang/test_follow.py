"""A real SGLang server on a CPU follows versions: its greedy tokens are those of each version, and come once."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import pytest_asyncio
import torch
from tests.integrations.qwen2 import save_qwen2
from tests.integrations.servers import ServerProcess, runner_beside
from tests.integrations.sglang.without_kernels import python_path
from tests.integrations.trainers import Trainer, draw
from tests.kit.hubs import RunningHub, new_job
from transformers import Qwen2ForCausalLM

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub_runner.servers.sglang import LOADER

START_S: Final = 300.0
TOKENS: Final = 24
VERSIONS: Final = 10
PROMPTS: Final = [[1, 5, 9, 33, 7], [4, 4], [*range(100, 140)], [511]]
EPSILON: Final = 1e-3
"""Greedy tokens may differ where the two likeliest are closer than this, in logits."""

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3 * START_S)]


@dataclass
class SglangProcess(ServerProcess):
    """One server of SGLang. Attention by torch needs no kernels of a GPU."""

    health: ClassVar[str] = "/ready"
    start_s: ClassVar[float] = START_S

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init"]
        command += ["--max-total-tokens", "16384", "--max-running-requests", "32", "--context-length", "512"]
        return [*command, "--incremental-streaming-output", "--custom-weight-loader", LOADER]

    def environment(self) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path(self.log.parent / "modules")}

    async def version(self) -> str:
        return str((await self.ask("GET", "/model_info"))["weight_version"])


@pytest.fixture(scope="session", params=[False, True], ids=["untied", "tied"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_qwen2(folder, is_tied=request.param)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Any
) -> AsyncIterator[SglangProcess]:
    made = SglangProcess(model_folder, unused_tcp_port_factory(), tmp_path_factory.mktemp("server") / "server.log")
    made.start()
    try:
        await made.ready()
        yield made
    finally:
        made.kill()


def greedy_is_of(module: Qwen2ForCausalLM, response: tensorhub.Response) -> bool:
    """Return whether all tokens are the likeliest, but for such that are as likely as that."""
    ids, tokens = response.prompt_ids.tolist(), response.token_ids.tolist()
    with torch.no_grad():
        logits = module(torch.tensor([[*ids, *tokens]])).logits[0][len(ids) - 1 : -1]
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    return bool((logits.max(-1).values - chosen <= EPSILON).all())


async def responses(rollouts: tensorhub.AsyncRollouts, count: int) -> list[tensorhub.Response]:
    came: list[tensorhub.Response] = []
    async for batch in rollouts.batches(min_responses=1, wait_s=START_S):
        came += batch.responses
        await batch.done()
        if len(came) >= count:
            break
    return came


async def test_ten_versions_make_their_own_tokens(server: SglangProcess, hub: RunningHub, model_folder: Path) -> None:
    """The versions come over ucxx, from a trainer on another host."""
    job = new_job()
    module = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    made: set[str] = set()
    async with await hub.connect(job) as here, runner_beside(server, hub, job, "far", 1, "sglang"):
        trainer = await Trainer.at(here, model_folder)
        rollouts = await here.rollouts("policy", sampling=Sampling(max_tokens=TOKENS, temperature=0.0), staleness=0)
        for seed in range(VERSIONS):
            version = await trainer.publish(seed)
            await rollouts.submit([Prompt(each, id=f"{seed}-{at}") for at, each in enumerate(PROMPTS)])
            came = await responses(rollouts, len(PROMPTS))
            draw(module, seed)
            assert {int(each) for one in came for each in one.versions} == {version}
            assert all(greedy_is_of(module, each) for each in came)
            assert await server.version() == str(version)
            made.add(str(sorted(each.token_ids.tolist() for each in came)))
        await rollouts.close()
    assert len(made) == VERSIONS


async def test_a_server_that_is_killed_costs_no_response(
    server: SglangProcess, hub: RunningHub, model_folder: Path
) -> None:
    job = new_job()
    module = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    async with await hub.connect(job) as here, runner_beside(server, hub, job, "one", 0, "sglang"):
        trainer = await Trainer.at(here, model_folder)
        await trainer.publish(3)
        rollouts = await here.rollouts("policy", sampling=Sampling(max_tokens=200, temperature=0.0))
        await rollouts.submit([Prompt([1 + each, 7], id=f"p{each}") for each in range(24)])
        came = await responses(rollouts, 1)
        server.kill()
        server.start()
        came += await responses(rollouts, 24 - len(came))
        await rollouts.close()
    draw(module, 3)
    assert len({each.group for each in came}) == len(came) == 24
    assert all(greedy_is_of(module, each) for each in came)
    await asyncio.wait_for(server.ready(), START_S)
