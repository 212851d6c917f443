"""The demo as it is shown, with short rows and few words so that it takes half a minute; and how it ends otherwise."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bounds import WAIT_S
from tests.integration.up.conftest import children_of, is_alive, wait_until
from tests.leftovers import memory_of

from tensorhub.local.directory import HubDirectory

SHORT = """
import sys
from pathlib import Path
from tensorhub.demo.display import Objects
from tensorhub.demo.plot import Script
from tensorhub.demo.run import show
from tensorhub.demo.stage import Casting, Plan

# The size is the demo's own: a smaller model is there before anybody can be killed on the way.
casting = Casting(steps=1, rows=2, row_tokens=16, tokens=4)
script = Script(versions=1, blow_after=2)
sys.exit(show(Objects(), Plan(script=script, casting=casting), Path(sys.argv[1])))
"""
WITHOUT_TRANSFORMERS = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
from tensorhub.demo.run import run_demo
sys.exit(run_demo())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the demo's hub stands; at the end nothing of it may be left in memory."""
    yield tmp_path / "hub"
    assert not memory_of(tmp_path / "hub")


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SHORT, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_shows_what_it_promises(folder: Path) -> None:
    with start(folder) as demo:
        out, err = demo.communicate(timeout=170)
    told = [json.loads(line) for line in out.splitlines()]
    summary = told[-1]
    assert (demo.returncode, summary["faults"]) == (0, []), err
    assert summary["compared"] > 12
    assert summary["nbytes_compared"] > 80_000_000 * summary["compared"]
    wreck = [note for note in told if note["kind"] == "wreck"][-1]
    assert 0 < wreck["written_bytes"] < wreck["nbytes"]
    assert [note["replica"] for note in told if note["kind"] == "back"] == ["rollout-2"]
    late = next(note for note in told if note["kind"] == "joined-late")
    assert {source["replica"] for source in late["sources"]} <= {"rollout-1", "rollout-2", "rollout-3"}
    assert all(replica["equal_at_end"] for replica in summary["replicas"])


@pytest.mark.long
@pytest.mark.parametrize("moment", ["up", pytest.param("joined", marks=[pytest.mark.slow, pytest.mark.timeout(120)])])
def test_ctrl_c_ends_all_of_it(folder: Path, moment: str) -> None:
    with start(folder) as demo:
        assert demo.stdout is not None
        while json.loads(demo.stdout.readline())["kind"] != moment:
            pass
        children = children_of(demo.pid)
        assert len(children) >= 8
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == 130
    assert err.splitlines()[-1] == "tensorhub demo: interrupted: all processes of the demo have ended"
    assert not [pid for pid in children if is_alive(pid)]


@pytest.mark.long
def test_when_it_is_killed_nobody_is_left(folder: Path) -> None:
    with start(folder) as demo:
        assert demo.stdout is not None
        while json.loads(demo.stdout.readline())["kind"] != "started":
            pass
        children = children_of(demo.pid)
        demo.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in children))
    for path in memory_of(folder):
        path.unlink()


def test_what_is_not_installed_is_said_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "tensorhub demo: the demo needs transformers, not installed here: pip install 'tensorhub[agent,demo]'\n"
    )


def test_a_directory_in_use_is_said_in_one_line(folder: Path) -> None:
    taken = HubDirectory(folder)
    taken.open()
    try:
        with start(folder) as second:
            _, err = second.communicate(timeout=120)
    finally:
        taken.close()
    assert second.returncode == 1
    assert err.startswith(f"tensorhub demo: another `tensorhub up` (process {os.getpid()}")
    assert len(err.splitlines()) == 1
