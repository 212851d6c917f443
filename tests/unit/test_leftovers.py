"""What a run of tests leaves is ended, removed and told of, and what others have started is left alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.leftovers import BEGINNING, MARK, SHM

LEAVING = """
import os, subprocess, sys
from pathlib import Path

SLEEPING = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]

def test_that_fails_half_way(tmp_path):
    child = subprocess.Popen(SLEEPING)
    Path(os.environ["TENSORHUB_SHM_DIR"], "tensorhub-0-agent-0.seg").write_bytes(b"weights")
    print("CHILD", child.pid)
    child.returncode = 0  # It is not waited for.
    raise AssertionError("half way")

def test_that_passes():
    pass
"""

CONFTEST = """
import pytest
from tests import leftovers

leftovers.END_S = 0.5

@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory):
    with leftovers.nothing_left(tmp_path_factory.getbasetemp()):
        yield
"""


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path("/proc", str(pid), "stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.timeout(120)
def test_what_a_failing_test_leaves_is_taken_away_and_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    stranger = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", f"--basetemp={tmp_path / 'base'}"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), MARK: "another"}
        run = subprocess.run(
            [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        (pid,) = (int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("CHILD"))
        assert "2 passed" not in run.stdout
        assert "1 failed, 1 passed, 1 error" in run.stdout, run.stdout
        assert f"process {pid} (" in run.stdout
        assert "started in test_leaving.py::test_that_fails_half_way (call)" in run.stdout
        assert "tensorhub-0-agent-0.seg, 7 bytes of no hub that is known" in run.stdout
        assert not is_alive(pid)
        assert stranger.poll() is None
    finally:
        stranger.communicate()


@pytest.mark.long
def test_the_memory_of_a_run_that_was_killed_goes_with_the_next_one(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    theirs = SHM / f"{BEGINNING}{killed.pid}-test"
    theirs.mkdir()
    (theirs / "tensorhub-0-agent-0.seg").write_bytes(b"weights")
    program = (
        "import sys; from pathlib import Path; from tests import leftovers\n"
        "with leftovers.nothing_left(Path(sys.argv[1])): pass"
    )

    def run() -> None:
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2], check=True)

    try:
        run()
        assert theirs.exists(), "its process lives"
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    run()
    assert not theirs.exists()
