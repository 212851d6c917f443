"""What is compared: anything that brings the same bytes to one reader or to four."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from benchmarks.side_by_side.arena import Arena

START_S: Final = 60.0
ANSWER_S: Final = 90.0
END_S: Final = 10.0
LINE_BYTES_MAX: Final = 1 << 20


class Failed(RuntimeError):
    """A contender can't go on. The others do."""


@dataclass(frozen=True, slots=True)
class Took:
    """One transfer: how long it took, and what else there is to say of it in seconds."""

    seconds: float
    besides: Mapping[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """One line of the table."""

    title: str

    async def start(self) -> None:
        """Connect, and touch all memory. Raises `Failed`."""

    async def run(self, readers: int) -> Took:
        """Bring the bytes to so many readers at the same time. Raises `Failed`."""

    async def check(self) -> None:
        """Raise `Failed` unless every reader gets every byte."""

    async def stop(self) -> None:
        """End whatever was started."""


class PeerProgram:
    """A program of `benchmarks.side_by_side.peers`."""

    def __init__(
        self,
        title: str,
        program: str,
        arena: Arena,
        *,
        how: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str],
    ) -> None:
        self.title = title
        self._command = (
            python,
            "-m",
            f"benchmarks.side_by_side.peers.{program}",
            "--how",
            how,
            "--arena",
            *arena.paths,
        )
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; it answers once it is connected."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(self._environment),
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        await self._answer("start", START_S)

    async def run(self, readers: int) -> Took:
        """Have it bring the bytes over."""
        answer = await self._ask(do="run", readers=readers)
        return Took(answer["seconds"], answer["besides"])

    async def check(self) -> None:
        """Have it compare."""
        if not (await self._ask(do="check"))["equal"]:
            raise Failed("the bytes differ from the source's")

    async def stop(self) -> None:
        """Let it end, with all that it has started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        with suppress(ProcessLookupError):
            # Its session, so also what a library has started beside it.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _ask(self, **order: object) -> Any:  # noqa: ANN401 (each order has an answer of its own)
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self._answer(str(order["do"]), ANSWER_S)

    async def _answer(self, what: str, bound_s: float) -> Any:  # noqa: ANN401
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(bound_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Failed(f"it has not answered '{what}' within {bound_s:g} s") from None
        if not line:
            raise Failed(f"it died at '{what}'")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


def settled(environment: Mapping[str, str], more: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return an environment for a peer's program: of one thread where a library would take all cores to compute."""
    return dict(environment) | {"OMP_NUM_THREADS": "1"} | dict(more)
