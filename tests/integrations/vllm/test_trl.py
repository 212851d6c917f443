"""TRL's `GRPOTrainer`, whose completions a vLLM server makes: the program of docs/guides/trl.md, as it is."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.integrations.servers import runner_beside
from tests.integrations.vllm.conftest import free_port
from tests.integrations.vllm.processes import VllmProcess
from tests.kit.hubs import RunningHub, new_job

pytest.importorskip("trl")

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]
ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "guides" / "trl.md").read_text()
EXAMPLE_S: Final = 300.0


async def test_the_reward_of_trls_example_rises_where_vllm_generates(hub: RunningHub, tmp_path: Path) -> None:
    (config,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    # vLLM's attention on CPUs has no heads of 16.
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(config), "hidden_size": 128}))
    options = ("--load-format", "dummy", "--max-model-len", "128")
    server = VllmProcess(tmp_path, free_port(), tmp_path / "server.log", options)
    server.start()
    job = new_job()
    try:
        await server.ready()
        async with runner_beside(server, hub, job, "runner-of-trl", 0):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, ROOT / "examples" / "trl_grpo.py", tmp_path),
                env=hub.environment(TENSORHUB_JOB=job, TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), EXAMPLE_S)
            assert process.returncode == 0, err.decode()[-3000:]
            version = int(await server.version())
    finally:
        server.kill()
    rewards = [float(each) for each in re.findall(r"^step \d+: reward ([\d.]+)$", out.decode(), re.MULTILINE)]
    print(rewards)
    assert len(rewards) == 20
    # A quarter of all words is wanted, so that is what a model begins with that knows nothing.
    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
    assert version >= 20, "each step's weights came to the server"
