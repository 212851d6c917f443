"""Predicts the responses of a trace, step by step, from one source of knowledge at a time, and from all of them.

In a step all groups begin at once. Sources differ in what is known, and when it is asked:

- at the beginning: the other prompts of the job; earlier responses of the same prompt; prompts that are alike;
- after so many responses of each group have ended, which the trace names first (`siblings`): of the others;
- at a cutoff: all responses have as many tokens, a quarter of them have ended, and of the others it is known that they
  run, and what their siblings did. Those that have ended count as predicted.

Recall is the share of the longest fifth of a step that are among the predicted longest fifth, ties broken by lot.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import Final, Protocol

import msgspec

from benchmarks.lengths.trace import Group, windows
from tensorhub_rollout.policy.lengths import LengthEstimate, LengthLimits, LengthModel, Prior
from tensorhub_rollout.policy.prompt_lengths import PromptLengths
from tensorhub_rollout.policy.skew import TAIL_SHARE

CUTOFF: Final = 0.25
"""This share of a step's responses has ended when those that run are predicted."""
QUANTILES: Final = (0.1, 0.5, 0.9)
STEPS_BEFORE: Final = 2
"""So many steps are learnt from before any is counted."""


class Alike(Protocol):
    """What is known of a new prompt by what is alike of it."""

    def prior(self, group: Group, variances: tuple[float, float]) -> Prior | None:
        """Return what is expected of a group's prompt. `variances`: between prompts and within them."""

    def learn(self, step: Sequence[Group]) -> None:
        """Take a step's responses."""


class Source(msgspec.Struct, frozen=True):
    """What is known of a response."""

    name: str
    earlier: bool = False
    """The same prompt's responses of earlier steps."""
    alike: bool = False
    """What prompts that are alike tell: those about as long, or by a regressor."""
    siblings: float = 0.0
    """This share of a group has ended, at least one."""
    at_cutoff: bool = False
    finished: bool = False
    """Siblings that have ended at the cutoff."""
    running: bool = False
    """Siblings that run at the cutoff."""

    def tells(self, trace: Sequence[Group]) -> bool:
        """Tell whether a trace has what this source is from: siblings, or prompts that come again."""
        if self.name.endswith("all"):
            return True
        if self.siblings or self.finished or self.running:
            return any(len(each.out_lens) > 1 for each in trace)
        return not self.earlier or len({each.group for each in trace}) < len(trace)


SOURCES: Final = (
    Source("the job"),
    Source("prompts about as long", alike=True),
    Source("the prompt's earlier responses", earlier=True),
    Source("earlier responses, and those prompts", earlier=True, alike=True),
    Source("one sibling has ended", siblings=0.01),
    Source("half of the siblings have", siblings=0.5),
    Source("at the cutoff: own tokens", at_cutoff=True),
    Source("at the cutoff: what runs", at_cutoff=True, running=True),
    Source("at the cutoff: what has ended", at_cutoff=True, finished=True),
    Source("at the cutoff: all", earlier=True, alike=True, at_cutoff=True, finished=True, running=True),
)


class Quality(msgspec.Struct, frozen=True):
    """How well a source predicts."""

    source: str
    recall: float
    below: tuple[float, float, float]
    """The share of responses below the predicted quantiles `QUANTILES`; of those that were not cut off."""
    error: float
    """The median of the absolute errors of log lengths."""
    responses: int
    """How many were predicted."""


class _Predicted(msgspec.Struct):
    """A response, how it was expected to be, and how long it is. `expected` None: it has ended."""

    expected: LengthEstimate | None
    tokens: int
    is_cut: bool


def measured(trace: Sequence[Group], window: int, source: Source, alike: Alike) -> Quality:
    """Replay a trace with one source."""
    model, lots = LengthModel(LengthLimits()), Random(1)
    recalls: list[float] = []
    counted: list[_Predicted] = []
    for number, step in enumerate(windows([*trace], window)):
        cutoff, keys = (
            _cutoff_of(step),
            [each.group if source.earlier else (number, at) for at, each in enumerate(step)],
        )
        parts = [_parted(source, each, cutoff) for each in step]
        for key, group, (first, _) in zip(keys, step, parts, strict=True):
            _learn(model, key, group, first)
        found = list[_Predicted]()
        for key, group, (_, others) in zip(keys, step, parts, strict=True):
            found += _predicted(model, source, group, key, others, cutoff, alike if source.alike else None)
        for key, group, (_, others) in zip(keys, step, parts, strict=True):
            _learn(model, key, group, others)
        if number >= STEPS_BEFORE and len(found) > 1 / TAIL_SHARE:
            recalls.append(_recall(found, lots))
            counted += found
        if source.alike:
            alike.learn(step)
    asked = [each for each in counted if each.expected is not None]
    whole = [each for each in asked if not each.is_cut]
    below = tuple(
        _share(each.tokens <= each.expected.quantile(share) for each in whole if each.expected) for share in QUANTILES
    )
    errors = [abs(math.log(each.tokens / each.expected.median)) for each in whole if each.expected]
    return Quality(
        source.name,
        statistics.fmean(recalls) if recalls else math.nan,
        (below[0], below[1], below[2]),
        statistics.median(errors) if errors else math.nan,
        len(asked),
    )


class AboutAsLong:
    """Production's: prompts about as long."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._prompts = PromptLengths(LengthLimits())

    def prior(self, group: Group, variances: tuple[float, float]) -> Prior | None:
        """Return what is expected of a group's prompt."""
        return self._prompts.prior(group.prompt_len, variances[1])

    def learn(self, step: Sequence[Group]) -> None:
        """Take a step's responses, one of each group."""
        for each in step:
            tokens = each.out_lens[0]
            is_cut = each.tokens_max is not None and tokens >= each.tokens_max
            (self._prompts.cut_off if is_cut else self._prompts.finished)(each.prompt_len, tokens)


class Regressor:
    """Learns log lengths online from what a job has of a prompt before it generates."""

    def __init__(self, make: Callable[[], object]) -> None:
        """Begin; `make` returns a regressor of river."""
        self._model, self._step = make(), 0
        self._recent = 0.0

    def prior(self, group: Group, variances: tuple[float, float]) -> Prior | None:
        """Return what is expected of a group's prompt."""
        if not self._step:
            return None
        return Prior(float(self._model.predict_one(self._features(group))), variances[0])  # type: ignore[attr-defined]

    def learn(self, step: Sequence[Group]) -> None:
        """Take a step's responses."""
        lengths = [math.log(each) for group in step for each in group.out_lens]
        if not self._step:
            self._recent = statistics.fmean(lengths)
        for group in step:
            features = self._features(group)
            for each in group.out_lens:
                self._model.learn_one(features, math.log(each))  # type: ignore[attr-defined]
        self._recent, self._step = statistics.fmean(lengths), self._step + 1

    def _features(self, group: Group) -> dict[str, float]:
        return {
            "prompt": math.log(max(1, group.prompt_len)),
            "step": float(self._step),
            "recent": self._recent,
            "group": math.log(len(group.out_lens)),
        }


def _parted(source: Source, group: Group, cutoff: int) -> tuple[list[int], list[int]]:
    """Return which responses of a group have ended before the others are predicted, and the others."""
    lengths = group.out_lens
    if source.at_cutoff:
        is_known = [source.finished and each <= cutoff for each in lengths]
        first = [each for each, known in zip(lengths, is_known, strict=True) if known]
        return first, [each for each, known in zip(lengths, is_known, strict=True) if not known]
    count = math.ceil(source.siblings * len(lengths)) if len(lengths) > 1 else 0
    return [*lengths[:count]], [*lengths[count:]]


def _predicted(
    model: LengthModel,
    source: Source,
    group: Group,
    key: Hashable,
    others: Sequence[int],
    cutoff: int,
    alike: Alike | None,
) -> list[_Predicted]:
    """Predict a group's responses. `cutoff`: how many tokens each has made."""
    most, made = group.tokens_max or math.inf, cutoff if source.at_cutoff else 0
    prior = None if alike is None else alike.prior(group, model.variances())
    running = [made] * sum(each > cutoff for each in group.out_lens) if source.running else []
    expected = model.estimate_group(key, running, prior).of(made, most)
    if not source.at_cutoff:
        return [_Predicted(expected, tokens, tokens >= most) for tokens in others]
    return [_Predicted(expected if each > cutoff else None, each, each >= most) for each in group.out_lens]


def _learn(model: LengthModel, key: Hashable, group: Group, lengths: Iterable[int]) -> None:
    for tokens in lengths:
        if tokens >= (group.tokens_max or math.inf):
            model.cut_off(key, tokens)
        else:
            model.finished(key, tokens)


def _cutoff_of(step: Sequence[Group]) -> int:
    lengths = sorted(each for group in step for each in group.out_lens)
    return lengths[int(CUTOFF * len(lengths))]


def _recall(found: Sequence[_Predicted], lots: Random) -> float:
    """Return the share of the places of the longest fifth that one of the longest fifth was predicted for."""
    count = math.ceil(TAIL_SHARE * len(found))
    least = sorted((each.tokens for each in found), reverse=True)[count - 1]
    ranked = sorted(found, key=lambda each: (-_size(each), lots.random()))
    return sum(each.tokens >= least for each in ranked[:count]) / count


def _size(each: _Predicted) -> float:
    """Return what ranks a response: its expected log length. What has ended is shorter than all that runs."""
    return -math.inf if each.expected is None else each.expected.mean


def _share(of: Iterable[bool]) -> float:
    known = [*of]
    return sum(known) / len(known) if known else math.nan
