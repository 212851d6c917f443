"""How long responses will be, from what is known of their prompts. Pure.

The model. The logarithm x of a response's length in tokens is normal about the mean of its prompt, and the means of
prompts are normal about that of the job:

    x = m + e        m ~ N(mean, between)        e ~ N(0, within)

`mean`, `between` and `within` are learnt from all finished responses by the analysis of variance of groups that differ
in size (Searle, Casella and McCulloch, "Variance Components", section 3.6). What tells of one response, by `Knowledge`:

- finished responses of its prompt, those of its group and of earlier steps;
- those of its group that still run: each is longer than it is now (a mean of censored values, by Newton's method on
  their likelihood, as in Tobit regression);
- prompts that are about as long (`prompt_lengths`);
- what it has made already: it is longer than that.

A response that its limit cut off is longer than it came to be. It counts with the two moments of what the model expects
above that (one step of expectation maximization), and not as a length.

That finished siblings tell most is TailSieve's finding, and Seer's: the prompt explains about two thirds of the
variation of length. StreamRL (arXiv 2504.15930, section 4.3) asks a small language model instead.

Invariant: an estimate is above what the response has, and grows with it; quantiles are in their order.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import msgspec

_STANDARD: Final = NormalDist()
LEFT_KEPT_MAX: Final = 1024
"""Limit of the estimates of which it is kept what is left: those of one group that have not begun are equal."""
_CUT_MAX: Final = 37.0
"""Beyond this number of deviations the share of what is left is too small for a number."""
CUT_OFF_FACTOR_MAX: Final = 16
"""What was cut off is expected to be at most so much longer. Where nothing ends before its limit, no length says how
much longer it is, and each estimate would raise the next one."""
_VARIANCE_MIN: Final = 1e-6
"""Lengths that were equal so far may differ."""
NEWTON_STEPS: Final = 4
"""From the mean without them, what still runs moves the mean by less than a hundredth of a deviation behind these."""
NEWTON_ENDS: Final = 0.01
"""Nor does it go on once a step has moved the mean by less than this part of a deviation."""
_TELLS_MIN: Final = -3.0
"""What is longer than so many deviations from the mean tells something: it is known of 99.9 % anyway."""
_SQRT_2: Final = math.sqrt(2)
_ROOT: Final = math.sqrt(math.pi / 2)


class LengthLimits(msgspec.Struct, frozen=True):
    """The settings of length prediction."""

    prompts_max: int = 65_536
    """Limit of the prompts that are remembered, the latest used."""
    responses_max: float = 32.0
    """Each response of a prompt counts as one, and all before it as one less than this together, at most: the policy
    that makes them learns meanwhile."""
    deviation_first: float = 1.0
    """The deviation of log lengths, between prompts and within them, until two responses of a prompt were seen."""
    tokens_first: float = 256.0
    """The length that is expected before any response was seen."""


_SHARE_MIN: Final = 1e-9


class Knowledge(StrEnum):
    """What an estimate is from, beside what the response has made itself: the best of what there is."""

    FINISHED = "finished"
    """Finished responses of the same prompt."""
    RUNNING = "running"
    """Responses of the same prompt that still run."""
    ALIKE = "alike"
    """Prompts that are about as long."""
    JOB = "job"
    """The other prompts of the job."""


class Prior(msgspec.Struct, frozen=True):
    """What is expected of the mean log length of a prompt before any of its responses."""

    mean: float
    variance: float


class LengthEstimate(msgspec.Struct, frozen=True):
    """How long a response will be, in tokens, and where that is from."""

    mean: float
    """Of the log length, as if nothing of the response were known itself."""
    deviation: float
    made: int
    """How many tokens it has."""
    knowledge: Knowledge
    tokens_max: float = math.inf
    """Limit of its tokens."""

    def quantile(self, share: float) -> float:
        """Return the length that a response with `made` tokens stays below with this probability, in tokens."""
        return min(self.tokens_max, _quantile(self.mean, self.deviation, self.made, share))

    def left(self) -> tuple[float, float]:
        """Return how many tokens are still to come, and their square, as expected: what sums are made of."""
        # What has tokens has them for itself: no other estimate is equal.
        return _left(self) if self.made else _left_of_fresh(self)

    @property
    def median(self) -> float:
        """The length that it exceeds as likely as not."""
        return self.quantile(0.5) if self.made else min(self.tokens_max, math.exp(self.mean))


def _left(of: LengthEstimate) -> tuple[float, float]:
    made, most = float(of.made), of.tokens_max
    cut = -math.inf if made < 1 else (math.log(made) - of.mean) / of.deviation
    end = (math.log(most) - of.mean) / of.deviation if most < math.inf else math.inf
    above, beyond = _share_above(cut), _share_above(end)
    if above < _SHARE_MIN or end <= cut:
        # Far out, what is left falls off like an exponential: the median is off by a factor of ln 2.
        left = (of.median - made) / math.log(2)
        return left, 2 * left * left
    at_end = most * beyond if beyond else 0.0
    first = _moment(of.mean, of.deviation, 1, cut, end) + at_end
    second = _moment(of.mean, of.deviation, 2, cut, end) + (most * at_end if at_end else 0.0)
    length, square = first / above, second / above
    return max(0.0, length - made), max(0.0, square - 2 * made * length + made * made)


_left_of_fresh = lru_cache(LEFT_KEPT_MAX)(_left)


class GroupEstimate(msgspec.Struct, frozen=True):
    """What is known of the responses of one group together, those that run among them."""

    mean: float
    """Of the log length, with all that run."""
    precision: float
    """Of the mean."""
    weight: float
    """The part of it that is from other than what runs."""
    within: float
    """The variance of the log lengths of one prompt."""
    knowledge: Knowledge

    def of(self, made: int, tokens_max: float = math.inf) -> LengthEstimate:
        """Return how long one of them will be. Its own tokens count once, as its own."""
        mean, precision = self.mean, self.precision
        if made and precision > self.weight:
            # A step of Newton's method back from the mean; where nothing else runs it is exact.
            deviation = math.sqrt(self.within)
            first, second = _slopes((math.log(made) - mean) / deviation)
            precision = max(self.weight, precision - second / self.within)
            mean -= first / deviation / precision
        return LengthEstimate(mean, math.sqrt(1 / precision + self.within), made, self.knowledge, tokens_max)


@dataclass(slots=True)
class _Lengths:
    """The log lengths of one prompt's finished responses."""

    count: float = 0.0
    """The older ones count in part."""
    total: float = 0.0
    squares: float = 0.0

    def fade(self, count: float) -> None:
        """Have them count as no more than so many."""
        if self.count > count:
            share = count / self.count
            self.count, self.total, self.squares = count, share * self.total, share * self.squares

    @property
    def explained(self) -> float:
        """The part of the squares that the prompt's own mean explains."""
        return self.total * self.total / self.count if self.count else 0.0


class LengthModel:
    """What a job's finished responses tell of those to come."""

    def __init__(self, limits: LengthLimits) -> None:
        """Know nothing yet."""
        self._limits = limits
        self._prompts: dict[Hashable, _Lengths] = {}
        self._count = 0.0
        self._total = self._squares = self._explained = 0.0
        self._counts_squared = 0.0
        self._variances: tuple[float, float] | None = None
        """As of what has finished; None: to be found anew."""

    def finished(self, prompt: Hashable, tokens: int) -> None:
        """Take how long a response of a prompt was: at least one token."""
        x = math.log(max(1, tokens))
        self._take(prompt, x, x * x)

    def _take(self, prompt: Hashable, x: float, square: float) -> None:
        known = self._prompts.pop(prompt, None) or _Lengths()
        self._take_out(known)
        known.fade(self._limits.responses_max - 1)
        known.count, known.total, known.squares = known.count + 1, known.total + x, known.squares + square
        self._put_in(known)
        self._prompts[prompt] = known
        if len(self._prompts) > self._limits.prompts_max:
            self._take_out(self._prompts.pop(next(iter(self._prompts))))

    def cut_off(self, prompt: Hashable, tokens: int) -> None:
        """Take that a response of a prompt was cut off after so many tokens: at least one."""
        expected, x = self.estimate(prompt), math.log(max(1, tokens))
        mean, deviation = min(expected.mean, x + math.log(CUT_OFF_FACTOR_MAX)), expected.deviation
        hazard, _ = _slopes((x - mean) / deviation)
        first = mean + deviation * hazard
        second = mean**2 + deviation**2 + deviation * hazard * (x + mean)
        self._take(prompt, first, second)

    def _put_in(self, each: _Lengths, sign: int = 1) -> None:
        self._variances = None
        self._count += sign * each.count
        self._total += sign * each.total
        self._squares += sign * each.squares
        self._explained += sign * each.explained
        self._counts_squared += sign * each.count * each.count

    def _take_out(self, each: _Lengths) -> None:
        self._put_in(each, -1)

    @property
    def mean(self) -> float:
        """The mean log length of all responses."""
        return self._total / self._count if self._count else math.log(self._limits.tokens_first)

    def variances(self) -> tuple[float, float]:
        """Return the variance between prompts and within them, of log lengths."""
        if self._variances is None:
            self._variances = self._found_variances()
        return self._variances

    def _found_variances(self) -> tuple[float, float]:
        first = self._limits.deviation_first**2
        prompts, count = len(self._prompts), self._count
        if count <= 1:
            return first, first
        whole = max(0.0, self._squares - self._total * self._total / count)
        if prompts == count:
            # No prompt has two responses: what is between and what is within can't be told apart.
            spread = whole / (count - 1)
            return max(spread / 2, _VARIANCE_MIN), max(spread / 2, _VARIANCE_MIN)
        within = max(0.0, self._squares - self._explained) / (count - prompts)
        if prompts == 1:
            return first, max(within, _VARIANCE_MIN)
        size = (count - self._counts_squared / count) / (prompts - 1)
        explained = max(0.0, whole - max(0.0, self._squares - self._explained)) / (prompts - 1)
        return max((explained - within) / size, _VARIANCE_MIN), max(within, _VARIANCE_MIN)

    def estimate(
        self, prompt: Hashable, made: int = 0, running: Iterable[int] = (), prior: Prior | None = None
    ) -> LengthEstimate:
        """Return how long a response with `made` tokens will be.

        `running`: how many tokens others of its group have that still run. `prior`: what is expected of the prompt, in
        place of what is known of all prompts of the job.
        """
        group = self.estimate_group(prompt, running, prior)
        return LengthEstimate(group.mean, math.sqrt(1 / group.precision + group.within), made, group.knowledge)

    def estimate_group(
        self, prompt: Hashable, running: Iterable[int] = (), prior: Prior | None = None
    ) -> GroupEstimate:
        """Return what is known of the responses of a group. `running`: how many tokens those have that still run."""
        between, within = self.variances()
        known = self._prompts.get(prompt) or _Lengths()
        expected, between = (self.mean, between) if prior is None else (prior.mean, max(_VARIANCE_MIN, prior.variance))
        cut = [max(1, each) for each in running]
        weight, total = 1 / between + known.count / within, expected / between + known.total / within
        mean, precision = total / weight, weight
        if cut:
            mean, precision = _with_running(total, weight, math.sqrt(within), [math.log(each) for each in cut])
        if known.count:
            knowledge = Knowledge.FINISHED
        elif any(each > 1 for each in cut):
            knowledge = Knowledge.RUNNING
        else:
            knowledge = Knowledge.JOB if prior is None else Knowledge.ALIKE
        return GroupEstimate(mean, precision, weight, within, knowledge)


def _share_above(deviations: float) -> float:
    return 0.5 * math.erfc(deviations / _SQRT_2)


def _moment(mean: float, deviation: float, power: int, first: float, last: float) -> float:
    """Return the part of a log-normal length's moment that is between two cuts of its log, in deviations."""
    shift = power * deviation
    whole = math.exp(power * mean + shift * shift / 2)
    return whole * (_share_above(first - shift) - _share_above(last - shift))


def _quantile(mean: float, deviation: float, made: int, share: float) -> float:
    """Return a quantile of the lengths above `made`, in tokens."""
    if made < 1:
        return math.exp(mean + deviation * _STANDARD.inv_cdf(share))
    cut = (math.log(made) - mean) / deviation
    # Far out, what is left falls off like an exponential.
    far = cut - math.log1p(-share) / max(cut, _CUT_MAX)
    above = far if cut > _CUT_MAX else -_STANDARD.inv_cdf(_share_above(cut) * (1 - share))
    return max(float(made), math.exp(mean + deviation * above))


def _with_running(total: float, weight: float, deviation: float, cuts: list[float]) -> tuple[float, float]:
    """Return the mean and its precision once it is known that values are above `cuts`, from those before."""
    mean, precision = total / weight, weight
    # The mean only grows by them, so that what tells nothing at first tells nothing at all.
    telling = [cut for cut in cuts if cut > mean + _TELLS_MIN * deviation]
    for _ in range(NEWTON_STEPS if telling else 0):
        slope, precision = total - weight * mean, weight
        for cut in telling:
            first, second = _slopes((cut - mean) / deviation)
            slope += first / deviation
            precision += second / deviation**2
        mean += slope / precision
        if abs(slope) < NEWTON_ENDS * deviation * precision:
            break
    return mean, precision


def _slopes(cut: float) -> tuple[float, float]:
    """Return the first two derivatives, by its mean, of the log probability that a standard normal is above `cut`.

    The second one is without its sign, between 0 (nothing is known by it) and 1 (it is as good as a value).
    """
    hazard = cut + 1 / cut if cut > _CUT_MAX else math.exp(-0.5 * cut * cut) / (_ROOT * math.erfc(cut / _SQRT_2))
    return hazard, min(1.0, max(0.0, hazard * (hazard - cut)))
