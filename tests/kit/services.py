"""A registry or a planner as a process of its own, as it runs in production."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from pathlib import Path
from signal import SIGSTOP, SIGTERM

from tests.bounds import BUSY_S
from tests.kit.processes import clean_environment
from tests.kit.waiting import until
from tests.stopping import stop

from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.ping import ping


class RunningService:
    def __init__(self, url: str | None, name: str, log: Path, *, module: str, **environ: str) -> None:
        self.name = name
        self._module = module
        self.log = log
        role = name.partition("-")[0].upper()
        own = {f"TENSORHUB_{role}_ID": name, "TENSORHUB_LOG_LEVEL": "debug", **environ}
        self._environ = clean_environment(**own, **({} if url is None else {"TENSORHUB_NATS": url}))
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, env=self._environ, stdin=asyncio.subprocess.DEVNULL, stderr=log
            )

    async def wait_says(self, text: str) -> None:
        await until(lambda: text in self.log.read_text(), f"{self.name} says {text!r}")

    async def wait_ready(self, bus: Bus) -> None:
        async def is_ready() -> bool:
            assert self.process.returncode is None, self.log.read_text()
            pong = await ping(bus, self.name, 0.2)
            return pong is not None and pong.pid == self.process.pid

        await until(is_ready, f"{self.name} is ready")

    def signal(self, number: int) -> None:
        """Send a signal; once this returns, a registry that was to stop has stopped."""
        stop(self.process.pid) if number == SIGSTOP else self.process.send_signal(number)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def stop(self, number: int = SIGTERM, timeout_s: float = 2.0 + BUSY_S) -> int:
        self.signal(number)
        return await self.ended(timeout_s)

    async def ended(self, timeout_s: float = 2.0 + BUSY_S) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()
