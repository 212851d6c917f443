"""The demo as a user runs it; how it ends otherwise; and what it calls wrong, shown with scripted programs."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.kit.waiting import children_of, is_alive, wait_until
from tests.leftovers import memory_of

from tensorhub.demo import run
from tensorhub_common.errors import TensorHubError

ROOT = Path(__file__).parents[3]
DEMO = "import sys; from tensorhub.cli.main import main; sys.argv = ['tensorhub', 'demo', *sys.argv[1:]]; main()"
WITHOUT_TRANSFORMERS = f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
{DEMO}
"""
ROLLOUTS = {"rollout-1", "rollout-2", "rollout-3", "rollout-4"}


@contextmanager
def started(program: str = DEMO) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def told_until(demo: subprocess.Popen[str], kind: str) -> Path:
    assert demo.stdout is not None
    directory, event = Path(), {"kind": ""}
    while event["kind"] != kind:
        event = json.loads(demo.stdout.readline())
        directory = Path(event.get("directory", directory))
    return directory


@pytest.mark.slow
def test_it_shows_what_it_promises() -> None:
    with started() as demo:
        out, err = demo.communicate(timeout=290)
    events = [json.loads(line) for line in out.splitlines()]
    summary = events[-1]
    assert (demo.returncode, err, summary["faults"], summary["differences"]) == (0, "", [], 0)
    assert summary["versions"] >= run.LATE_AT_VERSION
    assert summary["compared"] == len([each for each in events if each["kind"] in {"held", "end"}])
    assert summary["nbytes_compared"] > 50_000_000 * summary["compared"]
    assert [each["replica"] for each in events if each["kind"] == "killed"] == [run.KILLED]
    assert {each["replica"] for each in events if each["kind"] == "held"} == ROLLOUTS
    assert all(each["equal_at_end"] for each in summary["replicas"])
    assert not Path(events[0]["directory"]).exists()
    assert not memory_of(Path(events[0]["directory"]))


@pytest.mark.long
@pytest.mark.parametrize("moment", ["up", pytest.param("held", marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_of_it(moment: str) -> None:
    with started() as demo:
        directory = told_until(demo, moment)
        children = children_of(demo.pid)
        assert len(children) >= 8
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, err) == (130, "tensorhub: interrupted\n")
    assert not [pid for pid in children if is_alive(pid)]
    assert not memory_of(directory)
    assert not directory.exists()


@pytest.mark.long
def test_when_it_is_killed_no_process_is_left() -> None:
    with started() as demo:
        directory = told_until(demo, "started")
        children = children_of(demo.pid)
        demo.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in children))
    for path in memory_of(directory):
        path.unlink()
    shutil.rmtree(directory)


def test_a_missing_extra_is_told_in_one_line() -> None:
    with started(WITHOUT_TRANSFORMERS) as demo:
        ended = demo.communicate(timeout=120)
    line = "tensorhub: the demo needs transformers, not installed here: pip install 'tensorhub[demo]'\n"
    assert (demo.returncode, ended) == (1, ("", line))


@pytest.mark.parametrize(("bound", "what"), [("SHM_BYTES_MIN", "shared memory"), ("MEMORY_BYTES_MIN", "memory")])
def test_a_machine_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch, bound: str, what: str) -> None:
    monkeypatch.setattr(run, bound, 1 << 60)
    with pytest.raises(TensorHubError, match=f"the demo needs .* GB of {what}"):
        asyncio.run(run.run_demo())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put the scripted programs in the place of the demo's; return where its directory is made."""
    monkeypatch.setattr(run, "PROGRAMS", "tests.integration.demo.scripted")
    monkeypatch.setattr(run, "RUN_S_MAX", 3.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    return tmp_path


def summary_of(capsys: pytest.CaptureFixture[str], *, code: int) -> dict[str, Any]:
    assert asyncio.run(run.run_demo(json=True, attach=[Path("agent-0.sock")])) == code
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def test_when_nothing_is_wrong_it_says_so(capsys: pytest.CaptureFixture[str], scripted: Path) -> None:
    summary = summary_of(capsys, code=0)
    assert (summary["ok"], summary["faults"], summary["versions"], summary["compared"]) == (True, [], 10, 9)
    assert {each["replica"] for each in summary["replicas"]} == {run.TRAINER, *ROLLOUTS}
    assert list(scripted.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("differs-held", "rollout-3 holds other bytes than version 10"),
        ("differs-end", "rollout-3 holds other bytes than version 10"),
        ("stale", "rollout-3 was not compared at the end"),
        ("dies", "rollout-3 ended with exit code 1: rollout-3: the reason"),
        ("hangs", "the demo did not end in time"),
        ("loss", "the loss did not go down"),
    ],
)
def test_what_is_wrong_is_a_fault(
    capsys: pytest.CaptureFixture[str], scripted: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, fault: str
) -> None:
    monkeypatch.setitem(os.environ, "SCRIPTED_WRONG", wrong)
    summary = summary_of(capsys, code=1)
    assert not summary["ok"]
    assert summary["faults"][0].startswith(fault)
    assert any((directory / "logs" / "trainer.log").exists() for directory in scripted.iterdir())
