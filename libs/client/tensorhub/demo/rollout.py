"""A rollout of the demo, `python -m tensorhub.demo.rollout PART`: follows the weights and generates with them.

Its model is built without memory: the weights stand in two shards of hub memory and are used there. Always true: both
shards are asked to read at the same time, because a replica's round needs both; the model generates only between reads.
"""

import asyncio
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import torch

from tensorhub import AsyncHub, AsyncShard, TensorHubError, VersionUnavailable, connect_async
from tensorhub.demo.calling import calling
from tensorhub.demo.digests import digests_of, nbytes_of
from tensorhub.demo.generate import generate, one_line
from tensorhub.demo.messages import (
    MODEL,
    SHARDS,
    Begin,
    Held,
    Joined,
    Leave,
    Part,
    Prove,
    Proved,
    Said,
    Source,
    Standby,
    Trouble,
)
from tensorhub.demo.model import hollow
from tensorhub.demo.split import shard_modules
from tensorhub.demo.station import Station, part_given

CONNECT_S: Final = 30.0
UPDATE_WAIT_S: Final = 1.0
"""How long one call waits for a newer version; orders are looked at in between."""
FIRST_S: Final = 60.0
TROUBLES_MAX: Final = 8
TROUBLE_WAIT_S: Final = 0.2
PROMPT: Final = "the "
TEMPERATURE: Final = 0.5

Ask = Callable[[AsyncShard], Awaitable[int | None]]


class Rollout:
    """The loop of an engine: fetch what is newer, generate, and so on."""

    def __init__(self, part: Part, station: Station) -> None:
        self._part = part
        self._station = station
        self._model = hollow(part.size)
        self._shards: list[AsyncShard] = []
        self._first: int | str = "latest"
        self._has_read = False
        # Each samples differently, as the rollouts of one batch do.
        self._seed = zlib.crc32(part.replica.encode())

    async def run(self, hub: AsyncHub) -> None:
        """Follow until told to leave."""
        if not await self._begin():
            return
        await self._register(hub)
        troubles = 0
        while True:
            order = self._station.told()
            if isinstance(order, Leave):
                return
            if isinstance(order, Prove):
                await self._prove()
            try:
                await self._turn()
                troubles = 0
            except TensorHubError as error:
                troubles += 1
                self._station.say(Trouble(error=type(error).__name__, message=str(error)))
                if troubles == TROUBLES_MAX:
                    raise
                await asyncio.sleep(TROUBLE_WAIT_S)
                # What the late one was told to fetch may be gone before it comes to it: then it asks again.
                if isinstance(error, VersionUnavailable) and not await self._begin():
                    return

    async def _begin(self) -> bool:
        """Wait until the late one is told what to begin with. False: leave."""
        if self._part.is_late and not self._has_read:
            self._station.say(Standby())
            order = await self._station.next()
            if not isinstance(order, Begin):
                return False
            self._first = order.version
        return True

    async def _register(self, hub: AsyncHub) -> None:
        for number, half in enumerate(shard_modules(self._model, SHARDS)):
            register = partial(hub.register, MODEL, half, replica=self._part.replica, shard=number, shards=SHARDS)
            self._shards.append(await calling(register, self._station))
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._station.say(Joined(parameters=parameters, nbytes=nbytes_of(self._model), version=self._shards[0].version))

    async def _turn(self) -> None:
        if any(shard.version is None for shard in self._shards):
            held = await self._read(lambda shard: shard.replicate(self._first, timeout_s=FIRST_S))
        else:
            held = await self._read(lambda shard: shard.update(wait_s=UPDATE_WAIT_S))
        if held is not None:
            self._has_read = True
            self._station.say(held)
            await self._speak(held.version)

    async def _read(self, ask: Ask) -> Held | None:
        """Let both shards read, and return what came, with the digests of the bytes that stand here now."""
        before = [shard.last_read for shard in self._shards]
        began = time.time()
        answers = await asyncio.gather(*(ask(shard) for shard in self._shards), return_exceptions=True)
        ended = time.time()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        version = self._shards[0].version
        if answers[0] is None or version is None:
            return None
        reports = [
            report
            for shard, old in zip(self._shards, before, strict=True)
            if (report := shard.last_read) is not None and report is not old
        ]
        return Held(
            version=version,
            began=began,
            ended=ended,
            nbytes=nbytes_of(self._model),
            wire_s=max((report.wire_s for report in reports), default=None),
            sources=tuple(
                Source(source.replica, source.nbytes, source.transport)
                for report in reports
                for source in report.sources
            ),
            digests=await asyncio.to_thread(digests_of, self._model),
        )

    async def _speak(self, version: int) -> None:
        began = time.perf_counter()
        text = await asyncio.to_thread(
            generate, self._model, PROMPT, tokens=self._part.tokens, temperature=TEMPERATURE, seed=self._seed + version
        )
        self._station.say(Said(version=version, text=one_line(PROMPT + text), seconds=time.perf_counter() - began))

    async def _prove(self) -> None:
        digests = await asyncio.to_thread(digests_of, self._model)
        version = self._shards[0].version
        self._station.say(Proved(version=version or 0, nbytes=nbytes_of(self._model), digests=digests))


async def main() -> None:
    """Play the part."""
    part = part_given()
    torch.set_num_threads(part.threads)
    station = Station()
    await station.open()
    rollout = Rollout(part, station)
    async with await connect_async(part.job, agent=part.agent, timeout_s=CONNECT_S) as hub:
        await rollout.run(hub)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except TensorHubError as error:
        sys.exit(str(error))
