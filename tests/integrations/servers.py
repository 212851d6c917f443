"""Engines' own servers as processes, runners beside them, and a hub on two hosts for these."""

import asyncio
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
import pytest_asyncio
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import until

from tensorhub.local.hub import LocalRollouts


@dataclass
class ServerProcess(ABC):
    """One server, which may be killed and started again."""

    health: ClassVar[str]
    """What it answers once it generates."""
    start_s: ClassVar[float]

    model: Path
    port: int
    log: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command that starts it."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return what it has beside this process's."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=os.environ | self.environment(), stdout=log, stderr=log, start_new_session=True
            )

    async def ready(self) -> None:
        async def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(OSError, aiohttp.ClientError):
                return bool((await self.ask("GET", self.health, answer="status")) == 200)
            return False

        await until(answers, f"the server at {self.url} answers", self.start_s)

    def kill(self) -> None:
        """Kill all of its processes, as a machine that goes does."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def ask(self, method: str, path: str, body: object = None, answer: str = "json") -> Any:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body) as got:
            return got.status if answer == "status" else await got.json()


@asynccontextmanager
async def runner_beside(
    server: ServerProcess, hub: RunningHub, job: str, name: str, agent: int, engine: str = "vllm"
) -> AsyncIterator[int]:
    """Run `tensorhub runner` at an agent; yield its process."""
    command = [sys.executable, "-m", "tensorhub_launcher", "runner", "--engine", engine, "--url", server.url]
    command += ["--replica", name, "--agent", hub.file.agents[agent].socket, "--dir", str(hub.directory)]
    with (hub.directory / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 (it starts at once)
            [*command, "--job", job], env=hub.environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub_of_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    async with running_hub(
        tmp_path_factory.mktemp("hub"), hosts=2, rollouts=LocalRollouts(), TENSORHUB_METRICS="0"
    ) as running:
        yield running
