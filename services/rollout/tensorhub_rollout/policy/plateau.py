"""The batch size past which an instance's throughput no longer grows, from its own steps. Pure.

RLBoost (NSDI'26, Algorithm 2) profiles this size online, in the step before, and corrects it for the context length.
Here a step of an engine with b requests of c context tokens on average takes

    tau(b, c) = fixed + b * (each + attention * c)        seconds

so that throughput b / tau grows towards 1 / (each + attention * c). The plateau begins where it has reached the share
s = `PLATEAU_SHARE` of that: b = s / (1 - s) * fixed / (each + attention * c).
"""

from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.messages import EngineStep

PLATEAU_SHARE: Final = 0.9
SAMPLES_MIN: Final = 8
"""With fewer measured steps nothing is known of an instance."""


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


def fitted(steps: tuple[EngineStep, ...]) -> StepModel | None:
    """Return the model with the least squared error and no negative part; None: too little was measured.

    Terms that the least squares make negative are left out one by one, the most negative first.
    """
    if len(steps) < SAMPLES_MIN or len({each.batch for each in steps}) == 1:
        return None
    terms = [0, 1, 2] if len({each.context_tokens for each in steps}) > 1 else [0, 1]
    while terms:
        found = _least_squares(
            [[_term(which, each) for which in terms] for each in steps], [each.seconds for each in steps]
        )
        if found is None:
            terms.pop()
            continue
        worst = min(range(len(terms)), key=lambda at: found[at])
        if found[worst] >= 0:
            values = dict(zip(terms, found, strict=True))
            return StepModel(*(values.get(which, 0.0) for which in range(3)))
        del terms[worst]
    return None


def _term(which: int, step: EngineStep) -> float:
    return (1.0, float(step.batch), step.batch * step.context_tokens)[which]


def _least_squares(rows: list[list[float]], values: list[float]) -> list[float] | None:
    """Solve the normal equations; None where the terms can't be told apart."""
    size = len(rows[0])
    scale = [max(abs(row[at]) for row in rows) or 1.0 for at in range(size)]
    rows = [[each / by for each, by in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(size)
    ]
    for at in range(size):
        best = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        matrix[at], matrix[best] = matrix[best], matrix[at]
        if abs(matrix[at][at]) < _SINGULAR * len(rows):
            return None
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][size] / matrix[at][at] / scale[at] for at in range(size)]


_SINGULAR: Final = 1e-12
