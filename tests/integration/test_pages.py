"""The programs in README.md, in get-started and in the guides run as printed, and print what the pages say."""

import re
from pathlib import Path

import pytest
from tests.kit.hubs import RunningHub, new_job

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"```python\n(.*?)```\n\n(?:It prints:\n\n)?```text\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

GUIDES = ("trainer", "engine", "watching", "retention")
"""They are one program: the engine's guide reads what the trainer's has published."""

READER = """
from itertools import count
from torch import nn

calls = count()
another_model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def serving():
    return next(calls) < 9


def generate(model):
    print("generated", tuple(model(torch.ones(1, 8)).shape))
"""
"""What a reader of the guides has of their own: an engine that stops after some batches."""


@pytest.mark.parametrize("page", ["README.md", "docs/get-started.md"])
async def test_the_first_program_prints_what_the_page_says(hub: RunningHub, page: str) -> None:
    [(program, printed)] = PROGRAM.findall((ROOT / page).read_text())
    code, out, err = await hub.run(program, TENSORHUB_JOB=new_job())
    assert (code, out, err) == (0, printed, "")


async def test_the_guides_run_one_after_the_other(hub: RunningHub) -> None:
    pages = [(ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in GUIDES]
    program = "\n".join([READER, *(block for page in pages for block in BLOCK.findall(page))])
    program = program.replace('job="run-7"', f'job="{new_job()}"') + 'print("retired", retired)\n'
    code, out, err = await hub.run(program)
    assert (code, err) == (0, "")
    assert "generated (1, 1)" in out
    assert out.endswith("retired []\n")
