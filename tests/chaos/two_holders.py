"""A version that stands on two agents of one host, and a reader beside or on another host: sources are struck here.

The reader's memory is looked at from outside the hub, through its file in shared memory, so that whatever an agent
writes into it is seen, whoever believes what.
"""

import asyncio
import contextlib
import mmap
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import torch
import xxhash
from tests.chaos.content import Content
from tests.leftovers import memory_of

import tensorhub
from tensorhub import AsyncHub, AsyncShard, ReadReport
from tensorhub.local.hub import LocalHub
from tensorhub_agent.storage.segments import SEGMENT_SUFFIX
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.introspection.ping import ping

JOB: Final = "two-holders"
MODEL: Final = "policy"
VERSION: Final = 7
HOLDERS: Final = ("agent-0", "agent-2")
READER: Final = "agent-1"
"""With two hosts agent i stands on host i mod 2, so the holders are on the one and the reader is on the other."""

BEGIN_S: Final = 10.0
READ_S: Final = 30.0
BACK_S: Final = 30.0
"""A holder that was stopped or killed holds its version again within this."""

ANSWER_S: Final = 20.0
LOOK_S: Final = 0.01

Blow = Callable[[int], None]


class Missed(Exception):
    """The blow did not meet the read, so the round shows nothing."""


def wake(pid: int) -> None:
    """Wake a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """Kill a process."""
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Read:
    """A read that was struck, and ended with the whole version."""

    victim: str
    moment_s: float
    """After the first byte."""
    after_s: float
    """How long after the blow the call returned."""
    report: ReadReport


class Stage:
    """The hub, with the version on both holders. Make it with `two_holders`."""

    def __init__(self, up: LocalHub, directory: Path, content: Content, bus: Bus, readers: AsyncHub) -> None:
        self.content = content
        self.calm_s = 0.0
        """How long a read takes that nobody strikes."""
        self._up, self._directory, self._bus, self._readers = up, directory, bus, readers
        self._numbers = count()

    def pid(self, agent: str) -> int:
        """Return the process of an agent that lives now."""
        return next(each.pid for each in self._up.hub.agents if each.id == agent)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["Reader"]:
        """Register an empty replica of its own name, and free it afterwards."""
        before = set(self._segments())
        shard = await self._readers.register(MODEL, self.content.specs, replica=f"reader-{next(self._numbers)}")
        try:
            (segment,) = set(self._segments()) - before
            yield Reader(shard, segment)
        finally:
            await shard.release()

    def _segments(self) -> list[Path]:
        return memory_of(self._directory, end=SEGMENT_SUFFIX)

    async def calm(self) -> None:
        """Read once in peace, and remember how long that takes."""
        async with self.reader() as reader:
            reading = await reader.begin()
            began = time.monotonic()
            await reading
            self.calm_s = time.monotonic() - began
            self.check(reader)

    async def struck(self, reader: "Reader", victim: str, moment_s: float, blow: Blow) -> Read:
        """Strike a holder so long after the first byte, and wait for the read's end. Raises `Missed`."""
        await self.both_hold()
        reading = await reader.begin()
        await asyncio.sleep(moment_s)
        if reading.done():
            raise Missed(f"the read was over before {moment_s:.3f} s")
        blow(self.pid(victim))
        at = time.monotonic()
        assert await reading == VERSION
        self.check(reader)
        report = reader.shard.last_read
        assert report is not None
        if victim not in {source.agent for source in report.sources}:
            raise Missed(f"{victim} was not read from: {report}")
        return Read(victim, moment_s, time.monotonic() - at, report)

    def check(self, reader: "Reader") -> None:
        """Compare every byte with what it must be."""
        wrong = self.content.wrong(reader.shard.tensors, VERSION)
        assert wrong is None, wrong

    async def both_hold(self) -> None:
        """Wait until both holders have the version, as they and the log say."""
        async with asyncio.timeout(BACK_S):
            for holder in HOLDERS:
                await self.answered(holder)
            while set(HOLDERS) - set(await self._holders()):  # noqa: ASYNC110 (only asking again tells)
                await asyncio.sleep(LOOK_S)

    async def _holders(self) -> tuple[str, ...]:
        """Return the replicas that hold the version; each is named after its agent."""
        return next((each.holders for each in await self._readers.versions(MODEL) if each.version == VERSION), ())

    async def answered(self, agent: str) -> None:
        """Wait until an agent answers a ping."""
        async with asyncio.timeout(ANSWER_S):
            while await ping(self._bus, agent) is None:  # noqa: ASYNC110 (only asking again tells)
                await asyncio.sleep(LOOK_S)


class Reader:
    """One shard that is read into, and its memory seen from outside."""

    def __init__(self, shard: AsyncShard, segment: Path) -> None:
        self.shard, self._segment = shard, segment

    async def begin(self) -> "asyncio.Task[int]":
        """Start the read, and return once bytes have come."""
        reading = asyncio.create_task(self.shard.replicate(VERSION, timeout_s=READ_S))
        marks = [_mark(tensor) for tensor in self.shard.tensors.values() if tensor.numel()]
        async with asyncio.timeout(BEGIN_S):
            # Nobody but the memory tells when its first byte has come.
            while not reading.done() and not any(bool(mark.any()) for mark in marks):  # noqa: ASYNC110
                await asyncio.sleep(0)
        return reading

    def scribble(self) -> None:
        """Turn every bit over, so that a byte of the version that comes now is seen."""
        for tensor in self.shard.tensors.values():
            flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            flat.bitwise_not_()

    def digest(self) -> str:
        """Hash the whole segment."""
        with self._segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return xxhash.xxh3_128_hexdigest(memory)


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first bytes of a tensor; they are zero before anything has come."""
    return tensor.reshape(-1).view(torch.uint8)[:64]


@asynccontextmanager
async def two_holders(directory: Path, nbytes: int, *, hosts: int, **environment: str) -> AsyncIterator[Stage]:
    """Bring up a hub with three agents, publish on the first holder and copy to the second, and read once in peace."""
    content = Content(seed=7, shard=0, shards=1, nbytes=nbytes)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(
            LocalHub(directory, agents=3, hosts=hosts, environment={**os.environ, **environment})
        )
        bus = await stack.enter_async_context(
            await connect(up.hub.nats, name="two-holders", credentials=up.hub.credentials)
        )
        sockets = {each.id: each.socket for each in up.hub.agents}
        hubs = {
            agent: await tensorhub.connect_async(JOB, agent=socket, nats=up.hub.nats)
            for agent, socket in sockets.items()
        }
        for hub in hubs.values():
            stack.push_async_callback(hub.close)
        first, second = [await hubs[agent].register(MODEL, content.specs, replica=agent) for agent in HOLDERS]
        content.write(first.tensors, VERSION)
        await first.publish(VERSION)
        await second.replicate(VERSION)
        stage = Stage(up, directory, content, bus, hubs[READER])
        await stage.calm()
        yield stage
        # Who was struck last is to be back when its worker takes leave of it.
        await stage.both_hold()
