"""docs/guides/ray.md and examples/ray_job.py do what they say, on a cluster of several nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.integrations.ray.two_nodes import TwoNodes

pytestmark = pytest.mark.timeout(600)
ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs/guides/ray.md").read_text()
(CONFIG,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/guides/rollouts.md").read_text(), re.DOTALL)
PROGRAM: Final = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
PROGRAM_S: Final = 400.0


def run(cluster: TwoNodes, folder: Path, *command: str) -> str:
    """Run a program in a folder with the model of the guide, as a driver of the cluster; return what it printed."""
    (folder / "my-model").mkdir()
    (folder / "my-model/config.json").write_text(CONFIG)
    environment = {**os.environ, "RAY_ADDRESS": cluster.cluster.address, "TMPDIR": str(folder), "RAY_COLOR_PREFIX": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_guide(cluster: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "train_on_ray.py").write_text(PROGRAM)
    out = run(cluster, tmp_path, "train_on_ray.py")
    (said,) = re.findall(r"\$ python train_on_ray.py\n(.*?)```", PAGE, re.DOTALL)
    assert [re.sub(r"^\(.*?\) ", "", line) for line in out.splitlines()] == [
        re.sub(r"^\(.*?\) ", "", line) for line in said.splitlines()
    ]


def test_the_example_learns(cluster: TwoNodes, tmp_path: Path) -> None:
    example = ROOT / "examples/ray_job.py"
    (arguments,) = re.findall(r"^python examples/ray_job.py (.*)$", example.read_text(), re.MULTILINE)
    out = run(cluster, tmp_path, str(example), *arguments.split())
    rewards = [float(each) for each in re.findall(r"step \d: 64 responses, reward ([\d.]+)", out)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.5
    assert out.splitlines()[-1] == "the trainer's last version is 6"
