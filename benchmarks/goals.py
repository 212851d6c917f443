"""The goals of the design, and what was measured against each."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MEMCPY: Final = "memcpy, 1 thread"
LATENCY_S_MAX: Final = 0.015
TO_ONE_MIN: Final = 0.8
TO_ONE_FUSED_MIN: Final = 1.2
TO_FOUR_MAX: Final = 4 * 1.1


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table."""

    what: str
    measured: str
    wanted: str
    met: bool


def of_large(digests: str, took: dict[str, list[float]]) -> list[Goal]:
    """Judge the large model's reads, each against the memcpys of its own round."""
    to_one = 1 / statistics.median(took["1→1 in memcpys"])
    to_four = statistics.median(took["1→4 in memcpys"])
    what = f"1 GiB, digests {digests}"
    wanted = [("1→1", TO_ONE_MIN)] + ([("1→1, fused", TO_ONE_FUSED_MIN)] if digests == "on" else [])
    return [
        *(
            Goal(f"{what}, {how}", f"{to_one:.2f} of one memcpy", f"≥ {least}", to_one >= least)
            for how, least in wanted
        ),
        Goal(f"{what}, 1→4", f"{to_four:.2f} memcpys", f"≤ {TO_FOUR_MAX:.1f}", to_four <= TO_FOUR_MAX),
    ]


def of_small(took: Sequence[float]) -> Goal:
    """Judge the small model's latency."""
    p50 = statistics.median(took)
    return Goal("1 MiB, publish → 4 ready, p50", f"{p50 * 1000:.1f} ms", "≤ 15 ms", p50 <= LATENCY_S_MAX)
