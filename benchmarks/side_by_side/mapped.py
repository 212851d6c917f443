"""How soon readers of one host show a published version that they map.

`python -m benchmarks.side_by_side.mapped [--ray] [--docs]`.

A trainer with two segments publishes, and four engines with `install="mapped"`, which have waited in `update`, show the
version. Every round takes it back while all of them still show it, so the trainer copies into its other memory.
`--ray` runs Ray's zero-copy `ray.get` between the rounds: with its `put`, and of what was put before. Nobody touches a
byte within these times; what the first touch of all pages costs is measured by itself.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import page
from benchmarks.fleet import READERS, Fleet
from benchmarks.llama import MIB, shapes
from benchmarks.side_by_side import environments, machine
from benchmarks.side_by_side.arena import Arena
from benchmarks.side_by_side.contender import PeerProgram, settled
from benchmarks.side_by_side.memcpy import Memcpy
from benchmarks.side_by_side.plan import RAY_QUIET
from tensorhub.local.hub import LocalHub
from tensorhub_common.config.settings import load

MODEL: Final = "mapped"
WAIT_S: Final = 30.0
JOINED_S: Final = 0.3
"""So long the engines have to begin to wait before the version is published."""

GOAL_MS: Final = 20

ROWS: Final[Mapping[str, str]] = {
    "shown": "TensorHub, from `publish`'s return until all four show it",
    "whole": "TensorHub, from `publish`'s call (it digests)",
    "unpublish": "TensorHub, `unpublish` while all four show the version (one copy)",
    "touch": "TensorHub, the first touch of every page, by all four at once",
    "ray got": "Ray, `ray.get` of what was put before",
    "ray": "Ray, `ray.put` and `ray.get`",
    "memcpy": "one memcpy of as many bytes",
}

Times = dict[str, list[float]]


@dataclass(slots=True)
class Contest:
    """One run: ours, and Ray's two ways if wanted."""

    fleet: Fleet
    memcpy: Memcpy
    ray: PeerProgram | None

    async def round(self, times: Times, *, counts: bool) -> None:
        """Publish once, and let the others have a turn."""
        found = await self._ours() | {"memcpy": self.memcpy.run(1)}
        if self.ray is not None:
            took = await self.ray.run(READERS)
            found |= {"ray": took.seconds, "ray got": took.besides["get"]}
        if counts:
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)

    async def _ours(self) -> dict[str, float]:
        trainer, readers = self.fleet.trainer, self.fleet.readers
        await trainer.ask("change")
        updates = [asyncio.create_task(reader.ask("update", wait_s=WAIT_S)) for reader in readers]
        await asyncio.sleep(JOINED_S)
        published = await trainer.ask("publish")
        reads = await asyncio.gather(*updates)
        check(reads, published["version"])
        last = max(read["end"] for read in reads)
        touched = await asyncio.gather(*(reader.ask("touch") for reader in readers))
        await self.fleet.check_equal()
        back = await trainer.ask("unpublish")
        return {
            "shown": last - published["end"],
            "whole": last - published["begin"],
            "touch": max(each["seconds"] for each in touched),
            "unpublish": back["end"] - back["begin"],
        }


def check(reads: Sequence[Any], version: int) -> None:
    """Raise unless every engine has mapped this version."""
    for read in reads:
        whys = [source["why"] for source in read["report"]["sources"]]
        if read["version"] != version or not all(why.startswith("mapped ") for why in whys):
            raise RuntimeError(f"an engine was to map version {version}, and has {read['version']}: {whys}")


async def measure(options: argparse.Namespace, environment: Mapping[str, str]) -> Times:
    """Return all times by row."""
    times: Times = {}
    ray = await environments.prepare("ray") if options.ray else None
    async with AsyncExitStack() as stack:
        # One destination, for memcpy: views need none.
        arena = stack.enter_context(Arena.create(load(environment).shm_dir, options.mib * MIB, readers=1))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-mapped-"))
        fleet = await stack.enter_async_context(await Fleet.start(environment))
        up = await stack.enter_async_context(LocalHub(Path(folder), agents=1 + READERS, environment=environment))
        await fleet.register(up.hub, MODEL, shapes(options.mib), installs=("staged", "mapped"))
        program = None
        if ray is not None:
            around = settled(environment, [*ray.variables.items(), *RAY_QUIET])
            program = PeerProgram("Ray", "ray", arena, how="view", python=ray.python, environment=around)
            stack.push_async_callback(program.stop)
            await program.start()
        contest = Contest(fleet, stack.enter_context(Memcpy(arena)), program)
        for number in range(options.rounds + 1):
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
            await contest.round(times, counts=number > 0)
        if program is not None:
            await program.check()
        await asyncio.gather(*(reader.ask("close") for reader in fleet.readers))
        await fleet.trainer.ask("close")
    return times


def words(times: Times, mib: int, rounds: int, facts: Mapping[str, str]) -> str:
    """Return the table."""
    rows = [
        (
            text,
            f"{statistics.median(times[name]) * 1e3:.1f} ms",
            f"{min(times[name]) * 1e3:.1f}",
            f"{max(times[name]) * 1e3:.1f}",
        )
        for name, text in ROWS.items()
        if name in times
    ]
    shown = statistics.median(times["shown"]) * 1e3
    verdict = "met" if shown <= GOAL_MS else "missed"
    return (
        f"{mib} MiB (291 tensors) to {READERS} readers of one host, {rounds} rounds; {facts.get('processor', '')}. "
        f"Goal: at most {GOAL_MS} ms from `publish`'s return; {verdict} ({shown:.1f} ms).\n\n"
        + page.table(("what", "median", "least", "most"), rows)
    )


def main() -> None:
    """Read the options, measure, and say what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side.mapped", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ray", action="store_true", help="run Ray beside it, in an environment of its own")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/design/benchmarks.md")
    options = parser.parse_args()
    environment = dict(os.environ)
    facts = machine.facts(environment)
    text = words(asyncio.run(measure(options, environment)), options.mib, options.rounds, facts)
    print(text)
    if options.docs:
        page.write("mapped", text)


if __name__ == "__main__":
    main()
