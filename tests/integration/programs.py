"""Programs of their own beside a running hub: they know no more of it than TENSORHUB_DIR."""

import asyncio
import atexit
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from tests.integration.hubs import RunningHub
from tests.integration.nursery import Nursery

PROGRAM_S: Final = 50

COMMAND: Final = "from tensorhub.cli.main import main; main()"

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def environment(hub: RunningHub, **more: str) -> dict[str, str]:
    """Return this process's environment with nothing of another hub in it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    return {**own, "TENSORHUB_DIR": str(hub.directory), **more}


@cache
def nursery() -> Nursery:
    """Return the one of this run, which ends with it."""
    started = Nursery()
    atexit.register(started.close)
    return started


def fork_program(hub: RunningHub, program: str, *arguments: str) -> Ended:
    """Run Python text to its end in a process that has imported torch already."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, Path(os.devnull).open() as null:
        files = null.fileno(), out.fileno(), err.fileno()
        pid, ended = nursery().start(program, arguments, environment(hub), files)
        try:
            code = ended.result(PROGRAM_S)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


def run_program(hub: RunningHub, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python text to its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
        env=environment(hub),
    )


async def command(hub: RunningHub, *arguments: str | Path) -> Ended:
    """Run `tensorhub` with these arguments."""
    return await asyncio.to_thread(fork_program, hub, COMMAND, *map(str, arguments))
