"""Telemetry on against off, in one hub: its publisher has versions traced for some seconds, then for as long not.

Two hubs that are alike differ by some percent for as long as they live, by where their memory and processes happen to
be, which is more than is to be seen here. So it is one hub, and what changes is the publisher's word in each version's
`traceparent`: sampled, or not. Of a version that isn't sampled no process notes, makes, hands over or keeps anything.

The measurement goes in pairs of blocks, every second pair in the other order. Spans are made and kept up to a second
after a version, so the first `SETTLE_S` of a block don't count. A pair's ratio is off's median time over on's, so 1
means that telemetry costs nothing; the whole's is the geometric mean of the pairs', and its interval a bootstrap over
pairs. Beside it stands what all processes together spent for a version.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import report
from benchmarks.fleet import READERS, Fleet
from benchmarks.ours import Ours
from benchmarks.processor import used_s
from benchmarks.small import WARM_UP, Latency, of_hub
from tensorhub.up.up import Up
from tensorhub_common.span_keeper import WRITE_EVERY_S
from tensorhub_common.spanmaker import LATER_S

RATIO_MIN: Final = 0.98
RESAMPLES: Final = 4000
SEED: Final = 1
INTERVAL: Final = (0.025, 0.975)

SETTLE_S: Final = WRITE_EVERY_S + LATER_S + 0.15
"""So long after a switch what the last block left behind is being kept."""

BLOCK_S: Final = 6.0
"""A block goes on for so long: many times what the writing of spans is put off."""

SETTLE_ROUNDS_MIN: Final = 1
BLOCK_ROUNDS_MIN: Final = 3

Once = Callable[[], Awaitable[float]]
Switch = Callable[[bool], Awaitable[None]]
Spent = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Block:
    """Rounds in a row, all of them traced or none: the time of each, and the processor time of one, in s."""

    times: list[float]
    processor: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A block with telemetry on and one with it off, one right after the other."""

    on: Block
    off: Block

    def ratio(self) -> float:
        """Return off's median time over on's."""
        return statistics.median(self.off.times) / statistics.median(self.on.times)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of one measurement."""

    what: str
    pairs: list[Pair] = field(default_factory=list)

    def ratio(self) -> float:
        """Return the geometric mean of the pairs' ratios."""
        return statistics.geometric_mean(pair.ratio() for pair in self.pairs)

    def interval(self) -> tuple[float, float]:
        """Return between what the ratio lies with 95 %: pairs are drawn again and again."""
        chance, ratios = random.Random(SEED), [pair.ratio() for pair in self.pairs]
        found = sorted(statistics.geometric_mean(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
        low, high = (found[int(share * (RESAMPLES - 1))] for share in INTERVAL)
        return low, high

    def medians(self) -> tuple[float, float]:
        """Return the median times with telemetry on and off, in s."""
        on = statistics.median(took for pair in self.pairs for took in pair.on.times)
        off = statistics.median(took for pair in self.pairs for took in pair.off.times)
        return on, off

    def processor(self) -> tuple[float, float]:
        """Return the processor time of a round with telemetry on and off, in s: the medians over the blocks."""
        on = statistics.median(pair.on.processor for pair in self.pairs)
        off = statistics.median(pair.off.processor for pair in self.pairs)
        return on, off

    def rounds(self) -> int:
        """Return how many rounds were timed."""
        return sum(len(pair.on.times) + len(pair.off.times) for pair in self.pairs)


async def compare(what: str, once: Once, switch: Switch, spent: Spent, pairs: int, block_s: float) -> Comparison:
    """Measure so many pairs of blocks. `spent` tells the processor time that all have used up to now."""
    found = Comparison(what)
    for number in range(pairs):
        print(f"{what}: pair {number} of {pairs}", file=sys.stderr)
        blocks: dict[bool, Block] = {}
        for is_on in (True, False) if number % 2 == 0 else (False, True):
            await switch(is_on)
            blocks[is_on] = await _block(once, spent, block_s)
        found.pairs.append(Pair(blocks[True], blocks[False]))
    return found


async def _block(once: Once, spent: Spent, block_s: float) -> Block:
    began, settling = time.monotonic(), 0
    while time.monotonic() - began < SETTLE_S or settling < SETTLE_ROUNDS_MIN:
        await once()
        settling += 1
    times: list[float] = []
    began, spent_before = time.monotonic(), spent()
    while time.monotonic() - began < block_s or len(times) < BLOCK_ROUNDS_MIN:
        times.append(await once())
    return Block(times, (spent() - spent_before) / len(times))


async def measure(mib: int, pairs: int, environment: Mapping[str, str]) -> list[Comparison]:
    """Measure the large model's read, to one and to four, and the small model's latency."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(await Fleet.start(environment))
        await fleet.trainer.ask("trace_when_told")

        async def switch(is_on: bool) -> None:  # noqa: FBT001 (what it switches is all that it is called with)
            await fleet.trainer.ask("trace", on=is_on)

        large = Ours("TensorHub", fleet, mib, transport="local", digests=True, environment=environment)
        stack.push_async_callback(large.stop)
        await large.start()
        pids = [*of_hub(large.hub).values(), *fleet.pids.values()]
        found = [
            await compare(
                f"{mib} MiB, 1→{readers}", _reading(large, readers), switch, lambda: used_s(pids), pairs, BLOCK_S
            )
            for readers in (1, READERS)
        ]
        await large.stop()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-bench-"))
        up = await stack.enter_async_context(Up(Path(folder), agents=1 + READERS, environment=environment))
        small = Latency(fleet, up.hub, "local")
        await small.start()
        small_pids = [*of_hub(up.hub).values(), *fleet.pids.values()]
        once = _publishing(small)
        for _ in range(WARM_UP):
            await once()
        what = "1 MiB, publish → 4 ready"
        found.append(await compare(what, once, switch, lambda: used_s(small_pids), pairs, BLOCK_S))
        await small.stop()
    return found


def _reading(hub: Ours, readers: int) -> Once:
    async def once() -> float:
        return (await hub.run(readers)).seconds

    return once


def _publishing(small: Latency) -> Once:
    async def once() -> float:
        return (await small.once())[0]

    return once


def words(found: Sequence[Comparison]) -> str:
    """Return the table."""
    rows = []
    for comparison in found:
        low, high = comparison.interval()
        on, off = comparison.medians()
        spent_on, spent_off = comparison.processor()
        rows.append(
            (
                comparison.what,
                f"{on * 1000:.1f}",
                f"{off * 1000:.1f}",
                f"{comparison.ratio():.3f}",
                f"{low:.3f} – {high:.3f}",
                f"{spent_on * 1000:.1f}",
                f"{spent_off * 1000:.1f}",
                f"{comparison.rounds()} in {len(comparison.pairs)}",
                "met" if comparison.ratio() >= RATIO_MIN else "missed",
            )
        )
    head = (
        "telemetry", "on, ms", "off, ms", "off / on", "95 %", "CPU on, ms", "CPU off, ms", "rounds, pairs",
        f"≥ {RATIO_MIN}",
    )  # fmt: skip
    return report.table(head, rows)
