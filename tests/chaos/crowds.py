"""Many of one thing at once, at a real hub whose agent is killed or stopped meanwhile: all end well or in an error.

    python -m tests.chaos.crowds shards [--shards 1000] [--refused 3]
    python -m tests.chaos.crowds calls [--calls 1000]
    python -m tests.chaos.crowds readers [--readers 1000] [--install in-place] [--kib 64] [--stopped-s 2]
    python -m tests.chaos.crowds jobs [--jobs 100]

`shards`: an agent with all the shards that it may have is asked for more, is killed, and finds each and its version.
`calls`: so many calls are under way when the agent is killed; each ends, and afterwards every shard serves.
`readers`: so many read one version at once from an agent that is stopped and woken; then all update to the next one.
`jobs`: a connection for each job, and in each a trainer and a reader, all at once.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from tests.chaos.memory_marks import manifests_of, segments_of
from tests.chaos.scenario import arguments
from tests.kit.hubs import RunningHub, running_hub

import tensorhub
from tensorhub import AsyncHub, AsyncShard
from tensorhub.arguments import Install

JOB: Final = "crowd"
ELEMENTS: Final = 16
VALUES_PER_KIB: Final = 256
CALL_S: Final = 120.0
"""The bound of each call: a crowd waits for its turn."""

T = TypeVar("T")


@dataclass(slots=True)
class Crowd:
    """How a crowd's calls ended, and how long each part took."""

    took_s: dict[str, float] = field(default_factory=dict)
    raised: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def timed(self, part: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.took_s[part] = time.monotonic() - began

    def ended(self, ends: Iterable[object]) -> int:
        returned = 0
        for end in ends:
            if isinstance(end, tensorhub.TensorHubError):
                self.raised[type(end).__name__] += 1
            elif isinstance(end, BaseException):
                self.wrong.append(f"{type(end).__name__}: {end}")
            else:
                returned += 1
        return returned

    def check(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 (what is checked)
        if not holds:
            self.wrong.append(otherwise)

    @property
    def table(self) -> str:
        lines = [f"  {part:<44} {took_s:8.2f} s" for part, took_s in self.took_s.items()]
        lines += [f"  {count} calls raised {error}" for error, count in self.raised.items()]
        lines += [f"  WRONG: {each}" for each in self.wrong[:20]]
        return "\n".join([*lines, f"  {len(self.wrong)} wrong"])


def values(number: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(number))


async def every(numbers: Iterable[int], work: Callable[[int], Awaitable[T]]) -> list[T | BaseException]:
    return await asyncio.gather(*(work(number) for number in numbers), return_exceptions=True)


async def all_do(crowd: Crowd, part: str, numbers: Iterable[int], work: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """Do the work for each number at once; each must return. Return the results."""
    asked = list(numbers)
    ends = await crowd.timed(f"{len(asked)} {part}", every(asked, work))
    returned = crowd.ended(ends)
    crowd.check(returned == len(asked), f"{returned} of {len(asked)} {part}: {first(ends)}")
    return {number: end for number, end in zip(asked, ends, strict=True) if not isinstance(end, BaseException)}


async def all_shards(
    crowd: Crowd, part: str, shards: Mapping[int, AsyncShard], work: Callable[[AsyncShard], Awaitable[object]]
) -> None:
    await all_do(crowd, f"shards {part}", shards, lambda number: work(shards[number]))


async def registered(crowd: Crowd, hub: AsyncHub, count: int) -> dict[int, AsyncShard]:
    async def register(number: int) -> AsyncShard:
        return await hub.register(f"m{number}", {"w": values(number)}, replica="r", timeout_s=CALL_S)

    return await all_do(crowd, "shards registered", range(count), register)


def hold(crowd: Crowd, shards: Mapping[int, AsyncShard], of: Callable[[int], torch.Tensor] = values) -> None:
    wrong = [number for number, shard in shards.items() if not torch.equal(shard.tensors["w"], of(number))]
    crowd.check(not wrong, f"{len(wrong)} shards hold other bytes, {wrong[:5]} among them")


async def release(crowd: Crowd, shards: Mapping[int, AsyncShard]) -> None:
    await all_shards(crowd, "released", shards, lambda shard: shard.release(timeout_s=CALL_S))


def check_files(crowd: Crowd, hub: RunningHub, count: int) -> None:
    found = len(manifests_of(hub.directory)), len(segments_of(hub.directory))
    crowd.check(found == (count, count), f"{found} manifests and segments for {count} shards")


async def shards(directory: Path, count: int, refused: int) -> Crowd:
    crowd = Crowd()
    async with running_hub(directory, agents=1) as hub, await hub.connect(JOB) as mine, await hub.connect(JOB) as other:
        made = await registered(crowd, mine, count)
        await all_shards(crowd, "published", made, lambda shard: shard.publish(1, timeout_s=CALL_S))

        async def too_many(number: int) -> AsyncShard:
            return await other.register(f"x{number}", {"w": values(number)}, replica="r", timeout_s=CALL_S)

        if refused:
            errors = await crowd.timed(f"{refused} more refused", every(range(refused), too_many))
            crowd.ended(errors)
            kinds = {type(each).__name__ for each in errors}
            crowd.check(kinds == {"MemoryExhausted"}, f"more shards than it may have met with {kinds}")
        check_files(crowd, hub, count)
        await crowd.timed("killed, until it answers again", hub.until_back("agent-0", hub.kill("agent-0")))
        await all_shards(crowd, "unpublished", made, lambda shard: shard.unpublish(timeout_s=CALL_S))
        hold(crowd, made)
        await release(crowd, made)
        check_files(crowd, hub, 0)
    return crowd


async def calls(directory: Path, count: int) -> Crowd:
    crowd = Crowd()
    async with running_hub(directory, agents=1) as hub, await hub.connect(JOB) as mine:
        made = await registered(crowd, mine, count)
        calls = asyncio.ensure_future(every(made, lambda number: made[number].publish(1, timeout_s=CALL_S)))
        while not any(shard.version for shard in made.values()):  # noqa: ASYNC110 (only a shard shows it)
            await asyncio.sleep(0)
        killed = hub.kill("agent-0")
        crowd.check(not all(shard.version for shard in made.values()), "the agent was killed after the last call")
        crowd.ended(await crowd.timed(f"{count} calls, the agent killed meanwhile", calls))
        await hub.until_back("agent-0", killed)
        await all_shards(crowd, "published anew", made, _anew)
        hold(crowd, made)
        await release(crowd, made)
    return crowd


async def _anew(shard: AsyncShard) -> int:
    if shard.version is not None:
        await shard.unpublish(timeout_s=CALL_S)
    return await shard.publish(timeout_s=CALL_S)


async def readers(directory: Path, count: int, install: Install, kib: int = 64, stopped_s: float = 2.0) -> Crowd:
    crowd = Crowd()
    content = torch.arange(kib * VALUES_PER_KIB, dtype=torch.float32)
    spec = {"w": tensorhub.TensorSpec(tuple(content.shape), torch.float32)}
    # However long the source is stopped, the log counts it.
    async with running_hub(directory, TENSORHUB_LOST_AFTER_S="600") as hub, hub.connected(JOB) as (there, here):
        # While it is mapped a trainer needs other memory.
        beside: Install = "staged" if install == "mapped" else "in-place"
        trainer = await there.register("m", {"w": content}, replica="trainer", install=beside)

        async def register(number: int) -> AsyncShard:
            return await here.register("m", spec, replica=f"r{number}", install=install, timeout_s=CALL_S)

        made = await all_do(crowd, "readers registered", range(count), register)
        await trainer.publish(1)
        reading = asyncio.ensure_future(
            all_shards(crowd, f"read ({install})", made, lambda shard: shard.replicate(timeout_s=CALL_S))
        )
        await _stopped(crowd, hub, made, stopped_s, reading)
        await reading
        hold(crowd, made, lambda _: content)
        await trainer.unpublish(timeout_s=CALL_S)
        trainer.tensors["w"].neg_()
        await trainer.publish(2)
        await all_shards(crowd, f"updated ({install})", made, lambda shard: shard.update(timeout_s=CALL_S))
        hold(crowd, made, lambda _: -content)
        await release(crowd, made)
    return crowd


async def _stopped(
    crowd: Crowd, hub: RunningHub, made: dict[int, AsyncShard], stopped_s: float, reading: asyncio.Future[None]
) -> None:
    """Stop the source once the first reader has the version, and wake it."""
    while not reading.done() and not any(shard.version for shard in made.values()):  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0)
    missing = sum(shard.version is None for shard in made.values())
    with hub.stopped("agent-0"):
        await asyncio.sleep(stopped_s)
        done = missing - sum(shard.version is None for shard in made.values())
    crowd.took_s[f"of it the source stopped ({missing} to go, {done} meanwhile)"] = stopped_s


async def jobs(directory: Path, count: int) -> Crowd:
    crowd = Crowd()
    async with running_hub(directory, agents=1) as hub:
        agent, nats = hub.file.agents[0].socket, hub.file.nats_all

        async def play(number: int) -> None:
            job = f"{JOB}-{number}"
            async with await tensorhub.connect_async(job, agent=agent, nats=nats, timeout_s=CALL_S) as mine:
                trainer = await mine.register("m", {"w": values(number)}, replica="trainer", timeout_s=CALL_S)
                reader = await mine.register("m", {"w": values(-1)}, replica="reader", timeout_s=CALL_S)
                await trainer.publish(1, timeout_s=CALL_S)
                await reader.replicate(timeout_s=CALL_S)
                same = bool(torch.equal(reader.tensors["w"], values(number)))
                crowd.check(same, f"the reader of job {job} has other values")

        await all_do(crowd, "jobs, each with a publish and a read", range(count), play)
    return crowd


def first(ends: Iterable[object]) -> str:
    return next((str(each) for each in ends if isinstance(each, BaseException)), "no error")


PARTS: Final[dict[str, tuple[Callable[..., Coroutine[Any, Any, Crowd]], dict[str, Any]]]] = {
    "shards": (shards, {"shards": 1000, "refused": 3}),
    "calls": (calls, {"calls": 1000}),
    "readers": (readers, {"readers": 1000, "install": "in-place", "kib": 64, "stopped_s": 2.0}),
    "jobs": (jobs, {"jobs": 100}),
}
"""What plays each part, and its options with their defaults, in the order of its arguments."""


def main() -> None:
    if sys.argv[1:2] == [] or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    part = sys.argv.pop(1)
    play, defaults = PARTS[part]
    chosen = arguments(__doc__, **defaults)
    with tempfile.TemporaryDirectory(prefix="crowds-") as folder:
        crowd = asyncio.run(play(Path(folder), *(getattr(chosen, name) for name in defaults)))
    print(f"crowds {part}:\n{crowd.table}", flush=True)
    sys.exit(1 if crowd.wrong else 0)


if __name__ == "__main__":
    main()
