"""Each of two tensor-parallel ranks maps a version, and SGLang's own model takes the rank's part of it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.integrations.sglang.ranks import RANKS
from tests.integrations.vllm.trainers import Trainer
from tests.kit.fake_sglang import FakeSglang
from tests.kit.hubs import RunningHub, new_job, running_hub
from transformers import Qwen2Config, Qwen2ForCausalLM

from tensorhub.local.hub import LocalRollouts
from tensorhub_runner.servers.server import WeightSource
from tensorhub_runner.servers.sglang import SglangServer

START_S: Final = 120.0

pytestmark = pytest.mark.timeout(3 * START_S)


@asynccontextmanager
async def ranks_of(hub: RunningHub, model: Path, folder: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Run the ranks. SGLang imports one name of vLLM where it has no kernels, and does not call it here."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "_custom_ops.py").write_text("def rotary_embedding(*_, **__):\n    raise NotImplementedError\n")
    path = f"{folder}:{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}"
    environment = hub.environment(PYTHONPATH=path, HF_HUB_OFFLINE="1")
    pipe = asyncio.subprocess.PIPE
    made: list[asyncio.subprocess.Process] = []
    try:
        with (folder / "ranks.log").open("ab") as log:
            for rank in range(RANKS):
                command = [sys.executable, "-m", "tests.integrations.sglang.ranks", str(model), str(rank), str(folder)]
                made.append(
                    await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe, stderr=log)
                )
        yield made
    finally:
        for each in made:
            if each.returncode is None:
                each.kill()
            await each.wait()


async def answer_of(rank: asyncio.subprocess.Process, update: dict[str, Any], folder: Path) -> Any:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write(json.dumps(update).encode() + b"\n")
    await rank.stdin.drain()
    line = await asyncio.wait_for(rank.stdout.readline(), START_S)
    assert line, (folder / "ranks.log").read_text()[-3000:]
    return json.loads(line)


async def test_each_rank_takes_its_part_of_each_version(tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(model)
    (tmp_path / "hub").mkdir()
    job, fake = new_job(), FakeSglang(options={"tp_size": RANKS})
    async with (
        running_hub(tmp_path / "hub", hosts=1, rollouts=LocalRollouts(), TENSORHUB_METRICS="0") as hub,
        await hub.connect(job) as here,
        fake.serving() as url,
        ranks_of(hub, model, tmp_path) as ranks,
    ):
        trainer, server = await Trainer.at(here, model), SglangServer(url)
        source = WeightSource(job, "policy", "runner-0", hub.file.agents[0].socket)
        for seed in (1, 2, 3):
            version = await trainer.publish(seed)
            torch.save(trainer.module.state_dict(), tmp_path / "whole")
            # What a runner would have the server do.
            await server.stand_still()
            await server.load(source, version)
            update = {**fake.updates[-1], "whole": str(tmp_path / "whole")}
            answers = await asyncio.gather(*(answer_of(each, update, tmp_path) for each in ranks))
            assert answers == [[True, []]] * RANKS
        await server.close()
