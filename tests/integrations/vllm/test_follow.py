"""vLLM's own server follows a trainer's versions: its greedy tokens are those of a fresh vLLM with the checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.qwen2 import save_qwen2
from tests.integrations.servers import runner_beside
from tests.integrations.trainers import Trainer, draw
from tests.integrations.vllm.processes import START_S, VllmProcess
from tests.kit.hubs import RunningHub, new_job
from tests.kit.waiting import until
from transformers import Qwen2ForCausalLM

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3 * START_S)]

VERSIONS = 10
PROMPTS = [[1, 5, 9, 33, 7], [4, 4], [*range(100, 140)], [511]]
TOKENS = 24
KILLS = 5


def of_fresh_engines(checkpoints: list[Path]) -> dict[str, list[list[int]]]:
    asked = {"checkpoints": [str(each) for each in checkpoints], "prompts": PROMPTS, "tokens": TOKENS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm.fresh"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_ten_versions_over_both_transports_are_those_of_fresh_engines(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path, tmp_path: Path
) -> None:
    job = new_job()
    made: dict[str, list[list[list[int]]]] = {}
    for server in servers:
        await server.forget()
    async with (
        await hub.connect(job) as here,
        runner_beside(servers[0], hub, job, "near", 0),
        runner_beside(servers[1], hub, job, "far", 1),
    ):
        trainer = await Trainer.at(here, model_folder)
        for seed in range(VERSIONS):
            version = await trainer.publish(seed)
            checkpoint = tmp_path / str(version)
            trainer.module.save_pretrained(checkpoint)
            for server in servers:
                await server.holds(version)
                made.setdefault(str(checkpoint), []).append([await server.greedy(each, TOKENS) for each in PROMPTS])
    fresh = of_fresh_engines([tmp_path / str(version + 1) for version in range(VERSIONS)])
    assert made == {checkpoint: [tokens, tokens] for checkpoint, tokens in fresh.items()}
    assert len({str(tokens) for tokens in fresh.values()}) == VERSIONS


async def test_a_model_whose_output_layer_is_its_embeddings_has_each_version_in_both(
    hub: RunningHub, tmp_path: Path, unused_tcp_port: int
) -> None:
    job, folder = new_job(), tmp_path / "tied"
    save_qwen2(folder, is_tied=True)
    server = VllmProcess(folder, unused_tcp_port, tmp_path / "tied.log")
    server.start()
    try:
        await server.ready()
        async with await hub.connect(job) as here, runner_beside(server, hub, job, "tied", 1):
            trainer = await Trainer.at(here, folder)
            for seed in (1, 2, 3):
                version = await trainer.publish(seed)
                await server.holds(version)
                assert await server.greedy(PROMPTS[0], TOKENS) == of_version(folder, seed)
    finally:
        server.kill()


async def test_a_trainers_agent_that_is_killed_in_an_update_leaves_a_whole_version_answering(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path
) -> None:
    job, server = new_job(), servers[1]
    old = []
    async with runner_beside(server, hub, job, "far", 1):
        for kill in range(KILLS):
            async with await hub.connect(job) as here:
                trainer = await Trainer.at(here, model_folder)
                before = await trainer.publish(100 + kill)
                await server.holds(before)
                await trainer.publish(200 + kill)
                # The runner fetches it now.
                killed = hub.kill("agent-0")
                said, tokens = await server.version(), await server.greedy(PROMPTS[0], TOKENS)
                old.append(said == str(before))
                # What answers is whole, whichever of the two it is; it may change between the two questions.
                possible = [of_version(model_folder, seed) for seed in (100 + kill, 200 + kill)]
                assert tokens in (possible if said == str(before) else possible[1:])
                await hub.until_back("agent-0", killed)
    assert any(old), "no kill came before its version"


def of_version(folder: Path, seed: int) -> list[int]:
    """Return what transformers makes of a version."""
    import torch  # noqa: PLC0415

    module = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw(module, seed)
    ids = torch.tensor([PROMPTS[0]])
    made = module.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = made[0, ids.shape[1] :].tolist()
    return found


async def test_two_tensor_parallel_ranks_load_the_same_version_each_time(
    hub: RunningHub, model_folder: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    job = new_job()
    server = VllmProcess(model_folder, unused_tcp_port, tmp_path / "tp.log", ["--tensor-parallel-size", "2"])
    server.start()
    try:
        await server.ready()
        async with await hub.connect(job) as here, runner_beside(server, hub, job, "tp", 1):
            trainer = await Trainer.at(here, model_folder)
            for seed in range(3):
                version = await trainer.publish(seed)
                await server.holds(version)
                assert await server.greedy(PROMPTS[0], TOKENS) == of_version(model_folder, seed)
    finally:
        server.kill()


async def test_a_runner_that_is_killed_while_a_server_loads_leaves_it_to_the_next_one(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path
) -> None:
    job, server = new_job(), servers[0]
    async with await hub.connect(job) as here:
        trainer = await Trainer.at(here, model_folder)
        for seed in range(3):
            async with runner_beside(server, hub, job, "near", 1) as pid:
                first = await trainer.publish(2 * seed)
                await server.holds(first)
                second = await trainer.publish(2 * seed + 1)
                os.killpg(pid, signal.SIGKILL)
            async with runner_beside(server, hub, job, "near", 1):
                await server.holds(second)
                await until(lambda: server.ask("GET", "/health", answer="status"))
                assert await server.greedy(PROMPTS[0], TOKENS) == of_version(model_folder, 2 * seed + 1)
