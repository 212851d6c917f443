"""Programs of their own beside a running hub: they know no more of it than TENSORHUB_DIR."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.integration.hubs import RunningHub

PROGRAM_S: Final = 50


def environment(hub: RunningHub, **more: str) -> dict[str, str]:
    """Return this process's environment with nothing of another hub in it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    return {**own, "TENSORHUB_DIR": str(hub.directory), **more}


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


async def command(hub: RunningHub, *arguments: str | Path) -> tuple[int, str, str]:
    """Run `tensorhub` with these arguments; return its exit code, stdout and stderr."""
    ended = await asyncio.to_thread(
        run_program, hub, "from tensorhub.cli.main import main; main()", *map(str, arguments)
    )
    return ended.returncode, ended.stdout, ended.stderr
