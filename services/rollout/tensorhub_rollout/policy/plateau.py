"""The batch size past which an instance's throughput no longer grows, from its own steps. Pure.

RLBoost (NSDI'26, Algorithm 2) profiles this size online, in the step before, and corrects it for the context length.
Here a step of an engine with b requests of c context tokens on average takes

    tau(b, c) = fixed + b * (each + attention * c)        seconds

so that throughput b / tau grows towards 1 / (each + attention * c). The plateau begins where it has reached the share
s = `PLATEAU_SHARE` of that: b = s / (1 - s) * fixed / (each + attention * c).
"""

import math
from collections.abc import Iterable
from operator import add
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.messages import EngineStep

PLATEAU_SHARE: Final = 0.9
SAMPLES_MIN: Final = 8
"""With fewer measured steps nothing is known of an instance."""
STEPS_KEPT: Final = 128
"""So many steps at least, and twice as many at most, the latest, count for an instance once they were measured."""
_SINGULAR: Final = 1e-12


class StepModel(msgspec.Struct, frozen=True):
    """How long a step takes: seconds for the step, for each request, and for each context token of each request."""

    fixed_s: float
    each_s: float
    attention_s: float

    def seconds(self, batch: int, context_tokens: float) -> float:
        """Return how long a step takes."""
        return self.fixed_s + batch * (self.each_s + self.attention_s * context_tokens)

    def plateau(self, context_tokens: float, slots: int) -> int:
        """Return the batch size past which throughput no longer grows, at most `slots` and at least 1."""
        growing_s = self.each_s + self.attention_s * context_tokens
        if growing_s <= 0:
            return slots
        size = PLATEAU_SHARE / (1 - PLATEAU_SHARE) * self.fixed_s / growing_s
        return max(1, min(slots, round(size)))


class StepSums:
    """What the latest steps of an engine add up to. A fit needs no more, and takes as long for any number of steps."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self._latest, self._older = _Sums(), _Sums()

    @classmethod
    def of(cls, steps: Iterable[EngineStep]) -> "StepSums":
        """Return the sums of these."""
        made = cls()
        made.extend(steps)
        return made

    def extend(self, steps: Iterable[EngineStep]) -> None:
        """Take steps; those before the last `STEPS_KEPT` to twice as many count no more."""
        for each in steps:
            if self._latest.count == STEPS_KEPT:
                # Whole blocks go, since to subtract single steps would leave the rounding of all that ever were.
                self._latest, self._older = _Sums(), self._latest
            self._latest.take(each)

    def total(self) -> "_Sums":
        """Return the sums of all that count."""
        return self._latest.with_those_of(self._older)

    @property
    def count(self) -> int:
        """How many steps count."""
        return self._latest.count + self._older.count

    @property
    def context_tokens(self) -> float:
        """The mean context of a request, in tokens; 0: nothing is measured."""
        return (self._latest.contexts + self._older.contexts) / self.count if self.count else 0.0


class _Sums:
    """Sums over steps. A step of b requests with c context tokens that takes s seconds has the terms 1, b and b * c."""

    __slots__ = ("batches", "context_range", "contexts", "count", "products", "times")

    def __init__(self) -> None:
        self.count, self.contexts = 0, 0.0
        self.batches, self.context_range = _Range(), _Range()
        self.products = [0.0] * 6
        """Of terms with each other: 11, 1b, 1bc, bb, bbc, bcbc."""
        self.times = [0.0] * 3
        """Of terms with seconds."""

    def take(self, step: EngineStep) -> None:
        b, c, s = float(step.batch), step.context_tokens, step.seconds
        bc = b * c
        self.count += 1
        self.contexts += c
        self.batches.take(b)
        self.context_range.take(c)
        self.products = [*map(add, self.products, (1.0, b, bc, b * b, b * bc, bc * bc))]
        self.times = [*map(add, self.times, (s, b * s, bc * s))]

    def with_those_of(self, other: "_Sums") -> "_Sums":
        made = _Sums()
        made.count, made.contexts = self.count + other.count, self.contexts + other.contexts
        for mine in (self, other):
            made.batches.join(mine.batches)
            made.context_range.join(mine.context_range)
        made.products = [*map(add, self.products, other.products)]
        made.times = [*map(add, self.times, other.times)]
        return made

    def product(self, one: int, other: int) -> float:
        """Return the sum of the products of two terms."""
        low, high = sorted((one, other))
        return self.products[(0, 3, 5)[low] + high - low]


class _Range:
    __slots__ = ("high", "low")

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def take(self, value: float) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)

    def join(self, other: "_Range") -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def is_one(self) -> bool:
        return self.low >= self.high


def fitted(steps: StepSums) -> StepModel | None:
    """Return the model with the least squared error and no negative part; None: too little was measured.

    Terms that the least squares make negative are left out one by one, the most negative first.
    """
    total = steps.total()
    if total.count < SAMPLES_MIN or total.batches.is_one:
        return None
    terms = [0, 1] if total.context_range.is_one else [0, 1, 2]
    while terms:
        found = _least_squares(total, terms)
        if found is None:
            terms.pop()
            continue
        worst = min(range(len(terms)), key=lambda at: found[at])
        if found[worst] >= 0:
            values = dict(zip(terms, found, strict=True))
            return StepModel(*(values.get(which, 0.0) for which in range(3)))
        del terms[worst]
    return None


def _least_squares(total: _Sums, terms: list[int]) -> list[float] | None:
    """Solve the normal equations; None where the terms can't be told apart."""
    size = len(terms)
    scale = [math.sqrt(total.product(which, which)) or 1.0 for which in terms]
    matrix = [
        [total.product(one, other) / by / scale[at] for at, other in enumerate(terms)] + [total.times[one] / by]
        for one, by in zip(terms, scale, strict=True)
    ]
    for at in range(size):
        best = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        matrix[at], matrix[best] = matrix[best], matrix[at]
        if abs(matrix[at][at]) < _SINGULAR:
            return None
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][size] / matrix[at][at] / scale[at] for at in range(size)]
