"""A trainer or an engine that works with the public SDK, never gives up, reports what it meets, and ends at SIGTERM."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from tests.chaos import reports
from tests.chaos.content import Content
from tests.partition.namespaces import enter

import tensorhub
from tensorhub import AsyncHub, AsyncShard, TensorHubError

MODEL: Final = "policy"
TRAINER: Final = "trainer"
CONNECT_S: Final = 10.0
REGISTER_S: Final = 10.0
UNPUBLISH_S: Final = 4.0
PUBLISH_S: Final = 6.0
UPDATE_S: Final = 6.0
UPDATE_WAIT_S: Final = 1.0
ASK_S: Final = 5.0
PAUSE_S: Final = 0.05
THINK_S_MAX: Final = 0.15

MARGIN_S: Final = 3.0
"""A call ends at its bound; the rest is for a busy machine."""

PATIENT_SHARE: Final = 0.5
"""So often a trainer in a hurry waits for its readers all the same."""

HELD_SHARE: Final = 0.3
"""So often what is held is compared again before the next call: ready memory never changes."""

Result = TypeVar("Result")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    seed: int
    replica: str
    """It trains if this is `TRAINER`, and else reads."""
    nbytes: int
    agent: str
    indexes: tuple[int, ...] = (0,)
    shards: int = 1
    think_s_max: float = THINK_S_MAX
    """A trainer's version stays published for up to so long before it takes it back."""
    hurry_s: float | None = None
    """A trainer in a hurry gives its readers half the time at most so long, and loses none with comparing."""
    netns: str = ""
    """The network namespace to live in; empty for the script's own."""

    @property
    def trains(self) -> bool:
        return self.replica == TRAINER


class Worker:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.ending = asyncio.Event()
        self._numbers = 0
        self._contents = {index: Content(config.seed, index, config.shards, config.nbytes) for index in config.indexes}

    async def run(self) -> None:
        hub: AsyncHub = await self._insist(
            "connect", CONNECT_S, 0.0, lambda: tensorhub.connect_async(self.config.job, agent=self.config.agent)
        )
        shards = [await self._register(hub, index) for index in self.config.indexes]
        for shard in shards:
            self._compare(shard, "found")
        fresh = any(shard._attachment.fresh for shard in shards)
        report(reports.Found(at=now(), versions={shard.shard: shard.version for shard in shards}, fresh=fresh))
        if self.config.trains:
            await self._train(hub, shards)
        else:
            await asyncio.gather(*(self._roll_out(shard) for shard in shards))
        await self._timed("close", UNPUBLISH_S, MARGIN_S, lambda: hub.close(timeout_s=UNPUBLISH_S))
        report(reports.Closed(at=now()))

    async def _register(self, hub: AsyncHub, index: int) -> AsyncShard:
        config = self.config
        return await self._insist(
            "register",
            REGISTER_S,
            MARGIN_S,
            lambda: hub.register(
                MODEL,
                self._contents[index].specs,
                replica=config.replica,
                shard=index,
                shards=config.shards,
                timeout_s=REGISTER_S,
            ),
        )

    # The two roles.

    async def _train(self, hub: AsyncHub, shards: list[AsyncShard]) -> None:
        version: int | None = None
        while not self.ending.is_set():
            taken_back = await asyncio.gather(*(self._unpublish(shard) for shard in shards))
            if not all(taken_back):
                await asyncio.sleep(PAUSE_S)
                continue
            if version is None:
                version = await self._next_version(hub)
                continue
            for shard in shards:
                self._contents[shard.shard].write(shard.tensors, version)
                shard.mark_loaded()
            began = now()
            outcomes = await asyncio.gather(*(self._publish(shard, version) for shard in shards))
            if all(outcome is None for outcome in outcomes):
                report(reports.Published(at=now(), version=version, began_at=began))
                version += 1
                await asyncio.sleep(random.uniform(0, self.config.think_s_max))
            elif any(outcome == "VersionConflict" for outcome in outcomes):
                version = None

    async def _unpublish(self, shard: AsyncShard) -> bool:
        hurry_s = self.config.hurry_s
        bound_s = UNPUBLISH_S if hurry_s is None or random.random() < PATIENT_SHARE else random.uniform(0, hurry_s)
        _, error = await self._timed(
            "unpublish", bound_s, MARGIN_S, lambda: shard.unpublish(timeout_s=bound_s), shard.shard
        )
        return error in (None, "NotPublished")

    async def _publish(self, shard: AsyncShard, version: int) -> str | None:
        published, error = await self._timed(
            "publish", PUBLISH_S, MARGIN_S, lambda: shard.publish(version, timeout_s=PUBLISH_S), shard.shard
        )
        if error is not None:
            await asyncio.sleep(PAUSE_S)
        elif published != version:
            sys.exit(f"publish({version}) returned {published}")
        elif self.config.hurry_s is None:
            self._compare(shard, "published")
        return error

    async def _next_version(self, hub: AsyncHub) -> int | None:
        known, _ = await self._timed("versions", ASK_S, 0.0, lambda: hub.versions(MODEL, timeout_s=ASK_S))
        if known is None:
            return None
        return max((info.version for info in known), default=0) + 1

    async def _roll_out(self, shard: AsyncShard) -> None:
        while not self.ending.is_set():
            if random.random() < HELD_SHARE:
                self._compare(shard, "held")
            version, error = await self._timed(
                "update", UPDATE_S, MARGIN_S, lambda: shard.update(UPDATE_WAIT_S, timeout_s=UPDATE_S), shard.shard
            )
            if error is not None:
                await asyncio.sleep(PAUSE_S)
            elif version is not None:
                if shard.version != version:
                    sys.exit(f"update returned {version}, and the shard says that it holds {shard.version}")
                self._compare(shard, "commit")

    # Reporting.

    def _compare(self, shard: AsyncShard, moment: str) -> None:
        content, version = self._contents[shard.shard], shard.version
        if version is None:
            return
        wrong = content.wrong(shard.tensors, version)
        of = reports.Compared(
            at=now(), shard=shard.shard, version=version, nbytes=content.nbytes, moment=moment, wrong=wrong
        )
        report(of)

    async def _timed(
        self,
        call: str,
        bound_s: float,
        margin_s: float,
        make: Callable[[], Awaitable[Result]],
        shard: int | None = None,
    ) -> tuple[Result | None, str | None]:
        self._numbers += 1
        of: dict[str, Any] = {"number": self._numbers, "call": call, "shard": shard, "bound_s": bound_s}
        began, result, outcome, message = now(), None, "done", ""
        report(reports.Begun(at=began, margin_s=margin_s, **of))
        try:
            result = await make()
        except TensorHubError as error:
            outcome, message = error.code, str(error)
        ended = now()
        took_s = ended - began
        report(reports.Ended(at=ended, margin_s=margin_s, took_s=took_s, outcome=outcome, message=message, **of))
        return result, None if outcome == "done" else outcome

    async def _insist(
        self, call: str, bound_s: float, margin_s: float, make: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Make a call until it returns something; the script bounds the time."""
        while True:
            result, _ = await self._timed(call, bound_s, margin_s, make)
            if result is not None:
                return result
            if self.ending.is_set():
                sys.exit(0)
            await asyncio.sleep(PAUSE_S)


def now() -> float:
    return time.monotonic()


def report(what: reports.AnyReport) -> None:
    # One short write to a pipe is whole or not there, also when this process is killed in it.
    os.write(1, msgspec.json.encode(what) + b"\n")


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=Config)
    if config.netns:
        enter(config.netns)
    asyncio.run(_run(Worker(config)))


async def _run(worker: Worker) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.ending.set)
    await worker.run()
