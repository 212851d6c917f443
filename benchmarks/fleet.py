"""One trainer and its readers, each a process with an agent of its own on one hub, told what to do by lines."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from tensorhub._control.hub_file import HubFile

READERS: Final = 4
JOB: Final = "bench"
ANSWER_S: Final = 90.0
LINE_BYTES_MAX: Final = 1 << 20


class Process:
    """One `benchmarks.worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> Self:
        """Start it, by a command that ends with its own; it answers once its imports are done."""
        pipe = asyncio.subprocess.PIPE
        command = (*prefix, sys.executable, "-m", "benchmarks.worker")
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=dict(environment), limit=LINE_BYTES_MAX
            )
        )

    async def ask(self, do: str, *, answer_s: float = ANSWER_S, **arguments: Any) -> Any:  # noqa: ANN401 (each method has an answer of its own)
        """Have it do something, and return its answer, which it owes within a bound."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(answer_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker has died while it was to {do}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"a worker could not {do}: {answer['error']}")
        return answer

    async def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()


@dataclass(slots=True)
class Fleet:
    """The processes. Use it as an async context manager; `register` may be called for one hub after the other."""

    environment: Mapping[str, str]
    trainer: Process
    readers: list[Process]

    @classmethod
    async def start(cls, environment: Mapping[str, str], readers: int = READERS) -> Self:
        """Start all."""
        trainer, *others = [await Process.start(environment) for _ in range(1 + readers)]
        return cls(environment, trainer, others)

    @property
    def pids(self) -> dict[str, int]:
        """The processes by what they are."""
        return {"trainer": self.trainer.pid} | {f"reader-{n}": each.pid for n, each in enumerate(self.readers)}

    async def register(
        self,
        hub: HubFile,
        model: str,
        shapes: Mapping[str, Sequence[int]],
        *,
        installs: tuple[str, str] = ("in-place", "in-place"),
    ) -> None:
        """Give each process a replica of its own of this model, each on its own agent.

        `installs`: the trainer's and the readers'.
        """
        where = zip([self.trainer, *self.readers], hub.agents, strict=True)
        await asyncio.gather(
            *(
                process.ask(
                    "register",
                    socket=agent.socket,
                    nats=hub.nats,
                    job=JOB,
                    model=model,
                    replica="trainer" if process is self.trainer else agent.id,
                    shapes=shapes,
                    fill=process is self.trainer,
                    install=installs[0 if process is self.trainer else 1],
                )
                for process, agent in where
            )
        )

    async def close(self) -> None:
        """Release what is registered."""
        await asyncio.gather(*(process.ask("close") for process in [self.trainer, *self.readers]))

    async def check_equal(self) -> None:
        """Raise unless every reader holds the trainer's bytes."""
        digests = [(await process.ask("digest"))["digests"][0] for process in [self.trainer, *self.readers]]
        if len(set(digests)) != 1:
            raise RuntimeError(f"the copies differ from the trainer's bytes: {digests}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(process.end() for process in [self.trainer, *self.readers]))
