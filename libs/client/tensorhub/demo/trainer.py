"""The demo's trainer, `python -m tensorhub.demo.trainer PART`: learns, and publishes each version where it trains.

Its model stands in two shards of hub memory, and the optimizer writes there. So each turn is: unpublish, take some
steps, publish. Always true: no step is taken while a version is published; what it says of a version's bytes it has
computed before it publishes it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import torch

from tensorhub import AsyncHub, AsyncShard, NotPublished, connect_async
from tensorhub.demo.calling import calling
from tensorhub.demo.digests import digests_of, nbytes_of
from tensorhub.demo.learning import Learner
from tensorhub.demo.messages import (
    MODEL,
    SHARDS,
    TRAINER,
    Joined,
    Leave,
    Part,
    Prove,
    Proved,
    Published,
    Rest,
    Rested,
    Sealed,
    Stepped,
    Unpublished,
)
from tensorhub.demo.model import build
from tensorhub.demo.split import shard_modules
from tensorhub.demo.station import Station, part_given

CONNECT_S: Final = 30.0
FOLLOWED_S: Final = 3.0
"""How long the trainer waits for rollouts that have yet to fetch a version before it trains on."""
FIRST_FOLLOWED_S: Final = 20.0
"""The same for the first version, while they still start."""
FOLLOWED_WAIT_S: Final = 0.05

Result = TypeVar("Result")


class Trainer:
    """The training loop, and what it says of itself."""

    def __init__(self, part: Part, station: Station) -> None:
        self._part = part
        self._station = station
        self._model = build(part.size)
        self._learner = Learner(self._model, rows=part.rows, row_tokens=part.row_tokens)
        self._loss: float | None = None
        self._is_over = False

    async def run(self, hub: AsyncHub) -> None:
        """Train until told to rest; then keep the last version until told to leave."""
        shards = [
            await self._call(partial(hub.register, MODEL, half, replica=TRAINER, shard=number, shards=SHARDS))
            for number, half in enumerate(shard_modules(self._model, SHARDS))
        ]
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._station.say(Joined(parameters=parameters, nbytes=nbytes_of(self._model), version=None))
        version = 1
        await self._publish(shards, version)
        await self._followed(hub, version, FIRST_FOLLOWED_S)
        while not self._told_to_rest():
            await asyncio.gather(*(self._unpublish(shard) for shard in shards))
            self._station.say(Unpublished(version=version))
            await asyncio.to_thread(self._train)
            version += 1
            await self._publish(shards, version)
            await self._followed(hub, version, FOLLOWED_S)
        if self._is_over:
            return
        self._station.say(Rested(version=version))
        while not isinstance(await self._station.next(), Leave):
            digests = await asyncio.to_thread(digests_of, self._model)
            self._station.say(Proved(version=version, nbytes=nbytes_of(self._model), digests=digests))

    async def _publish(self, shards: list[AsyncShard], version: int) -> None:
        digests = await asyncio.to_thread(digests_of, self._model)
        self._station.say(Sealed(version=version, nbytes=nbytes_of(self._model), digests=digests))
        await asyncio.gather(*(self._call(partial(shard.publish, version)) for shard in shards))
        self._station.say(Published(version=version, at=time.time(), loss=self._loss))

    async def _unpublish(self, shard: AsyncShard) -> None:
        # Of a call that was made again the first one may have come to its end after all.
        with suppress(NotPublished):
            await self._call(shard.unpublish)

    async def _call(self, call: Callable[[], Awaitable[Result]]) -> Result:
        return await calling(call, self._station)

    def _train(self) -> None:
        for _ in range(self._part.steps):
            step = self._learner.step()
            self._loss = step.loss
            self._station.say(Stepped(step=step.number, loss=step.loss, seconds=step.seconds))

    async def _followed(self, hub: AsyncHub, version: int, bound_s: float) -> None:
        """Wait, within a bound, until each rollout that holds a version or waits for one has this one.

        A trainer need not: a version that it has unpublished lives on in whoever holds it. But a version that nobody
        has fetched yet would be gone, and here each of them is to be seen.
        """
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            replicas = await self._call(partial(hub.replicas, MODEL))
            rollouts = [each for each in replicas if each.replica != TRAINER]
            active = [each for each in rollouts if each.version is not None or each.round is not None]
            if active and all(each.version == version for each in active):
                return
            await asyncio.sleep(FOLLOWED_WAIT_S)

    def _told_to_rest(self) -> bool:
        order = self._station.told()
        self._is_over = isinstance(order, Leave)
        assert not isinstance(order, Prove), "a trainer proves what it holds only when it rests"
        return isinstance(order, Rest | Leave)


async def main() -> None:
    """Play the part."""
    part = part_given()
    torch.set_num_threads(part.threads)
    station = Station()
    await station.open()
    async with await connect_async(part.job, agent=part.agent, timeout_s=CONNECT_S) as hub:
        await Trainer(part, station).run(hub)


if __name__ == "__main__":
    asyncio.run(main())
