"""The goals of the design, and what was measured against each."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.side_by_side.results import COUNTS, Line, Part, Result, faster, measured

LATENCY_S_MAX: Final = 0.015
TO_ONE_MIN: Final = 0.8
TO_ONE_FUSED_MIN: Final = 1.2
TO_FOUR_MAX: Final = 4 * 1.1
SOURCE_MAX: Final = 0.05
"""Of the time of a read, what the source's agent and worker may compute: "near zero"."""

OF_PERFTEST_MIN: Final = 0.95
PERFTEST: Final = "ucx_perftest"
VIEWS: Final = "Ray, views"
"""Copies nothing, so it is shown and not raced."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table."""

    what: str
    measured: str
    wanted: str
    met: bool


def of(result: Result) -> list[Goal]:
    """Judge a run. What was not measured is not judged."""
    found: list[Goal] = []
    for part in result.parts:
        if part.ours in measured(part.lines):
            found += of_local(part) if part.transport == "local" else of_ucxx(part)
        if part.small is not None:
            p50 = statistics.median(part.small.ready)
            what = f"1 MiB, {part.transport}: publish → 4 ready, p50"
            found.append(Goal(what, f"{p50 * 1000:.1f} ms", f"≤ {LATENCY_S_MAX * 1000:.0f} ms", p50 <= LATENCY_S_MAX))
    return found


def of_local(part: Part) -> Iterator[Goal]:
    """Judge reads on one host, each against the memcpys beside it."""
    what, ours = f"local, digests {on_off(part)}", part.ours
    to_one, to_four = 1 / ours.in_memcpys(1), ours.in_memcpys(4)
    if part.digests:
        yield at_least(f"{what}: 1→1", to_one, TO_ONE_MIN, "of one memcpy")
        yield at_least(f"{what}: 1→1, fused", to_one, TO_ONE_FUSED_MIN, "of one memcpy")
        yield Goal(f"{what}: 1→4", f"{to_four:.2f} memcpys", f"≤ {TO_FOUR_MAX:.1f}", to_four <= TO_FOUR_MAX)
        busy = statistics.median(each.besides["source's processor"] / each.seconds for each in ours.of(4))
        yield Goal(
            f"{what}: 1→4, source's processor", f"{busy:.1%} of a core", f"≤ {SOURCE_MAX:.0%}", busy <= SOURCE_MAX
        )
    yield from ahead(part, what)


def of_ucxx(part: Part) -> Iterator[Goal]:
    """Judge reads over UCX against its own measure and the peers over TCP."""
    if part.digests:
        return
    what = "ucxx, digests off"
    for line in measured(part.lines):
        if line.title == PERFTEST:
            for readers in COUNTS:
                ratio = faster(part.ours, line, readers)
                assert ratio is not None
                yield at_least(f"{what}: 1→{readers}", ratio, OF_PERFTEST_MIN, f"of {PERFTEST}")
    yield from ahead(part, what)


def ahead(part: Part, what: str) -> Iterator[Goal]:
    """Compare with every peer that copies."""
    for line in peers(part):
        ratios = [faster(part.ours, line, readers) for readers in COUNTS]
        words = " / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        met = all(ratio is not None and ratio >= 1 for ratio in ratios)
        yield Goal(f"{what}: ahead of {line.title}", f"{words} of its speed", "≥ 1 / 1", met)


def peers(part: Part) -> list[Line]:
    """Return the lines of those who race with us: neither limits nor views."""
    return [
        line
        for line in measured(part.lines)
        if not line.is_ours and not line.title.startswith("memcpy") and line.title not in (PERFTEST, VIEWS)
    ]


def at_least(what: str, ratio: float, wanted: float, unit: str) -> Goal:
    """Judge a ratio that should be large."""
    return Goal(what, f"{ratio:.2f} {unit}", f"≥ {wanted}", ratio >= wanted)


def on_off(part: Part) -> str:
    """Say whether digests were taken."""
    return "on" if part.digests else "off"
