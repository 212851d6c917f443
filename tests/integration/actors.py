"""Processes of a test that do what they are told, one line after another, and answer each line with one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.integration.hubs import RunningHub
from tests.integration.programs import environment, nursery

ANSWER_S: Final = 60.0


class Actor:
    """One process."""

    def __init__(self, name: str, pid: int, orders: int, answers: asyncio.StreamReader, errors: Path) -> None:
        self.name, self.pid = name, pid
        self._orders, self._answers, self._errors = orders, answers, errors

    async def told(self, *order: Any) -> Any:
        """Give an order, and return what came of it."""
        os.write(self._orders, (json.dumps(order) + "\n").encode())
        return json.loads(await self.line())

    async def line(self) -> str:
        """Return the next line that it says."""
        line = await asyncio.wait_for(self._answers.readline(), ANSWER_S)
        assert line, f"{self.name} ended: {self._errors.read_text()[-4000:]}"
        return line.decode()

    def end(self) -> None:
        """Let it end as it does at the end of its orders."""
        os.close(self._orders)
        self._orders = -1


@asynccontextmanager
async def actors(
    hub: RunningHub, program: str, casts: Sequence[tuple[str, ...]], directory: Path, **more: str
) -> AsyncIterator[list[Actor]]:
    """Start a process with each of these argument lists, and wait until all are ready. They are gone at the end."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(_actor(hub, program, cast, directory, more)) for cast in casts]
        for actor in started:
            assert await actor.line() == "ready\n"
        yield started


@asynccontextmanager
async def _actor(
    hub: RunningHub, program: str, cast: tuple[str, ...], directory: Path, more: dict[str, str]
) -> AsyncIterator[Actor]:
    name = "-".join(cast[:2])
    errors = directory / f"{name}.stderr"
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    with errors.open("w") as file:
        started = nursery().start(program, cast, environment(hub, **more), (theirs_in, theirs_out, file.fileno()))
    os.close(theirs_in)
    os.close(theirs_out)
    pid, ended = started
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_out, "rb", 0)
    )
    actor = Actor(name, pid, ours_in, reader, errors)
    try:
        yield actor
    finally:
        if actor._orders >= 0:
            os.close(actor._orders)
        if not ended.done():
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(ended.result, ANSWER_S)
        transport.close()
