"""StreamRL's skew-aware dispatch (arXiv 2504.15930, section 4.3): which instances serve the longest responses. Pure.

The share `TAIL_SHARE` of requests with the longest predicted responses is the tail; it gets instances of its own, so
that long responses run in small batches, where a token takes less time. Over all ways to divide the instances, the one
is taken that ends first. An instance that serves M requests of length L, at most `slots` at once, takes

    PTL(b) * L * ceil(M / slots)        with b = min(M, slots)

where PTL is the time of a step (`StepModel`). The 0.9 quantile of the tail's predicted lengths stands for its length,
and the median of the others' for theirs. The two parts run beside each other, so the later one counts. In one reading
of the paper their times are added: `TimesCount.SUM`.
"""

import math
from bisect import bisect_left
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_rollout.policy.plateau import StepModel

TAIL_SHARE: Final = 0.2
TAIL_QUANTILE: Final = 0.9
REST_QUANTILE: Final = 0.5


class TimesCount(StrEnum):
    """How the times of the two parts become one."""

    LATER = "later"
    SUM = "sum"


class Fleet(msgspec.Struct, frozen=True):
    """Instances that are alike: how many, how many requests each runs at once, and how long its steps take."""

    instances: int
    slots: int
    steps: StepModel


class Part(msgspec.Struct, frozen=True):
    """The requests of one part: how many, and the length in tokens that stands for all, and their mean context."""

    requests: int
    tokens: float
    context_tokens: float = 0.0


class Division(msgspec.Struct, frozen=True):
    """How many instances the tail has, and when all is done, in seconds."""

    tail_instances: int
    seconds: float


def seconds_of(part: Part, instances: int, slots: int, steps: StepModel) -> float:
    """Return how long a number of instances takes for a part; infinite where there is none for what is to be done."""
    if not part.requests:
        return 0.0
    if not instances:
        return math.inf
    each = math.ceil(part.requests / instances)
    return steps.seconds(min(each, slots), part.context_tokens) * part.tokens * math.ceil(each / slots)


def divided(tail: Part, rest: Part, fleet: Fleet, how: TimesCount = TimesCount.LATER) -> Division:
    """Return the division of a fleet that ends first; of equal ones, that with the fewest instances for the tail.

    With one instance there is nothing to divide: both parts are on it, one after the other.
    """
    if fleet.instances <= 1:
        both = sum(seconds_of(part, fleet.instances, fleet.slots, fleet.steps) for part in (tail, rest))
        return Division(0, both)
    counts = range(fleet.instances + 1)

    def of_tail(count: int) -> float:
        return seconds_of(tail, count, fleet.slots, fleet.steps)

    def of_rest(count: int) -> float:
        return seconds_of(rest, fleet.instances - count, fleet.slots, fleet.steps)

    if how is TimesCount.SUM:
        return min(
            (Division(count, of_tail(count) + of_rest(count)) for count in counts), key=lambda each: each.seconds
        )
    # With more instances the tail takes no longer, and the rest no shorter: the best is where one overtakes the other.
    over = bisect_left(counts, 1, key=lambda count: of_tail(count) <= of_rest(count))
    found = Division(over, of_rest(over)) if over < len(counts) else Division(0, math.inf)
    if over and of_tail(over - 1) <= found.seconds:
        seconds = of_tail(over - 1)
        found = Division(bisect_left(counts, 1, key=lambda count: of_tail(count) <= seconds), seconds)
    return found
