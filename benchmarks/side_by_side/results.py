"""What was measured, in the form in which it is written down as JSON and from which table and picture are made."""

import statistics
from collections.abc import Iterable
from typing import Final

import msgspec

COUNTS: Final = (1, 4)
"""How many read at the same time."""

MEMCPY: Final = "memcpy, 1 thread"
MEMCPY_2: Final = "memcpy, 2 threads"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer, and the mean of the memcpys right before and after it."""

    number: int
    seconds: float
    memcpy_s: float
    besides: dict[str, float]


class Line(msgspec.Struct, kw_only=True):
    """One contender: its rounds by how many read. `failed` says why it has no more of them."""

    title: str
    is_ours: bool
    rounds: dict[str, list[Round]]
    equal: bool = False
    failed: str | None = None

    def of(self, readers: int) -> list[Round]:
        """Return the rounds with so many readers."""
        return self.rounds.get(str(readers), [])

    def seconds(self, readers: int) -> list[float]:
        """Return what each of them took."""
        return [each.seconds for each in self.of(readers)]

    def in_memcpys(self, readers: int) -> float:
        """Return the median of the ratios to one memcpy, each taken within its round."""
        return statistics.median(each.seconds / each.memcpy_s for each in self.of(readers))

    def besides(self, readers: int) -> dict[str, float]:
        """Return the medians of what else there is to say."""
        rounds = self.of(readers)
        return {name: statistics.median(each.besides[name] for each in rounds) for name in rounds[0].besides}


class Small(msgspec.Struct, frozen=True, kw_only=True):
    """The latency of a small model, in s for each publication; stages and processor time in s as medians or means."""

    ready: list[float]
    behind: list[float]
    stages: dict[str, float]
    processor: dict[str, float]
    entries: float


class Part(msgspec.Struct, kw_only=True):
    """What was measured round by round with the same things beside each other."""

    transport: str
    digests: bool
    lines: list[Line]
    small: Small | None = None

    @property
    def ours(self) -> Line:
        """Return our own line."""
        return next(line for line in self.lines if line.is_ours)


class Result(msgspec.Struct, kw_only=True):
    """A whole run."""

    machine: dict[str, str]
    mib: int
    parts: list[Part]
    seconds: float = 0.0
    others: float = 0.0


def faster(ours: Line, other: Line, readers: int) -> float | None:
    """Return how many times as fast as the other we were: the median over the rounds that both have."""
    theirs = {each.number: each.seconds for each in other.of(readers)}
    ratios = [theirs[each.number] / each.seconds for each in ours.of(readers) if each.number in theirs]
    return statistics.median(ratios) if ratios else None


def measured(lines: Iterable[Line]) -> list[Line]:
    """Return those that have figures for every number of readers."""
    return [line for line in lines if all(line.of(readers) for readers in COUNTS)]
