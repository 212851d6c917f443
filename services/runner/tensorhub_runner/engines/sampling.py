"""Which token follows, given the logits of the position before it.

One number is drawn for each token, and the token is where the cumulative distribution, in the order of ids, passes it.
Noise on each logit (Gumbel) would give the same distribution for a vocabulary's worth of random numbers a token;
one number is all that has to be drawn, kept equal between engines, and checked when a token is scored again.

Everything is computed in float64. A row is computed with no regard to the others, but a library may add up the rows of
a larger matrix otherwise in the last bits. What must be equal bit for bit is drawn one row at a time.

Rules:
- Temperature first, then top_k, then top_p among the k. Of equal logits the lower id comes first.
- top_p keeps the smallest set of the likeliest tokens whose probability is at least top_p.
- Temperature 0 takes the likeliest token. Its log-probability is that at temperature 1, of the whole vocabulary.
- A log-probability is of the distribution that the token was drawn from (`processed`), or of the one before top_k and
  top_p (`temperature`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace

from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.philox import uniform

BORDER_SHARE: Final = 1e-3
"""So much of top_p its border may lie elsewhere in an engine that rounds otherwise."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What is drawn at a place, and the natural log-probability of the token that stands there.

    It is -inf for a token that top_k or top_p leave out, where log-probabilities are of what is drawn from.

    Another engine rounds otherwise, and may cut one token sooner or later: `lowest` and `highest` are what the token
    has where the border of top_p lies up to `BORDER_SHARE` of itself lower or higher.
    """

    drawn: int
    logprob: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Draw:
    """One token and its natural log-probability."""

    token: int
    logprob: float


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int], *, one_by_one: bool = False
) -> list[Draw | None]:
    """Draw one token for each row of logits[n, vocabulary]. None: the row has NaN, or nothing that is finite.

    A position counts the tokens, of prompt and response, before the one that is drawn. `one_by_one` has each row
    computed by itself, in a matrix of one row.
    """
    numbers = uniform([each.seed for each in samplings], positions).tolist()
    if not one_by_one:
        return _drawn(logits, samplings, numbers)
    rows = zip(logits, samplings, numbers, strict=True)
    # The copy begins a piece of memory of its own: how memory is aligned may decide which instructions are taken.
    return [each for row, sampling, number in rows for each in _drawn(row.clone().unsqueeze(0), [sampling], [number])]


def score(logits: torch.Tensor, sampling: Sampling, position: int, token: int) -> Scored | None:
    """Draw again behind one row of logits[vocabulary], and score the token that was made there. None: as `draw`.

    A token that is drawn again has the log-probability that `draw` gave it one by one, bit for bit.
    """
    number = float(uniform([sampling.seed], [position])[0])
    row = logits.clone().unsqueeze(0)
    (found,) = _drawn(row, [sampling], [number], token)
    if found is None:
        return None
    near = [found.logprob]
    if _is_cut(sampling) and sampling.top_p < 1.0:
        for share in (1 - BORDER_SHARE, 1 + BORDER_SHARE):
            (cut,) = _drawn(row, [replace(sampling, top_p=min(1.0, sampling.top_p * share))], [number], token)
            near += [] if cut is None else [cut.logprob]
    possible = [each for each in near if math.isfinite(each)] or near
    return Scored(found.token, found.logprob, min(possible), max(possible))


def _drawn(
    logits: torch.Tensor, samplings: Sequence[Sampling], numbers: Sequence[float], scored: int | None = None
) -> list[Draw | None]:
    """Draw, and give the log-probabilities of what was drawn; or of one token that is to be scored."""
    device = logits.device
    logits = logits.to(torch.float64)
    largest = logits.amax(dim=-1, keepdim=True)
    # The largest becomes 0 before the division, so that no temperature is too low.
    temperatures = _column([each.temperature or 1.0 for each in samplings], device)
    scaled = (logits - largest) / temperatures
    weights = scaled.exp()
    kept = _kept(weights, scaled, samplings)
    cumulative = (weights if kept is None else weights * kept).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    # A product that was rounded up to the total would pass all tokens; the last that has a weight is the one it meant.
    last = torch.searchsorted(cumulative, total)
    drawn = torch.minimum(torch.searchsorted(cumulative, _column(numbers, device) * total, right=True), last)
    is_greedy = _column([not each.temperature for each in samplings], device)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), drawn)
    is_whole = _column([not each.temperature or each.logprobs == "temperature" for each in samplings], device)
    sums = total if kept is None else torch.where(is_whole, weights.cumsum(dim=-1)[:, -1:], total)
    # A row that is not finite may have no place at all.
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    if scored is None:
        logprobs = scaled.gather(-1, tokens) - sums.log()
    else:
        asked = torch.full_like(tokens, scored)
        logprobs = scaled.gather(-1, asked) - sums.log()
        if kept is not None:
            logprobs = logprobs.where(kept.gather(-1, asked) | is_whole, -torch.inf)
    rows = zip(
        largest.isfinite().flatten().tolist(), tokens.flatten().tolist(), logprobs.flatten().tolist(), strict=True
    )
    return [Draw(token, logprob) if is_finite else None for is_finite, token, logprob in rows]


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return one value a row: [n, 1], float64 or bool."""
    array = np.array(values)
    return torch.from_numpy(array if array.dtype == np.bool_ else array.astype(np.float64)).to(device).unsqueeze(-1)


def _kept(weights: torch.Tensor, scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor | None:
    """Return which tokens may be drawn: bool[n, vocabulary]. None: all of them, in each row."""
    if not any(_is_cut(each) for each in samplings):
        return None
    vocabulary, device = weights.shape[-1], weights.device
    # Without a cut the limits are such that every token is kept.
    counts = _column([float(each.top_k or vocabulary) if _is_cut(each) else vocabulary for each in samplings], device)
    shares = _column([each.top_p if _is_cut(each) and each.top_p < 1.0 else 2.0 for each in samplings], device)
    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(-1, order)
    is_kept = torch.arange(vocabulary, device=device) < counts
    ranked = ranked * is_kept
    before = ranked.cumsum(dim=-1) - ranked
    is_kept &= before < shares * ranked.sum(dim=-1, keepdim=True)
    # The likeliest is kept whatever top_p is.
    is_kept[:, 0] = True
    return torch.empty_like(is_kept).scatter_(-1, order, is_kept)


def _is_cut(sampling: Sampling) -> bool:
    return bool(sampling.temperature) and (sampling.top_k > 0 or sampling.top_p < 1.0)
