"""The programs in examples/ and on the pages for users do what they say, against a real hub."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.processes import PROGRAM_S, Ended
from tests.stopping import stop

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

PLAY = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


async def played(hub: RunningHub, job: str, example: str, *arguments: str, **more: str) -> Ended:
    path = str(EXAMPLES / example)
    return await hub.run(PLAY, path, *arguments, **{"TENSORHUB_JOB": job, **more})


@contextmanager
def started(hub: RunningHub, job: str, *arguments: str, **more: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / arguments[0], *arguments[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=hub.environment(**{"TENSORHUB_JOB": job, "PYTHONUNBUFFERED": "1", **more}),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_ended(process: "subprocess.Popen[str]", said: str | None = None) -> str:
    """Wait until it has ended without a word on stderr; return what it wrote."""
    out, err = process.communicate(said, timeout=PROGRAM_S)
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.slow
async def test_a_trainer_and_its_engine(hub: RunningHub) -> None:
    job = new_job()
    with started(hub, job, "trainer.py", "--steps", "3") as trainer:
        assert trainer.stdout is not None
        lines = [trainer.stdout.readline() for _ in range(3)]
        assert lines[2].startswith("step 2: loss ")
        assert lines[2].endswith("published version 3\n")
        with started(hub, job, "rollout.py", "--patience", "1") as engine:
            out = assert_ended(engine)
            assert out.startswith("version 3: ")
            assert out.endswith("nothing newer came within 1 s\n")
        with started(hub, job, "watch_async.py", "--count", "2") as watching:
            said = [f"version.{what} 1, now held by nobody" for what in ("published", "unavailable")]
            assert assert_ended(watching).splitlines() == said
        assert_ended(trainer, "\n")


@pytest.mark.long
async def test_programs_end_without_a_traceback(hub: RunningHub) -> None:
    job = new_job()
    code, out, err = await played(hub, job, "trainer.py", "--steps", "1")
    assert (code, err) == (0, "")
    assert "published version 1" in out
    with started(hub, job, "watch_async.py") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "version.published 1, now held by nobody\n"
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PROGRAM_S)
        assert (watching.returncode, err) == (130, "")


@pytest.mark.long
async def test_a_trainer_with_no_sdk_ends_at_ctrl_c_without_a_traceback(tmp_path: Path) -> None:
    """It waits for a version that does not come, since the agent that is to publish it is stopped."""
    job = new_job()
    async with (
        running_hub(tmp_path, agents=1, TENSORHUB_LOST_AFTER_S="600") as hub,
        hub.connected(job, agents=1) as (here,),
    ):
        await here.register("m", {"w": torch.ones(5)}, replica="trainer")
        stop(hub.file.agents[0].pid)
        try:
            arguments = (hub.file.nats, hub.file.credentials, job, "m", "trainer", "1")
            with started(hub, job, "no_sdk_trainer.py", *arguments) as waiting:
                assert waiting.stdout is not None
                assert any(line == "inbox: publish.wished \n" for line in iter(waiting.stdout.readline, ""))
                os.killpg(waiting.pid, signal.SIGINT)
                ended = await asyncio.to_thread(waiting.communicate, timeout=PROGRAM_S)
                assert (waiting.returncode, ended) == (130, ("", ""))
        finally:
            os.kill(hub.file.agents[0].pid, signal.SIGCONT)


@pytest.mark.slow
async def test_all_ranks_end_at_ctrl_c_without_a_traceback(hub: RunningHub) -> None:
    with started(hub, new_job(), "fsdp_to_tp.py", "--versions", "100000") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("version 1: ")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PROGRAM_S)
        assert (process.returncode, err) == (130, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("example", ["trainer.py", "rollout.py", "sharded.py", "watch_async.py"])
async def test_without_a_hub_they_say_so_in_one_line(hub: RunningHub, tmp_path: Path, example: str) -> None:
    code, out, err = await played(hub, new_job(), example, TENSORHUB_DIR=str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith(f"{example}: there is no hub in {tmp_path}: start one with 'tensorhub up'")
    assert err.count("\n") == 1


async def test_shards(hub: RunningHub) -> None:
    code, out, err = await played(hub, new_job(), "sharded.py")
    assert (code, err) == (0, "")
    assert out.startswith("published 1, replicated 1 1\ntensor([[0., 0., 0.]")


@pytest.mark.slow
async def test_from_fsdp_to_tensor_parallelism(hub: RunningHub) -> None:
    with started(hub, new_job(), "fsdp_to_tp.py", "--versions", "2") as process:
        lines = assert_ended(process).splitlines()
    assert len(lines) == 4
    for version in (1, 2):
        divided, undivided = lines[2 * version - 2 : 2 * version]
        assert divided.startswith(
            f"version {version}: the divided engine's logits differ from the trainer's by at most "
        )
        # Their numbers are about 1, and each of the two layers adds partial sums in another order.
        assert float(divided.split()[-1]) < 1e-5
        assert undivided == f"version {version}: the undivided engine's logits differ from the trainer's by at most 0"


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
