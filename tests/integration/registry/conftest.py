"""A registry as a process of its own, as it runs in production, and a job in which to watch what it says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tests.kit.nats import RunningNats
from tests.kit.services import RunningService
from tests.kit.waiting import retried
from tests.unit.registry.modelled_log import decided

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_event, encode
from tensorhub_common.protocol.log.commands import Command, Drained, Join, Publish, Ready, Register, Sender, Unpublish
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.queries import JobOpened, QueryError, Status

WAIT_S_MAX = 60.0
WISH = Publish(model="policy", replica="nobody")


async def leader_of(bus: Bus, job: str) -> str | None:
    with contextlib.suppress(NoResponder, NoAnswer, msgspec.MsgspecError):
        answer = await bus.request(subjects.query_subject(job, "status"), b"", 0.5)
        return msgspec.json.decode(answer, type=Status).registry
    return None


async def asked(bus: Bus, subject: str, kind: Any, body: bytes = b"") -> Any:
    answer = await retried(lambda: bus.request(subject, body, 5.0), NoResponder, NoAnswer, NoBus)
    return msgspec.json.decode(answer, type=kind)


class Passing:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


class WatchedJob:
    """A job and all that has come into its log since it was opened."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.bus = bus
        self.log = JobLog(bus, name)
        self.entries: list[StoredEntry] = []
        self._arrived = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open it as the SDK does, which may have to wait until a registry leads."""
        assert await self.ask("open", JobOpened | QueryError) == JobOpened(job=self.name)
        self._following = asyncio.create_task(self._follow())

    async def ask(self, what: str, kind: Any, body: bytes = b"") -> Any:
        return await asked(self.bus, subjects.query_subject(self.name, what), kind, body)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    async def _follow(self) -> None:
        async for entry in self.log.follow():
            self.entries.append(entry)
            self._arrived.set()

    async def say(self, command: Command = WISH, headers: dict[str, str] | None = None) -> int:
        verb = str(command.__struct_config__.tag)
        process = "" if command.by is None else f".{command.by.process}"
        subject = f"tensorhub.v1.{self.name}.cmd.{verb}{process}"
        return await self.log.append(subject, encode(command), uuid4().hex, headers or {})

    @property
    def events(self) -> list[AnyEvent]:
        return [decode_event(entry.data) for entry in self.entries if ".event." in entry.subject]

    async def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S_MAX) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"within {timeout_s} s it did not happen that {what}") from None

    async def answered(self, command: Command = WISH) -> list[AnyEvent]:
        return await self.outcome(await self.say(command))

    async def outcome(self, seq: int) -> list[AnyEvent]:
        def group() -> list[AnyEvent]:
            return [event for event in self.events if event.cmd == seq]

        def is_whole() -> bool:
            events = group()
            return bool(events) and len(events) == events[0].k

        await self.wait_for(is_whole, f"command {seq} has its outcome")
        return group()

    async def wait_settled(self, timeout_s: float = WAIT_S_MAX) -> None:
        """Wait until each command has its group, and check that there is exactly one of each, in order."""
        last = await self.log.last_command()
        assert last is not None

        def is_settled() -> bool:
            events = self.events
            if not events or events[-1].cmd < last.seq or events[-1].i < events[-1].k:
                return False
            # A registry that leads anew says so, perhaps after `last`.
            return events[-1].cmd == max(entry.seq for entry in self.entries if ".cmd." in entry.subject)

        await self.wait_for(is_settled, f"command {last.seq} has its outcome", timeout_s)
        assert self.events == decided(self.entries, self.name)


class Stage:
    def __init__(self, nats: RunningNats, bus: Bus, folder: Path, job: str) -> None:
        self.nats, self.bus, self.job = nats, bus, job
        self._folder = folder
        self._registries: list[RunningService] = []
        self._jobs: list[WatchedJob] = []

    def registry(
        self, name: str = "registry-0", *, module: str = "tensorhub_registry", **environ: str
    ) -> RunningService:
        registry = RunningService(self.nats.url, name, self._folder / f"{name}.log", module=module, **environ)
        self._registries.append(registry)
        return registry

    async def started(self, *name: str, **options: str) -> RunningService:
        """Start a registry, which need not be ready yet."""
        registry = self.registry(*name, **options)
        await registry.start()
        return registry

    async def pair(self, *, lease_s: int = 1) -> list[RunningService]:
        pair = [self.registry(name, TENSORHUB_LEADER_TTL_S=str(lease_s)) for name in ("registry-0", "registry-1")]
        for registry in pair:
            await registry.start()
            await registry.wait_ready(self.bus)
        return pair

    async def open(self, name: str = "") -> WatchedJob:
        """Open a job, the test's own or another one, and watch its log."""
        job = WatchedJob(self.bus, name or self.job)
        self._jobs.append(job)
        await job.open()
        return job

    async def close(self) -> None:
        for job in self._jobs:
            await job.close()
        for registry in self._registries:
            await registry.kill()


@pytest.fixture
async def stage(own_nats_server: RunningNats, own_bus: Bus, tmp_path: Path, job: str) -> AsyncIterator[Stage]:
    made = Stage(own_nats_server, own_bus, tmp_path, job)
    yield made
    await made.close()


SHARD: dict[str, Any] = {"model": "policy", "replica": "trainer", "shard": 0}


def commands(count: int) -> list[Command]:
    """Return a trainer's life: publish, unpublish, publish; groups have one event or two."""
    said: list[Command] = [
        Join(by=Sender("a", 1, 1), host="h", site="s"),
        Register(by=Sender("a", 1, 2), **SHARD, shards=1, layout="b" * 64, nbytes=8),
    ]
    while len(said) < count:
        n = len(said) + 1
        said += [
            Ready(by=Sender("a", 1, n), **SHARD, version=None, root="a" * 32),
            Unpublish(by=Sender("a", 1, n + 1), **SHARD),
            Drained(by=Sender("a", 1, n + 2), **SHARD),
            Publish(model="policy", replica="trainer", version=0),
        ]
    return said


async def say_all(
    watched: WatchedJob, said: list[Command], pause_s: float, enough: asyncio.Event | None = None
) -> None:
    for command in said:
        if enough is not None and enough.is_set():
            return
        await watched.say(command)
        await asyncio.sleep(pause_s)
