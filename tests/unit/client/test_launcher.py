"""What happens to the command before it has begun: Ctrl-C, and standard files that are closed."""

import signal
import subprocess
import sys

import pytest

SLOW_IMPORT = """
import importlib.abc, os, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "tensorhub":
            os.write(1, b"importing\\n")
            time.sleep(60)

sys.meta_path.insert(0, Slow())
"""

WAIT_S = 20


@pytest.mark.parametrize(
    "begin",
    [
        "from tensorhub_launcher import main; main()",
        "import runpy; sys.argv[1:] = ['tensorhub']; runpy.run_module('tensorhub_launcher.become', None, '__main__')",
    ],
)
def test_ctrl_c_while_the_command_is_imported_is_one_line(begin: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT + begin], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, "tensorhub: interrupted\n")


def test_what_was_started_to_ignore_ctrl_c_still_does() -> None:
    """So a shell starts what runs in its background."""
    code = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tensorhub_launcher import listen
listen()
os.kill(os.getpid(), signal.SIGINT)
print("goes on")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_file_is_no_error(closed: int) -> None:
    command = [sys.executable, "-m", "tensorhub_launcher", "--version"]
    program = f"import os; os.close({closed}); os.execv({sys.executable!r}, {command!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "" if closed == 1 else ended.stdout.startswith("tensorhub ")


def test_another_program_hears_ctrl_c_too() -> None:
    """As the one that `tensorhub simulate` becomes, which has blocked it until then."""
    code = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'tensorhub_launcher.become', 'json.tool', '--help'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "tensorhub: interrupted\n")
