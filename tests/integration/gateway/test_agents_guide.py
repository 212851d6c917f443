"""docs/guides/agents.md: its agents and its trainer run as the page says, and the model learns."""

import asyncio
import re
import socket
import sys
from asyncio.subprocess import PIPE
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
@pytest.mark.timeout(900)
async def test_the_agents_of_the_guide_train_their_model(tmp_path: Path) -> None:
    port = free_port()

    async def program(text: str, environment: dict[str, str] | None = None) -> asyncio.subprocess.Process:
        said = text.replace("8100", port)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", said, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE
        )

    assert await (await program(MODEL)).wait() == 0
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=tmp_path / "my-model")) as hub:
        trainer = await program(TRAINER, hub.environment())
        assert trainer.stdout is not None
        assert await trainer.stdout.readline() == f"agents call http://127.0.0.1:{port}/v1\n".encode()
        agents = await program(AGENTS, hub.environment())
        (out, err), (_, wrong) = await asyncio.gather(trainer.communicate(), agents.communicate())
    assert (trainer.returncode, err.decode(), agents.returncode, wrong.decode()) == (0, "", 0, "")
    steps = [(int(step), float(reward)) for step, _, reward in STEP.findall(out.decode())]
    assert [step for step, _ in steps] == [*range(len(steps))]
    assert steps[-1][1] > steps[0][1] + 1
    said = [STEP.search(line) is not None for line in PAGE.splitlines() if line.startswith("step ")]
    assert said == [True] * len(steps)
