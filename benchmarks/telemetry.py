"""Telemetry on against off: two hubs at once, asked in turn, so that what else the machine does falls on both.

Off is OpenTelemetry's own switch, `OTEL_SDK_DISABLED=true`, for every process of one hub and for its workers. Each
round asks both, and every second round in the other order. Two hubs that are alike differ by some percent for as long
as they live, by where their memory and processes happen to be, and the one that was started first is often the slower.
So there are several sittings with hubs made anew, and in every second one the other is started first. A sitting's ratio
is off's median time over on's, so 1 means that telemetry costs nothing; the whole's is the geometric mean of the
sittings', and its interval a bootstrap over sittings and their rounds.
"""

import math
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

SITTINGS: Final = 6

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """All sittings of one measurement: those in which on was started first, and those in which off was."""

    what: str
    on_first: list[Pairs]
    off_first: list[Pairs]

    def ratio(self) -> float:
        """Return the geometric mean of the sittings' ratios, both orders counting alike."""
        return math.sqrt(_mean_ratio(self.on_first) * _mean_ratio(self.off_first))

    def interval(self) -> tuple[float, float]:
        """Return between what the ratio lies with 95 %: sittings are drawn again and again, and rounds in them."""
        chance = random.Random(SEED)
        found = sorted(
            math.sqrt(_mean_ratio(_drawn(chance, self.on_first)) * _mean_ratio(_drawn(chance, self.off_first)))
            for _ in range(RESAMPLES)
        )
        low, high = (found[int(share * (RESAMPLES - 1))] for share in INTERVAL)
        return low, high

    def medians(self) -> tuple[float, float]:
        """Return the median times with telemetry on and off, in s."""
        sittings = self.on_first + self.off_first
        on = statistics.median(time for each in sittings for time in each.on)
        off = statistics.median(time for each in sittings for time in each.off)
        return on, off


def _mean_ratio(sittings: Sequence[Pairs]) -> float:
    return statistics.geometric_mean(each.ratio() for each in sittings)


def _drawn(chance: random.Random, sittings: Sequence[Pairs]) -> list[Pairs]:
    drawn = []
    for each in chance.choices(sittings, k=len(sittings)):
        numbers = chance.choices(range(len(each.on)), k=len(each.on))
        drawn.append(Pairs(each.what, [each.on[n] for n in numbers], [each.off[n] for n in numbers]))
    return drawn


async def measure(mib: int, rounds: int, publications: int, environment: Mapping[str, str]) -> list[Comparison]:
    """Measure the large model's read, to one and to four, and the small model's latency, in several sittings."""
    found: dict[str, Comparison] = {}
    for number in range(SITTINGS):
        on_first = number % 2 == 0
        print(f"sitting {number + 1} of {SITTINGS}", file=sys.stderr)
        for pairs in await _sit(
            mib, -(-rounds // SITTINGS) + 1, -(-publications // SITTINGS), environment, on_first=on_first
        ):
            comparison = found.setdefault(pairs.what, Comparison(pairs.what, [], []))
            (comparison.on_first if on_first else comparison.off_first).append(pairs)
    return list(found.values())


async def _sit(
    mib: int, rounds: int, publications: int, environment: Mapping[str, str], *, on_first: bool
) -> list[Pairs]:
    """Measure with two hubs made anew."""
    found: list[Pairs] = []
    environments = [environment, dict(environment) | OFF]
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(await Fleet.start(each))
            for each in (environments if on_first else reversed(environments))
        ]
        hubs = [
            Ours("TensorHub", fleet, mib, transport="local", digests=True, environment=fleet.environment)
            for fleet in fleets
        ]
        for hub in hubs:
            stack.push_async_callback(hub.stop)
            await hub.start()
        for readers in (1, READERS):
            on, off = (_reading(hub, readers) for hub in (hubs if on_first else reversed(hubs)))
            found.append(await in_turn(f"{mib} MiB, 1→{readers}", on, off, rounds, warm_up=1))
        for hub in hubs:
            await hub.stop()
        found.append(await _latency(stack, fleets, publications, on_first=on_first))
    return found


async def _latency(stack: AsyncExitStack, fleets: Sequence[Fleet], publications: int, *, on_first: bool) -> Pairs:
    smalls: list[Latency] = []
    for fleet in fleets:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-bench-"))
        up = await stack.enter_async_context(Up(Path(folder), agents=1 + READERS, environment=fleet.environment))
        small = Latency(fleet, up.hub, "local")
        await small.start()
        smalls.append(small)
    on, off = (_publishing(small) for small in (smalls if on_first else reversed(smalls)))
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


def words(found: Sequence[Comparison]) -> str:
    """Return the table."""
    rows = []
    for comparison in found:
        low, high = comparison.interval()
        on, off = comparison.medians()
        sittings = comparison.on_first + comparison.off_first
        rows.append(
            (
                comparison.what,
                f"{on * 1000:.1f}",
                f"{off * 1000:.1f}",
                f"{comparison.ratio():.3f}",
                f"{low:.3f} – {high:.3f}",
                f"{sum(len(each.on) for each in sittings)} in {len(sittings)}",
                "met" if comparison.ratio() >= RATIO_MIN else "missed",
            )
        )
    head = ("telemetry", "on, ms", "off, ms", "off / on", "95 %", "rounds, sittings", f"≥ {RATIO_MIN}")
    return report.table(head, rows)
