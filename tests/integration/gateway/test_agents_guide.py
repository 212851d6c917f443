"""docs/guides/agents.md: its agents and its trainer run as the page says, and the model learns."""

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.kit.hubs import running_hub

from tensorhub.local.hub import LocalRollouts

PAGE: Final = (Path(__file__).parents[3] / "docs" / "guides" / "agents.md").read_text()
MODEL, TRAINER, AGENTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEP: Final = re.compile(r"step (\d+): (\d+) sessions, reward ([\d.]+)")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_agents_of_the_guide_train_their_model(tmp_path: Path) -> None:
    port, here = free_port(), f"import os\nos.chdir({str(tmp_path)!r})\n"
    waits = f"import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', {port})):\n    time.sleep(0.1)\n"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", MODEL], cwd=tmp_path, check=True)
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=tmp_path / "my-model")) as hub:
        (code, out, err), (agents, _, wrong) = await asyncio.gather(
            hub.run(here + TRAINER.replace("8100", port)), hub.run(waits + AGENTS.replace("8100", port))
        )
    assert (code, err, agents, wrong) == (0, "", 0, "")
    steps = [(int(step), float(reward)) for step, _, reward in STEP.findall(out)]
    assert [step for step, _ in steps] == [*range(10)]
    assert steps[-1][1] > steps[0][1] + 1
    assert [STEP.search(line) is not None for line in PAGE.splitlines() if line.startswith("step ")] == [True] * 10
