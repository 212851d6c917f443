"""Telemetry on against off: two hubs at once, asked in turn, so that what else the machine does falls on both.

Off is OpenTelemetry's own switch, `OTEL_SDK_DISABLED=true`, for every process of one hub and for its workers. Each
round asks both, and every second round in the other order. The ratio is off's median time over on's, so 1 means that
telemetry costs nothing; its interval is a bootstrap over the rounds.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import report
from benchmarks.fleet import READERS, Fleet
from benchmarks.ours import Ours
from benchmarks.small import WARM_UP, Latency
from tensorhub.up.up import Up

RATIO_MIN: Final = 0.98
RESAMPLES: Final = 4000
SEED: Final = 1
INTERVAL: Final = (0.025, 0.975)
OFF: Final = {"OTEL_SDK_DISABLED": "true"}

Once = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What was measured with telemetry on and off, round by round, in s."""

    what: str
    on: list[float]
    off: list[float]

    def ratio(self) -> float:
        """Return off's median time over on's."""
        return statistics.median(self.off) / statistics.median(self.on)

    def interval(self) -> tuple[float, float]:
        """Return between what the ratio lies with 95 %: rounds are drawn again and again, as pairs."""
        chance, count = random.Random(SEED), len(self.on)
        found: list[float] = []
        for _ in range(RESAMPLES):
            drawn = chance.choices(range(count), k=count)
            on, off = (statistics.median(times[n] for n in drawn) for times in (self.on, self.off))
            found.append(off / on)
        found.sort()
        low, high = (found[int(share * (RESAMPLES - 1))] for share in INTERVAL)
        return low, high


async def measure(mib: int, rounds: int, publications: int, environment: Mapping[str, str]) -> list[Pairs]:
    """Measure the large model's read, to one and to four, and the small model's latency."""
    found: list[Pairs] = []
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(await Fleet.start(each)) for each in (environment, dict(environment) | OFF)
        ]
        hubs = [
            Ours("TensorHub", fleet, mib, transport="local", digests=True, environment=fleet.environment)
            for fleet in fleets
        ]
        for hub in hubs:
            stack.push_async_callback(hub.stop)
            await hub.start()
        for readers in (1, READERS):
            on, off = (_reading(hub, readers) for hub in hubs)
            found.append(await in_turn(f"{mib} MiB, 1→{readers}", on, off, rounds, warm_up=1))
        for hub in hubs:
            await hub.stop()
        found.append(await _latency(stack, fleets, publications))
    return found


async def _latency(stack: AsyncExitStack, fleets: Sequence[Fleet], publications: int) -> Pairs:
    smalls: list[Latency] = []
    for fleet in fleets:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-bench-"))
        up = await stack.enter_async_context(Up(Path(folder), agents=1 + READERS, environment=fleet.environment))
        small = Latency(fleet, up.hub, "local")
        await small.start()
        smalls.append(small)
    on, off = (_publishing(small) for small in smalls)
    found = await in_turn("1 MiB, publish → 4 ready", on, off, publications, warm_up=WARM_UP)
    for small in smalls:
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


async def in_turn(what: str, on: Once, off: Once, rounds: int, *, warm_up: int) -> Pairs:
    """Let both run in each round, the one first and then the other; the first rounds don't count."""
    pairs = Pairs(what, [], [])
    both = [(on, pairs.on), (off, pairs.off)]
    for number in range(warm_up + rounds):
        print(f"{what}: round {number} of {warm_up + rounds}", file=sys.stderr)
        for once, times in both if number % 2 == 0 else reversed(both):
            took = await once()
            if number >= warm_up:
                times.append(took)
    return pairs


def words(found: Sequence[Pairs]) -> str:
    """Return the table."""
    rows = []
    for pairs in found:
        low, high = pairs.interval()
        rows.append(
            (
                pairs.what,
                f"{statistics.median(pairs.on) * 1000:.1f}",
                f"{statistics.median(pairs.off) * 1000:.1f}",
                f"{pairs.ratio():.3f}",
                f"{low:.3f} – {high:.3f}",
                f"{len(pairs.on)}",
                "met" if pairs.ratio() >= RATIO_MIN else "missed",
            )
        )
    head = ("telemetry", "on, ms", "off, ms", "off / on", "95 %", "rounds", f"≥ {RATIO_MIN}")
    return report.table(head, rows)
