"""Whether responses have the lengths that an undisturbed engine gives them: a failure that favours short ones shows.

The fake engine draws each length from a geometric distribution (`FAKE_LENGTH_MEAN`), wherever a response goes on, so
what has to come is known exactly, and no second run is needed. The test is Pearson's: lengths are put into bins that
are nearly as likely as each other, and counts are compared with what is expected. Its statistic is turned into a normal
deviate by Wilson's and Hilferty's cube root. Beyond `DEVIATE_MAX` one undisturbed run in a thousand would be.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

BINS: Final = 20
DEVIATE_MAX: Final = 3.09


class LengthVerdict(NamedTuple):
    """What the test says. `deviate`: how unlikely the lengths are, as a normal deviate."""

    responses: int
    mean: float
    expected_mean: float
    deviate: float

    @property
    def holds(self) -> bool:
        return self.deviate <= DEVIATE_MAX

    def __str__(self) -> str:
        return (
            f"{self.responses} responses, {self.mean:.2f} tokens on average where {self.expected_mean:.2f} are "
            f"expected, deviate {self.deviate:+.2f} (at most {DEVIATE_MAX})"
        )


def against_geometric(lengths: npt.ArrayLike, mean: float, tokens_max: int) -> LengthVerdict:
    """Compare lengths with the geometric distribution of this mean, cut off at `tokens_max`."""
    found = np.asarray(lengths)
    at = np.arange(1, tokens_max + 1)
    survival = (1 - 1 / mean) ** (at - 1.0)
    chance = np.where(at < tokens_max, survival / mean, survival)
    # The last length of each bin.
    ends = np.unique(np.searchsorted(np.cumsum(chance), np.arange(1, BINS) / BINS) + 1)
    edges = np.concatenate(([0], ends, [tokens_max])) if ends[-1] < tokens_max else np.concatenate(([0], ends))
    expected = np.diff(np.concatenate(([0.0], np.cumsum(chance)))[edges]) * len(found)
    counts, _ = np.histogram(found, edges + 0.5)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    deviate = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return LengthVerdict(len(found), float(found.mean()), float((at * chance).sum()), float(deviate))
