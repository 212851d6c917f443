"""What a run of tests must not leave behind: processes that it started, and shared memory.

A worker of pytest owns what it started, and nothing else: its processes carry its mark in their environment, as the
processes that these start do, and all shared memory of its hubs stands in a folder of its own. Another run beside this
one is not touched. What a run that was killed has left is taken away by the next one.

At the end of a worker's tests all of it has to be gone. What is not is ended and removed, and the run fails: it says
which test had started each process, and in which folder the hub stood whose memory is left.
"""

import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorhub_common.config import settings
from tensorhub_common.config.segment_names import segment_beginning

MARK: Final = "HUB_TESTS_RUN"
"""The variable that says whose a process is. It begins otherwise than ours, which tests take out of environments."""

SHM: Final = Path("/dev/shm")  # noqa: S108 (shared memory has this one place on Linux)
BEGINNING: Final = "tensorhub-tests-"
TEST: Final = "PYTEST_CURRENT_TEST"

END_S: Final = 10.0
"""What is ending when the tests are over has so long for it."""

LOOK_S: Final = 0.05

HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Python's own, which end with the process that has started them."""


@dataclass(frozen=True)
class Process:
    """One that belongs to a run."""

    pid: int
    command: str
    test: str
    """During which test it was started; "" where that can't be told."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:200]}), started {f'in {self.test}' if self.test else 'by no test'}"


@contextmanager
def nothing_left(folders: Path) -> Iterator[None]:
    """Give this process's tests a mark and a folder of their own; at the end fail with what they left.

    `folders`: where the tests' folders stand, of which those of hubs are named.
    """
    _remove_dead_runs()
    run = f"{os.getpid()}-{secrets.token_hex(4)}"
    shm = SHM / f"{BEGINNING}{run}"
    shm.mkdir(mode=0o700)
    os.environ[MARK] = run
    os.environ["TENSORHUB_SHM_DIR"] = str(shm)
    try:
        yield
    finally:
        left = [str(each) for each in _end(run)]
        left += [_memory(path, folders) for path in [*sorted(shm.iterdir()), *_astray(folders)]]
        for path in _astray(folders):
            path.unlink(missing_ok=True)
        shutil.rmtree(shm)
    assert not left, "the tests have left (it was ended and removed):\n" + "\n".join(left)


def memory_of(folder: Path, beginning: str = "", end: str = "") -> list[Path]:
    """Return the files in shared memory of the hub that stands in a folder: all, or those so called."""
    shm = settings.load(os.environ).shm_dir
    return sorted(shm.glob(f"{segment_beginning(folder)}{beginning}*{end}"))


def processes_of(run: str) -> list[Process]:
    """Return the processes of a run, but for this one and what ends with it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = dict(
                part.partition(b"=")[::2] for part in (entry / "environ").read_bytes().split(b"\0") if part
            )
            command = (entry / "cmdline").read_bytes()
            if environment.get(MARK.encode()) == run.encode() and not any(each in command for each in HELPERS):
                test = environment.get(TEST.encode(), b"").decode()
                found.append(Process(int(entry.name), command.replace(b"\0", b" ").decode().strip(), test))
    return found


def _end(run: str) -> list[Process]:
    """Wait for processes that are ending, and kill those that are not; return the latter."""
    until = time.monotonic() + END_S
    while (left := processes_of(run)) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    while processes_of(run) and time.monotonic() < until + END_S:
        time.sleep(LOOK_S)
    return left


def _memory(path: Path, folders: Path) -> str:
    """Say whose memory was left."""
    for folder in folders.rglob("*"):
        if folder.is_dir() and path.name.startswith(segment_beginning(folder)):
            return f"{path.name}, {path.stat().st_size} bytes of the hub in {folder}"
    return f"{path.name}, {path.stat().st_size} bytes of no hub that is known"


def _astray(folders: Path) -> list[Path]:
    """Return memory of hubs of these tests that stands beside the run's own folder."""
    found = [path for path in SHM.glob("tensorhub-*") if path.is_file()]
    own = tuple(segment_beginning(folder) for folder in folders.rglob("*") if folder.is_dir())
    return sorted(path for path in found if path.name.startswith(own))


def _remove_dead_runs() -> None:
    """Remove the memory of runs whose process is gone."""
    for folder in SHM.glob(f"{BEGINNING}*"):
        pid = folder.name.removeprefix(BEGINNING).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
