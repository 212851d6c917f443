"""Each of two tensor-parallel ranks maps a version, and SGLang's own model takes the rank's part of it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.integrations.qwen2 import save_qwen2
from tests.integrations.sglang.ranks import RANKS
from tests.integrations.sglang.without_kernels import python_path
from tests.integrations.trainers import Trainer
from tests.kit.fake_sglang import FakeSglang
from tests.kit.hubs import RunningHub, new_job, running_hub

from tensorhub.local.hub import LocalRollouts
from tensorhub_runner.servers.server import WeightSource
from tensorhub_runner.servers.sglang import SglangServer

START_S: Final = 120.0

pytestmark = pytest.mark.timeout(3 * START_S)


@asynccontextmanager
async def ranks_of(hub: RunningHub, model: Path, folder: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    environment = hub.environment(PYTHONPATH=python_path(folder / "modules"), HF_HUB_OFFLINE="1")
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
    save_qwen2(model)
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
