"""A version on two agents of one host, and a reader whose memory is looked at from outside: sources are struck here."""

import asyncio
import mmap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import torch
import xxhash
from tests.chaos.content import Content
from tests.chaos.memory_marks import first_bytes, segments_of
from tests.chaos.scenario import Blow
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import Missed, until

from tensorhub import AsyncHub, AsyncShard, ReadReport

MODEL: Final = "policy"
VERSION: Final = 7
HOLDERS: Final = ("agent-0", "agent-2")
READER: Final = "agent-1"
"""With two hosts agent i is on host i mod 2, so the holders are on the one and the reader is on the other."""

READ_S: Final = 30.0
BACK_S: Final = 30.0
"""A holder that was stopped or killed holds its version again within this."""


@dataclass(frozen=True, slots=True)
class Read:
    victim: str
    moment_s: float
    """After the first byte."""
    after_s: float
    """How long after the blow the call returned."""
    report: ReadReport


class TwoHolders:
    """The hub, with the version on both holders. Make it with `two_holders`."""

    def __init__(self, hub: RunningHub, content: Content, readers: AsyncHub) -> None:
        self.hub, self.content = hub, content
        self.calm_s = 0.0
        """How long a read takes during which no process is struck."""
        self._readers = readers
        self._numbers = count()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["Reader"]:
        """Register an empty replica of its own name, and free it afterwards."""
        before = set(segments_of(self.hub.directory))
        shard = await self._readers.register(MODEL, self.content.specs, replica=f"reader-{next(self._numbers)}")
        try:
            (segment,) = set(segments_of(self.hub.directory)) - before
            yield Reader(shard, segment)
        finally:
            await shard.release()

    async def calm(self) -> None:
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
        blow(self.hub.pid(victim))
        at = time.monotonic()
        assert await reading == VERSION
        self.check(reader)
        report = reader.shard.last_read
        assert report is not None
        if victim not in {source.agent for source in report.sources}:
            raise Missed(f"{victim} was not read from: {report}")
        return Read(victim, moment_s, time.monotonic() - at, report)

    def check(self, reader: "Reader") -> None:
        wrong = self.content.wrong(reader.shard.tensors, VERSION)
        assert wrong is None, wrong

    async def both_hold(self) -> None:
        for holder in HOLDERS:
            await self.hub.until_back(holder)

        async def are_holders() -> bool:
            # Each replica is named after its agent.
            found = (each.holders for each in await self._readers.versions(MODEL) if each.version == VERSION)
            return set(HOLDERS) <= set(next(found, ()))

        await until(are_holders, "both hold the version", BACK_S)


class Reader:
    """One shard that is read into, and its memory seen from outside."""

    def __init__(self, shard: AsyncShard, segment: Path) -> None:
        self.shard, self._segment = shard, segment

    async def begin(self) -> "asyncio.Task[int]":
        reading = asyncio.create_task(self.shard.replicate(VERSION, timeout_s=READ_S))
        await first_bytes([self.shard], reading)
        return reading

    def scribble(self) -> None:
        """Turn every bit over, so that a byte of the version that comes now is seen."""
        for tensor in self.shard.tensors.values():
            flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            flat.bitwise_not_()

    def digest(self) -> str:
        with self._segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return xxhash.xxh3_128_hexdigest(memory)


@asynccontextmanager
async def two_holders(directory: Path, nbytes: int, *, hosts: int, **settings: str) -> AsyncIterator[TwoHolders]:
    """Bring up a hub with three agents, publish on the first holder and copy to the second, and read once in peace."""
    content = Content(seed=7, shard=0, shards=1, nbytes=nbytes)
    async with (
        running_hub(directory, agents=3, hosts=hosts, settings=settings) as hub,
        hub.connected("two-holders", agents=3) as agents,
    ):
        first, second = [await agents[at].register(MODEL, content.specs, replica=f"agent-{at}") for at in (0, 2)]
        content.write(first.tensors, VERSION)
        await first.publish(VERSION)
        await second.replicate(VERSION)
        holders = TwoHolders(hub, content, agents[1])
        await holders.calm()
        yield holders
        # The holder that was struck last must be back when its worker takes leave of it.
        await holders.both_hold()
