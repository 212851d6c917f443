"""Programs of their own beside a running hub: they know no more of it than TENSORHUB_DIR."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from tests.integration.hubs import RunningHub
from tests.integration.nursery import Nursery

PROGRAM_S: Final = 120.0
LINE_S: Final = 120.0
STDERR: Final = 2
SHM: Final = "TENSORHUB_SHM_DIR"

COMMAND: Final = "from tensorhub.cli.main import main; main()"

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def environment(hub: RunningHub, **more: str) -> dict[str, str]:
    """Return this process's environment with nothing of another hub in it but where memory stands."""
    own = {name: value for name, value in os.environ.items() if name == SHM or not name.startswith("TENSORHUB_")}
    return {**own, "TENSORHUB_DIR": str(hub.directory), **more}


_nursery = cache(Nursery)
_making = threading.Lock()


def nursery() -> Nursery:
    """Return the one of this run, which `close_nursery` ends. Several threads may ask for it at once."""
    with _making:
        return _nursery()


def close_nursery() -> None:
    """End the nursery, if there is one, and all programs in it."""
    with _making:
        if _nursery.cache_info().currsize:
            _nursery().close()
            _nursery.cache_clear()


def fork_program(hub: RunningHub, program: str, *arguments: str, **more: str) -> Ended:
    """Run Python text to its end in a process that has imported torch and tensorhub already.

    `more` stands in its environment.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, Path(os.devnull).open() as null:
        files = null.fileno(), out.fileno(), err.fileno()
        pid, ended = nursery().start(program, arguments, environment(hub, **more), files)
        try:
            code = ended.result(PROGRAM_S)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


class Program:
    """A program under way that says lines and waits for some."""

    def __init__(self, pid: int, ended: "Future[int]", said: asyncio.StreamReader, orders: int) -> None:
        self.pid = pid
        self._ended, self._said, self._orders = ended, said, orders

    async def line(self) -> str:
        """Return the next line that it says; "" where it has ended."""
        async with asyncio.timeout(LINE_S):
            return (await self._said.readline()).decode().strip()

    def go_on(self) -> None:
        """Give it a line."""
        os.write(self._orders, b"\n")

    async def code(self) -> int:
        """Wait for its end; return its exit code."""
        async with asyncio.timeout(LINE_S):
            return await asyncio.wrap_future(self._ended)

    def kill(self) -> None:
        """Kill it unless it has ended."""
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)


@asynccontextmanager
async def started(hub: RunningHub, program: str, *arguments: str, **more: str) -> AsyncIterator[Program]:
    """Start Python text in a process that has imported torch and tensorhub already; it is killed at the end."""
    stdin, orders = os.pipe()
    out, stdout = os.pipe()
    said = asyncio.StreamReader()
    hearing, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(said), os.fdopen(out, "rb", 0)
    )
    pid, ended = nursery().start(program, arguments, environment(hub, **more), (stdin, stdout, STDERR))
    os.close(stdin)
    os.close(stdout)
    running = Program(pid, ended, said, orders)
    try:
        yield running
    finally:
        running.kill()
        os.close(orders)
        await running.code()
        hearing.close()


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
