"""docs/guides/your-own-trainer.md: its class has 40 lines at most, and its loop learns by it, as the page says."""

import re
from pathlib import Path
from typing import Final

import pytest
from tests.kit.hubs import running_hub

from tensorhub.local.hub import LocalRollouts

GUIDES: Final = Path(__file__).parents[3] / "docs" / "guides"
PAGE: Final = (GUIDES / "your-own-trainer.md").read_text()
BRIDGE, TRAINER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEP: Final = re.compile(r"step (\d+): reward ([\d.]+), version (\d+)")


def test_it_is_forty_lines_at_most() -> None:
    assert len([line for line in BRIDGE.splitlines() if line.strip()]) <= 40


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_trainer_of_the_page_learns(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (config,) = re.findall(r"```json\n(.*?)```", (GUIDES / "rollouts.md").read_text(), re.DOTALL)
    (model / "config.json").write_text(config)
    (tmp_path / "bridge.py").write_text(BRIDGE)
    program = f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, '')\n{TRAINER}"
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=model)) as hub:
        code, out, err = await hub.run(program)
    assert (code, err) == (0, "")
    steps = [(int(step), float(reward), int(version)) for step, reward, version in STEP.findall(out)]
    assert [(step, version) for step, _, version in steps] == [(step, step + 1) for step in range(5)]
    assert steps[-1][1] > steps[0][1] + 0.5
