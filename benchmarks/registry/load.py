"""What the registry's benchmark runs: registries as processes as in production, the embedded NATS, and agents as lanes.

A lane is an agent with one shard that says one command after the other, each when the one before has its outcome; all
lanes are tasks of this process.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from tensorhub.local.nats_server import find_program
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.jetstream import job_log
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_event, encode
from tensorhub_common.protocol.log.commands import Command, Drained, Join, Ready, Register, Sender, Unpublish
from tensorhub_common.protocol.queries import Status

AGENTS_PER_JOB: Final = 10
LEASE_S: Final = "2"
ANSWER_S_MAX: Final = 120.0


class Lane:
    """One agent with one shard: publishes and takes back, one command after the other."""

    def __init__(self, log: JobLog, name: str) -> None:
        self._log, self.name, self._n = log, name, 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self.latencies: list[float] = []

    def outcome(self, n: int) -> None:
        """Take the outcome of a command."""
        waiting = self._waiting.pop(n, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def begin(self) -> None:
        """Join, and register the shard."""
        shard: dict[str, Any] = {"model": "policy", "replica": self.name, "shard": 0}
        await self.say(Join(by=self.sender(), host="host-0", site="site-0"))
        await self.say(Register(by=self.sender(), **shard, shards=1, layout="b" * 64, nbytes=1 << 20))

    async def live(self, until: float) -> None:
        """Publish, take back, and say that it is drained, over and over."""
        shard: dict[str, Any] = {"model": self.name, "replica": self.name, "shard": 0}
        await self.say(Register(by=self.sender(), **shard, shards=1, layout="b" * 64, nbytes=1 << 20))
        while time.monotonic() < until:
            await self.say(Ready(by=self.sender(), **shard, version=None, root="a" * 32))
            await self.say(Unpublish(by=self.sender(), **shard))
            await self.say(Drained(by=self.sender(), **shard))

    def sender(self) -> Sender:
        """Return the sender of this lane's next command."""
        self._n += 1
        return Sender(self.name, 1, self._n)

    async def say(self, command: Command) -> None:
        """Append a command and wait until its outcome stands in the log."""
        assert command.by is not None
        told = self._waiting[command.by.n] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        subject = subjects.command_subject(self._log.job, str(command.__struct_config__.tag), self.name)
        await self._log.append(subject, encode(command), f"{self.name}.{command.by.n}")
        async with asyncio.timeout(ANSWER_S_MAX):
            await told
        self.latencies.append(time.perf_counter() - began)


class Fleet:
    """The agents of one job, and what tells them their outcomes."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.log = JobLog(bus, job)
        self.lanes = {name: Lane(self.log, name) for name in (f"agent-{n}" for n in range(AGENTS_PER_JOB))}

    async def follow(self) -> None:
        """Tell each lane its outcomes, for ever."""
        async for entry in self.log.follow(1, subjects.events_of(self.log.job)):
            by = decode_event(entry.data).by
            if by is not None and by.lane in self.lanes:
                self.lanes[by.lane].outcome(by.n)


@contextlib.asynccontextmanager
async def nats(directory: Path) -> AsyncIterator[str]:
    """Run the embedded server, for this benchmark alone."""
    config = directory / "nats.conf"
    # Each stream reserves its whole limit.
    config.write_text(f'jetstream {{ store_dir: "{directory}", max_file_store: 1TB }}')
    options = ("-c", str(config), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(directory))
    process = await asyncio.create_subprocess_exec(find_program(), *options, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield await asyncio.to_thread(_wait_told, directory / f"nats-server_{process.pid}.ports")
    finally:
        process.kill()
        await process.wait()


def _wait_told(ports: Path) -> str:
    """Return the address that the server has told in its file."""
    deadline = time.monotonic() + ANSWER_S_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads(ports.read_text())["nats"][0])
        time.sleep(0.01)
    raise TimeoutError("nats-server does not come up")


class Registry:
    """A registry as a process."""

    def __init__(self, url: str, number: int, directory: Path) -> None:
        self.name = f"registry-{number}"
        self._environ = {
            **os.environ,
            "TENSORHUB_NATS": url,
            "TENSORHUB_REGISTRY_ID": self.name,
            "TENSORHUB_LEADER_TTL_S": LEASE_S,
            "TENSORHUB_LOG_LEVEL": "warning",
            "TENSORHUB_LOST_AFTER_S": "3600",
            "TENSORHUB_DIR": str(directory),
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; it becomes ready by itself."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tensorhub_registry", env=self._environ
        )

    async def kill(self) -> None:
        """SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            await process.wait()

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        assert self._process is not None
        return int(psutil.Process(self._process.pid).memory_info().rss)


async def open_job(bus: Bus, job: str) -> None:
    """Make a job's streams, as a registry does when it is asked to."""
    await BlobStore(bus).open(job)
    await job_log.open_job(bus, job)


async def wait_status(bus: Bus, job: str) -> Status:
    """Ask until a leader that has folded the job answers."""
    deadline = time.monotonic() + ANSWER_S_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(NoAnswer, NoResponder, NoBus, msgspec.MsgspecError):
            return msgspec.json.decode(await bus.request(subjects.query_subject(job, "status"), b"", 1.0), type=Status)
        await asyncio.sleep(0.005)
    raise TimeoutError(f"nobody answers for job {job}")
