"""Stops a source in the middle of a read, lets the read end elsewhere, wakes the source, and watches the memory.

    python -m tests.chaos.late_bytes --rounds 50 [--hosts 2] [--mib 256] [--seed S]

What a stopped source had under way goes on when it wakes, and by then the replica's memory may be in use: every bit of
it is turned over before the source is woken, and from then on not a byte may change.
"""

import asyncio
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.content import MIB
from tests.chaos.scenario import arguments
from tests.chaos.two_holders import HOLDERS, Read, TwoHolders, two_holders
from tests.kit.waiting import Missed, wake
from tests.stopping import stop

WATCH_S: Final = 0.5
"""So long after its answer a woken source is still watched; what it had to send is gone in some milliseconds."""

MISSES_MAX: Final = 20
"""In a row: then the reads are too short for this machine."""

NARROWER: Final = 0.8
"""After each miss moments are drawn from so much of the time before: reads may be faster than the calm one was."""

SETTINGS: Final = {"TENSORHUB_STALL_S": "1.0"}
"""A stopped source is left after a second, also before its rate is known."""


@dataclass(slots=True)
class Rounds:
    reads: list[Read] = field(default_factory=list)
    missed: int = 0
    looks: int = 0
    """How often the whole memory was hashed after a source was woken."""
    changed: list[str] = field(default_factory=list)


async def play(holders: TwoHolders, rounds: int, seed: int) -> Rounds:
    chance, found, misses = random.Random(seed), Rounds(), 0
    while len(found.reads) < rounds:
        try:
            read = await _round(holders, chance, found, holders.calm_s * NARROWER**misses)
        except Missed as why:
            found.missed += 1
            misses += 1
            if misses > MISSES_MAX:
                raise AssertionError(f"no stop meets the middle of a read: {why}") from None
            continue
        misses = 0
        found.reads.append(read)
        print(
            f"round {len(found.reads):3}: {read.victim} stopped at {1e3 * read.moment_s:5.0f} ms, read over after "
            f"{read.after_s:5.2f} s, {read.report.wasted_bytes / MIB:3.0f} MiB again",
            flush=True,
        )
    return found


async def _round(holders: TwoHolders, chance: random.Random, found: Rounds, within_s: float) -> Read:
    victim, moment_s = chance.choice(HOLDERS), chance.uniform(0, within_s)
    pid = holders.hub.pid(victim)
    async with holders.reader() as reader:
        try:
            read = await holders.struck(reader, victim, moment_s, stop)
            reader.scribble()
            before = reader.digest()
        finally:
            wake(pid)
        answering = asyncio.create_task(holders.hub.until_back(victim))
        until = float("inf")
        while time.monotonic() < until:
            found.looks += 1
            if await asyncio.to_thread(reader.digest) != before:
                found.changed.append(f"{victim} wrote after it was woken, stopped at {moment_s:.3f} s")
                break
            if answering.done() and until == float("inf"):
                until = time.monotonic() + WATCH_S
        await answering
    return read


async def main() -> int:
    args = arguments(__doc__, rounds=50, hosts=2, mib=256, seed=random.randrange(1_000_000))
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-late-"))
    print(f"seed {args.seed}; logs in {directory}/logs")
    async with two_holders(directory, args.mib * MIB, hosts=args.hosts, **SETTINGS) as holders:
        found = await play(holders, args.rounds, args.seed)
    again = [read.report.wasted_bytes for read in found.reads]
    under_way = sum(each > 0 for each in again)
    print(
        f"{len(found.reads)} rounds ({found.missed} moments missed): {under_way} with bytes under way at the stopped "
        f"source, {sum(again) / MIB:.0f} MiB taken elsewhere; memory hashed {found.looks} times after waking, "
        f"{len(found.changed)} rounds with a changed byte"
    )
    if found.changed or not under_way:
        print("\n".join(found.changed) or "no round stopped a source with bytes under way: this shows nothing")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
