"""Telemetry on against off, in one hub: of two rounds in a row one is of a version that is traced, the other's is not.

Two hubs that are alike differ by some percent for as long as they live, by where their memory and processes happen to
be, and one hub is some percent faster or slower from one ten seconds to the next, which is more than is to be seen
here. So it is one hub, and what changes from round to round is the publisher's word in the version's `traceparent`:
sampled, or not. Of a version that isn't sampled no process notes, makes, hands over or keeps anything.

A pair is two rounds in a row, in an order drawn by lot. Its ratio is off's time over on's, so 1 means that telemetry
costs nothing; all pairs' is the mean of the logarithms without the tenth at either end, and its interval a bootstrap.

That shows what telemetry costs while somebody waits. Spans are made and kept some seconds later, in rounds of
either kind. So every process counts the processor time that this takes it. The sum falls anywhere into a traced round's
cycle, from one `publish` to the next, and a round gets its share of it, as if there were no other core to do it on.
"""

import asyncio
import itertools
import math
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import page
from benchmarks.fleet import READERS, Fleet
from benchmarks.side_by_side.ours import Ours
from benchmarks.side_by_side.small import WARM_UP, Latency
from tensorhub.local.hub import LocalHub
from tensorhub_common.observability.deferred_spans import LATER_S
from tensorhub_common.observability.metrics import METRICS
from tensorhub_common.telemetry.span_store import LOOK_EVERY_S, WRITE_EVERY_S

RATIO_MIN: Final = 0.98
RESAMPLES: Final = 2000
SEED: Final = 1
INTERVAL: Final = (0.025, 0.975)
TRIMMED: Final = 0.1
"""So large a share of the pairs at either end doesn't count: there the machine did something else."""

SETTLE_S: Final = LOOK_EVERY_S + WRITE_EVERY_S + LATER_S + 0.25
"""So long after the last round all spans are kept."""

PAIRS_MIN: Final = 3
ANSWER_S: Final = 10.0
S_PER_MINUTE: Final = 60

SHOWS_METRICS: Final = {"TENSORHUB_METRICS": "0", "TENSORHUB_LOG_LEVEL": "info"}
"""Every service of the hub serves its metrics on a port that it names in its log."""

COST: Final = METRICS["tensorhub.spans.cpu"]
PAGE: Final = re.compile(r"http://[^ /\"]+/metrics")

Once = Callable[[], Awaitable[float]]
Switch = Callable[[bool], Awaitable[None]]
Spent = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The times of two rounds in a row, in s: with telemetry on, and off."""

    on: float
    off: float


@dataclass(slots=True)
class Comparison:
    """All pairs of one measurement."""

    what: str
    pairs: list[Pair] = field(default_factory=list)
    cycle: float = math.inf
    """From one round to the next, in s."""
    later: float = 0.0
    """The processor time that the spans of a traced round took after it, in s, in all processes together."""

    def ratio(self) -> float:
        """Return off's time over on's, while somebody waits."""
        return math.exp(_trimmed_mean([math.log(pair.off / pair.on) for pair in self.pairs]))

    def whole(self) -> float:
        """Return off's time over on's with what is done later."""
        return self._with_later(self.ratio())

    def interval(self) -> tuple[float, float]:
        """Return between what `whole` lies with 95 %: pairs are drawn again and again."""
        chance, logs = random.Random(SEED), [math.log(pair.off / pair.on) for pair in self.pairs]
        found = sorted(_trimmed_mean(chance.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
        low, high = (self._with_later(math.exp(found[int(share * (RESAMPLES - 1))])) for share in INTERVAL)
        return low, high

    def medians(self) -> tuple[float, float]:
        """Return the median times with telemetry on and off, in s."""
        return statistics.median(pair.on for pair in self.pairs), statistics.median(pair.off for pair in self.pairs)

    def _with_later(self, ratio: float) -> float:
        return ratio / (1 + self.later / self.cycle)


def _trimmed_mean(values: Sequence[float]) -> float:
    ordered, left_out = sorted(values), int(len(values) * TRIMMED)
    return statistics.fmean(ordered[left_out : len(ordered) - left_out])


async def compare(what: str, once: Once, switch: Switch, spent: Spent, seconds: float) -> Comparison:
    """Measure pair after pair for so long. `spent` tells what all processes have used for finished spans up to now."""
    found, chance = Comparison(what), random.Random(SEED)
    spent_before, began = await spent(), time.monotonic()
    for number in itertools.count():
        if number >= PAIRS_MIN and time.monotonic() - began >= seconds:
            break
        print(f"\r{what}: pair {number}, {time.monotonic() - began:.0f} of {seconds:.0f} s", end="", file=sys.stderr)
        took = {}
        for is_on in chance.sample((True, False), 2):
            await switch(is_on)
            took[is_on] = await once()
        found.pairs.append(Pair(took[True], took[False]))
    print(file=sys.stderr)
    found.cycle = (time.monotonic() - began) / (2 * len(found.pairs))
    await asyncio.sleep(SETTLE_S)
    found.later = (await spent() - spent_before) / len(found.pairs)
    return found


class Costs:
    """What the hub's services and the fleet's workers have spent on finished spans."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        """Of the hub that keeps its state in this directory."""
        self._fleet = fleet
        logs = sorted((directory / "logs").glob("*.log"))
        self._pages = [found[-1] for log in logs if (found := PAGE.findall(log.read_text(errors="replace")))]
        services = 2 + 1 + READERS
        if len(self._pages) != services:
            raise RuntimeError(
                f"{len(self._pages)} of {services} services show their metrics; {directory}/logs tells why"
            )

    async def spent(self) -> float:
        """Return the sum, in s."""
        workers = [await each.ask("spans_cost") for each in (self._fleet.trainer, *self._fleet.readers)]
        pages = await asyncio.gather(*(asyncio.to_thread(_cost_on, page) for page in self._pages))
        return sum(pages) + sum(float(each["seconds"]) for each in workers)


def _cost_on(page: str) -> float:
    with urllib.request.urlopen(page, timeout=ANSWER_S) as answer:  # noqa: S310 (of a service that we started)
        text = answer.read().decode()
    name = COST.name.replace(".", "_")
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}_seconds_total")]
    return float(line.split()[-1])


async def measure(mib: int, minutes: float, environment: Mapping[str, str]) -> list[Comparison]:
    """Measure the large model's read, to one and to four, and the small model's latency, each for so long."""
    environment, seconds = {**environment, **SHOWS_METRICS}, minutes * S_PER_MINUTE
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(await Fleet.start(environment))
        await fleet.trainer.ask("trace_when_told")

        async def switch(is_on: bool) -> None:  # noqa: FBT001 (what it switches is all that it is called with)
            await fleet.trainer.ask("trace", on=is_on)

        large = Ours("TensorHub", fleet, mib, transport="local", digests=True, environment=environment)
        stack.push_async_callback(large.stop)
        await large.start()
        costs, found = Costs(fleet, large.directory), []
        for readers in (1, READERS):
            once = _reading(large, readers)
            await once()
            found.append(await compare(f"{mib} MiB, 1→{readers}", once, switch, costs.spent, seconds))
        await large.stop()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-bench-")))
        up = await stack.enter_async_context(LocalHub(directory, agents=1 + READERS, environment=environment))
        small = Latency(fleet, up.hub, "local")
        await small.start()
        once = _publishing(small)
        for _ in range(WARM_UP):
            await once()
        costs = Costs(fleet, directory)
        found.append(await compare("1 MiB, publish → 4 ready", once, switch, costs.spent, seconds))
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
        rows.append(
            (
                comparison.what,
                f"{on * 1000:.1f}",
                f"{off * 1000:.1f}",
                f"{comparison.ratio():.3f}",
                f"{comparison.cycle * 1000:.0f}",
                f"{comparison.later * 1000:.2f}",
                f"{comparison.whole():.3f}",
                f"{low:.3f} – {high:.3f}",
                str(len(comparison.pairs)),
                "met" if comparison.whole() >= RATIO_MIN else "missed",
            )
        )
    head = (
        "telemetry", "on, ms", "off, ms", "off / on", "cycle, ms", "later, CPU ms", "with later", "95 %", "pairs",
        f"≥ {RATIO_MIN}",
    )  # fmt: skip
    return page.table(head, rows)
