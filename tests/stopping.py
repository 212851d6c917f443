"""Processes that are put to sleep, and surely sleep."""

import os
import signal
import time
from pathlib import Path
from typing import Final

STOP_S_MAX: Final = 30.0
_STOPPED: Final = frozenset("tTZX")


def stop(pid: int) -> None:
    """Send SIGSTOP. Once this returns no thread of the process runs any more.

    The signal alone is not enough: each thread stops when it is scheduled next, which takes its time on a busy machine,
    and until then the process answers.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_S_MAX
    while not all(state in _STOPPED for state in _states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """Return each thread's state, as the kernel abbreviates it."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        states.append(stat.rpartition(")")[2].split()[0])
    return states
