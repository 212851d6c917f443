"""Which token is drawn, against a plain computation in Python floats."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines import sampling as under_test
from tensorhub_runner.engines.sampling import Draw, draw

samplings = st.builds(
    Sampling,
    tokens_max=st.just(1),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05, 1e-12]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    logprobs=st.sampled_from(["processed", "temperature"]),
)
logits_rows = st.integers(1, 12).flatmap(
    lambda vocabulary: st.lists(
        # Few values, so that many are equal; -inf as a model masks tokens.
        st.lists(
            st.sampled_from([-math.inf, -30.0, -1.0, 0.0, 0.25, 1.0, 4.0]), min_size=vocabulary, max_size=vocabulary
        ).filter(lambda row: max(row) > -math.inf),
        min_size=1,
        max_size=4,
    )
)


def plain(row: list[float], sampling: Sampling) -> tuple[dict[int, float], dict[int, float]]:
    """Return the probability of each token that may be drawn, and that of each token before top_k and top_p."""
    temperature = sampling.temperature or 1.0
    weights = {token: math.exp((each - max(row)) / temperature) for token, each in enumerate(row)}
    whole = {token: weight / math.fsum(weights.values()) for token, weight in weights.items()}
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if not sampling.temperature:
        return {ranked[0]: 1.0}, whole
    ranked = ranked[: sampling.top_k or None]
    # Weights are compared, not probabilities: ten equal ones add up to exactly ten.
    before, kept = 0.0, list[int]()
    for token in ranked:
        if kept and sampling.top_p < 1.0 and before >= sampling.top_p * math.fsum(weights[each] for each in ranked):
            break
        kept.append(token)
        before += weights[token]
    total = math.fsum(whole[token] for token in kept)
    return {token: whole[token] / total for token in kept}, whole


@given(logits_rows, st.data())
def test_a_token_is_one_that_may_be_drawn_with_its_log_probability(rows: list[list[float]], data: Any) -> None:
    asked = data.draw(st.lists(samplings, min_size=len(rows), max_size=len(rows)))
    positions = data.draw(st.lists(st.integers(0, 2**31), min_size=len(rows), max_size=len(rows)))
    drawn = draw(torch.tensor(rows, dtype=torch.float64), asked, positions)
    for row, sampling, position, each in zip(rows, asked, positions, drawn, strict=True):
        assert each is not None
        allowed, whole = plain(row, sampling)
        assert allowed[each.token] > 0.0
        is_whole = sampling.logprobs == "temperature" or not sampling.temperature
        probability = whole[each.token] if is_whole else allowed[each.token]
        assert each.logprob == pytest.approx(math.log(probability), abs=1e-12)
        # The others of the batch count nothing.
        (alone,) = draw(torch.tensor([row], dtype=torch.float64), [sampling], [position])
        assert alone is not None
        assert alone.token == each.token
        assert alone.logprob == pytest.approx(each.logprob, abs=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, 11),
        Sampling(1, 11, temperature=0.5),
        Sampling(1, 11, top_k=3),
        Sampling(1, 11, top_p=0.8),
        Sampling(1, 11, temperature=2.0, top_k=4, top_p=0.7),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(sampling: Sampling) -> None:
    """Chi-square over positions, which are drawn independently."""
    row, count = [0.3, -1.0, 2.0, 2.0, 0.0, 1.1], 10_000
    allowed, _ = plain(row, sampling)
    drawn = draw(torch.tensor([row]).expand(count, -1), [sampling] * count, range(count))
    counts = np.bincount([each.token for each in drawn if each is not None], minlength=len(row))
    assert {token for token, seen in enumerate(counts) if seen} == allowed.keys()
    chi = sum((counts[token] - count * share) ** 2 / (count * share) for token, share in allowed.items())
    # Five degrees of freedom pass 25 once in 7,000 times; the seed is fixed.
    assert chi < 25


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    row = torch.tensor([[0.0, 3.0, 3.0, 3.0]])
    assert [each.token for each in draw(row, [Sampling(1, 0, temperature=0.0)], [0]) if each] == [1]
    for sampling in (Sampling(1, 5, top_k=2), Sampling(1, 5, top_p=0.6)):
        many = draw(row.expand(200, -1), [sampling] * 200, range(200))
        assert {each.token for each in many if each} == {1, 2}


def test_a_row_without_a_distribution_has_no_token_and_the_others_have() -> None:
    nan, inf = math.nan, math.inf
    rows = torch.tensor([[0.0, nan, 1.0], [0.0, 1.0, 2.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [-inf, 0.0, -inf]])
    for sampling in (Sampling(1, 3), Sampling(1, 3, temperature=0.0), Sampling(1, 3, top_p=0.5, top_k=2)):
        drawn = draw(rows, [sampling] * 5, range(5))
        assert [each is None for each in drawn] == [True, False, True, True, False]
        assert drawn[4] == Draw(1, 0.0)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("sampling", [Sampling(1, 0), Sampling(1, 0, top_k=2)])
def test_the_ends_of_the_distribution_have_a_probability(
    number: float, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least and the largest number that can be drawn take no token of weight 0, at either end of the ids."""
    monkeypatch.setattr(under_test, "uniform", lambda seeds, _: np.full(len(seeds), number))
    row = [-math.inf, -2000.0, 0.1, 0.3, -2000.0, -math.inf]
    (drawn,) = draw(torch.tensor([row], dtype=torch.float64), [sampling], [0])
    assert drawn is not None
    assert drawn.token == (2 if number == 0.0 else 3)


def test_a_score_says_what_a_token_has_where_the_border_of_top_p_lies_a_little_elsewhere() -> None:
    logits = torch.tensor([0.5, 0.3999, 0.1001], dtype=torch.float64).log()
    at_border, beside_it = Sampling(1, 0, 1.0, 0.9), Sampling(1, 0, 1.0, 0.8)
    found = under_test.score(logits, at_border, 3, 0)
    assert found is not None
    # The likeliest two are 0.8999 together, so 0.9 keeps the third one, and a border a thousandth lower does not.
    assert found.logprob == found.lowest == pytest.approx(math.log(0.5))
    assert found.highest == pytest.approx(math.log(0.5 / 0.8999))
    found = under_test.score(logits, at_border, 3, 2)
    assert found is not None
    assert found.logprob == found.lowest == found.highest == pytest.approx(math.log(0.1001))
    found = under_test.score(logits, beside_it, 3, 0)
    assert found is not None
    assert found.logprob == found.lowest == found.highest == pytest.approx(math.log(0.5 / 0.8999))
    found = under_test.score(logits, beside_it, 3, 2)
    assert found is not None
    assert (found.lowest, found.highest) == (-math.inf, -math.inf)
