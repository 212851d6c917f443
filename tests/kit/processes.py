"""Programs of tests in processes of their own: run to their end, or told what to do by lines."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.bounds import WAIT_S
from tests.kit.fork_server import Files, Started, fork_server

PROGRAM_S: Final = WAIT_S
LINE_BYTES_MAX: Final = 1 << 20
SHM: Final = "TENSORHUB_SHM_DIR"
WORKER: Final = Path(__file__).with_name("worker.py")

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""
Start = Callable[[Files], Started]
"""Starts a process with these files."""


class WorkerError(Exception):
    """An order to a worker failed: its error and the sentence, or the worker's own end."""


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment with nothing of a hub in it, but where shared memory is."""
    own = {name: value for name, value in os.environ.items() if name == SHM or not name.startswith("TENSORHUB_")}
    return {**own, **more}


def forked(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Start Python text in a process that has imported torch and tensorhub already."""
    return lambda files: fork_server().start(text, tuple(arguments), environment, files)


def executed(command: Sequence[str], environment: Mapping[str, str]) -> Start:
    def start(files: Files) -> Started:
        process = subprocess.Popen(command, env=environment, stdin=files[0], stdout=files[1], stderr=files[2])
        ended: Future[int] = Future()
        threading.Thread(target=lambda: ended.set_result(process.wait()), daemon=True).start()
        return process.pid, ended

    return start


class Run:
    """A program that runs to its end by itself. `stdout`: a file to write to, instead of one that `ended` returns."""

    def __init__(self, start: Start, stdout: int | None = None) -> None:
        self._out, self._err = os.memfd_create("stdout"), os.memfd_create("stderr")
        null = os.open(os.devnull, os.O_RDWR)
        self.began = time.monotonic()
        self.pid, self._code = start((null, self._out if stdout is None else stdout, self._err))
        os.close(null)

    def ended(self) -> Ended:
        try:
            code = self._code.result(PROGRAM_S)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        return code, _taken(self._out), _taken(self._err)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def _taken(file: int) -> str:
    text = os.pread(file, os.fstat(file).st_size, 0).decode()
    os.close(file)
    return text


class Peer:
    """A program under way that says lines and is given some."""

    def __init__(self, name: str, started: Started, stdin: int, lines: asyncio.StreamReader, errors: int) -> None:
        self.name = name
        self.pid, self._code = started
        self._stdin, self._lines, self._errors = stdin, lines, errors

    async def read(self) -> bytes:
        return await self._lines.readline()

    async def line(self, timeout_s: float = WAIT_S) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.read()
        except TimeoutError:
            raise WorkerError(f"{self.name} said nothing for {timeout_s:g} s") from None
        if not line:
            raise WorkerError(f"{self.name} ended: {os.pread(self._errors, LINE_BYTES_MAX, 0).decode()[-4000:]}")
        return line.decode().strip()

    def say(self, line: str = "") -> None:
        os.write(self._stdin, f"{line}\n".encode())

    async def ask(self, *order: Any, timeout_s: float = WAIT_S) -> Any:
        """Give an order, and return what came of it. Raises `WorkerError` for an error."""
        self.say(json.dumps(order))
        result, error = json.loads(await self.line(timeout_s))
        if error is not None:
            raise WorkerError(f"{self.name}, {' '.join(map(str, order))}: {error}")
        return result

    def end_orders(self) -> None:
        """Let it end as it does at the end of its orders."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def code(self, timeout_s: float = PROGRAM_S) -> int:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(self._code)

    def signal(self, number: int) -> None:
        # How it ended may still be on its way here.
        with contextlib.suppress(ProcessLookupError):
            if not self._code.done():
                os.kill(self.pid, number)


@asynccontextmanager
async def conversing(name: str, start: Start, errors: Path | None = None) -> AsyncIterator[Peer]:
    """Start a program and talk with it; it is killed at the end. `errors`: where its stderr is kept."""
    stdin, orders = os.pipe()
    out, stdout = os.pipe()
    stderr = os.memfd_create("stderr") if errors is None else os.open(errors, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(out, "rb", 0)
    )
    peer = Peer(name, start((stdin, stdout, stderr)), orders, lines, stderr)
    os.close(stdin)
    os.close(stdout)
    try:
        yield peer
    finally:
        peer.signal(signal.SIGKILL)
        peer.end_orders()
        await peer.code()
        transport.close()
        os.close(stderr)


@asynccontextmanager
async def worker(
    name: str, environment: Mapping[str, str], python: str | None = None, errors: Path | None = None
) -> AsyncIterator[Peer]:
    start = (
        forked(WORKER.read_text(), (), environment)
        if python is None
        else executed((python, "-P", str(WORKER)), environment)
    )
    async with conversing(name, start, errors) as peer:
        assert json.loads(await peer.line()) == "ready"
        yield peer


def run_interpreter(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
    return Run(executed((sys.executable, "-c", text, *arguments), environment)).ended()
