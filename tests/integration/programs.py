"""Programs of their own beside a running hub: they know no more of it than TENSORHUB_DIR."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.integration.hubs import RunningHub

PROGRAM_S: Final = 50

COMMANDS: Final = """
import contextlib, io, json, sys
from tensorhub.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Runs one command after the other: most of a command's time goes into importing torch."""

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


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


async def command(hub: RunningHub, *arguments: str | Path) -> Ended:
    """Run `tensorhub` with these arguments."""
    ended = await asyncio.to_thread(
        run_program, hub, "from tensorhub.cli.main import main; main()", *map(str, arguments)
    )
    return ended.returncode, ended.stdout, ended.stderr


async def commands(hub: RunningHub, *several: Sequence[str | Path]) -> list[Ended]:
    """Run `tensorhub` with each of these arguments, one after the other in one process."""
    given = json.dumps([[str(each) for each in arguments] for arguments in several])
    ended = await asyncio.to_thread(run_program, hub, COMMANDS, given)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    return [(code, out, err) for code, out, err in told]
