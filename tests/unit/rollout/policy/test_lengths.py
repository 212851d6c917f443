"""How long responses will be: variances by hand, estimates that fit what is drawn."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.lengths import Knowledge, LengthLimits, LengthModel, Prior
from tensorhub_rollout.policy.prompt_lengths import PromptLengths

BETWEEN, WITHIN, MEAN = 0.9, 0.6, 6.0
"""Deviations of log lengths, and their mean: half of the responses have more than 403 tokens."""


def drawn(random: Random, count: int) -> list[list[int]]:
    """Draw the lengths of eight responses for each of `count` prompts."""

    def length(mean: float) -> int:
        return max(1, round(math.exp(random.gauss(mean, WITHIN))))

    return [[length(mean) for _ in range(8)] for mean in (random.gauss(MEAN, BETWEEN) for _ in range(count))]


def learnt(lengths: list[list[int]]) -> LengthModel:
    model = LengthModel(LengthLimits())
    for prompt, of_prompt in enumerate(lengths):
        for each in of_prompt:
            model.finished(prompt, each)
    return model


LEARNT = learnt(drawn(Random(5), 200))


def test_variances_by_hand() -> None:
    """Log lengths 12 and 14 of one prompt, 15, 17 and 19 of another."""
    model = LengthModel(LengthLimits())
    for prompt, logs in (("a", (12, 14)), ("b", (15, 17, 19))):
        for each in logs:
            model.finished(prompt, round(math.exp(each)))
    # Means 13, 17 and 15.4 of all; squares between 2 * 2.4^2 + 3 * 1.6^2 = 19.2; size (5 - 13 / 5) / 1 = 2.4.
    assert model.mean == pytest.approx(15.4, abs=0.0001)
    between, within = model.variances()
    assert within == pytest.approx(10 / 3, abs=0.001)
    assert between == pytest.approx((19.2 - 10 / 3) / 2.4, abs=0.001)


def test_before_two_responses_of_a_prompt_were_seen_settings_stand_in() -> None:
    model = LengthModel(LengthLimits(deviation_first=2.0, tokens_first=100.0))
    assert model.variances() == (4.0, 4.0)
    assert model.estimate("a").median == pytest.approx(100)
    assert model.estimate("a").knowledge is Knowledge.JOB
    model.finished("a", 50)
    assert model.variances() == (4.0, 4.0)
    model.finished("a", 50)
    assert model.variances()[1] < 0.001, "one prompt says nothing of the others"
    assert model.variances()[0] == 4.0


def test_the_prompts_that_were_used_longest_ago_are_forgotten_with_what_they_told() -> None:
    model, other = LengthModel(LengthLimits(prompts_max=3)), LengthModel(LengthLimits())
    for number in range(9):
        for tokens in (10 + number, 100 * (number + 1)):
            model.finished(number, tokens)
            if number >= 6:
                other.finished(number, tokens)
    assert model.mean == pytest.approx(other.mean)
    assert model.variances() == pytest.approx(other.variances())
    assert model.estimate(0).knowledge is Knowledge.JOB


def test_a_policy_that_learns_is_followed() -> None:
    """Responses of a prompt that had 1,000 tokens a hundred times have 10 from now on."""
    model, steady = LengthModel(LengthLimits(responses_max=8.0)), LengthModel(LengthLimits(responses_max=1e9))
    for tokens in (1000,) * 100 + (10,) * 30:
        for each in (model, steady):
            each.finished("a", tokens)
            each.finished("b", 100)
    assert model.estimate("a").median < 20
    assert steady.estimate("a").median > 200


def test_what_was_drawn_is_found_again_and_quantiles_hold() -> None:
    """Of responses that are so long already, half are longer than the median, and a tenth than the 0.9 quantile."""
    lengths = drawn(Random(1), 2000)
    model = learnt([each[:4] for each in lengths])
    assert model.mean == pytest.approx(MEAN, abs=0.05)
    assert [math.sqrt(each) for each in model.variances()] == pytest.approx([BETWEEN, WITHIN], abs=0.03)
    for made in (0, 200):
        rest = [(prompt, each) for prompt, of_prompt in enumerate(lengths) for each in of_prompt[4:] if each > made]
        for share in (0.5, 0.9):
            below = sum(each <= model.estimate(prompt, made).quantile(share) for prompt, each in rest)
            assert below / len(rest) == pytest.approx(share, abs=0.02)


def test_what_still_runs_tells_of_its_siblings() -> None:
    """Of groups of which six are cut off at a length, the others are about as long as was said.

    The mean is the likeliest one, which is below the middle where much is cut off.
    """
    model, random = learnt(drawn(Random(2), 2000)), Random(3)
    below = ignoring = count = 0
    for group in drawn(random, 3000):
        cut = 600
        if min(group[:6]) > cut:
            for each in group[6:]:
                count += 1
                below += each <= model.estimate("new", 0, [cut] * 6).median
                ignoring += each <= model.estimate("new").median
    assert count > 300
    assert below / count == pytest.approx(0.45, abs=0.07)
    assert ignoring / count < 0.1


def test_what_tells_most_is_named() -> None:
    model = learnt([[100, 200]] * 5)
    assert model.estimate("new", prior=Prior(9.0, 1.0)).knowledge is Knowledge.ALIKE
    assert model.estimate("new", prior=Prior(9.0, 1.0)).mean == 9.0
    assert model.estimate("new", 0, [0, 1]).knowledge is Knowledge.JOB, "who has just begun tells nothing"
    assert model.estimate("new", 0, [0, 50]).knowledge is Knowledge.RUNNING
    assert model.estimate(0, 0, [0, 50]).knowledge is Knowledge.FINISHED


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1_000_000)), max_size=40),
    st.integers(0, 10_000_000),
    st.lists(st.integers(0, 10_000_000), max_size=16),
)
def test_whatever_was_seen_estimates_are_above_what_is_there_and_in_their_order(
    seen: list[tuple[int, int]], made: int, running: list[int]
) -> None:
    model = LengthModel(LengthLimits(prompts_max=4))
    for prompt, tokens in seen:
        model.finished(prompt, tokens)
    found = model.estimate(0, made, running)
    low, middle, high = (found.quantile(share) for share in (0.1, 0.5, 0.9))
    assert made <= low <= middle <= high < math.inf
    assert model.estimate(0, made + 1000, running).median >= middle * (1 - 1e-6)
    assert model.estimate(0, made, [*running, 10_000_000]).mean >= found.mean - 1e-6


def test_what_its_limit_cut_off_is_longer_than_it_came_to_be() -> None:
    """Three in ten are cut off: the lengths are found again, and not where they count as lengths, or not at all."""
    most = 600
    model, naive, ignorant = (LengthModel(LengthLimits()) for _ in range(3))
    cut = 0
    for prompt, of_prompt in enumerate(drawn(Random(4), 2000)):
        for each in of_prompt:
            cut += each > most
            (model.cut_off if each > most else model.finished)(prompt, min(each, most))
            naive.finished(prompt, min(each, most))
            if each <= most:
                ignorant.finished(prompt, each)
    assert 0.3 < cut / 16_000 < 0.4
    assert model.mean == pytest.approx(MEAN, abs=0.15)
    assert ignorant.mean < naive.mean < MEAN - 0.2
    assert [math.sqrt(each) for each in model.variances()] == pytest.approx([BETWEEN, WITHIN], abs=0.15)
    assert model.estimate("new").quantile(0.9) > 1000 > naive.estimate("new").quantile(0.9)


def test_where_all_are_cut_off_their_length_stays_one_that_can_be() -> None:
    """Each estimate of how much longer they are would raise the next one, until no float holds what is expected."""
    model, prompts = LengthModel(LengthLimits()), PromptLengths(LengthLimits())
    for _ in range(20_000):
        model.cut_off("a", 1024)
        prompts.cut_off(100, 1024)
    found = prompts.prior(100, model.variances()[1])
    assert found is not None
    for each in (model.estimate("a"), model.estimate("new", prior=found)):
        assert 1024 < each.median < 100 * 1024
        assert each.deviation < 2
        assert math.isfinite(sum(each.left()))
    for _ in range(64):
        model.finished("a", 20)
    assert model.estimate("a").median < 200


def test_no_response_is_expected_to_be_longer_than_it_may() -> None:
    found = learnt([[1000, 2000]] * 5).estimate_group("new").of(0, 700)
    assert (found.median, found.quantile(0.9)) == (700, 700)


def test_prompts_that_are_about_as_long_tell_of_a_new_one() -> None:
    """Responses are as long as their prompts, with a deviation of 0.3, and three classes of prompts were seen often."""
    prompts, random = PromptLengths(LengthLimits()), Random(6)
    for _ in range(300):
        for size in (100, 1000, 10_000):
            prompts.finished(size, round(size * math.exp(random.gauss(0.0, 0.3))))
    for size in (100, 1000, 10_000):
        found = prompts.prior(size, 0.05)
        assert found is not None
        assert math.exp(found.mean) == pytest.approx(size, rel=0.1)
        assert found.variance == pytest.approx(0.3**2 - 0.05, abs=0.02), "what is not within a prompt"
    assert prompts.prior(300, 0.05) is None
    prompts.cut_off(300, 5000)
    found = prompts.prior(300, 0.05)
    assert found is not None
    assert math.exp(found.mean) > 5000, "it is longer than it came to be"


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=7), st.integers(2, 3000))
def test_the_tokens_of_a_response_count_once(others: list[int], made: int) -> None:
    """As if it was not among those that run; exactly so where nothing else does."""
    model = LEARNT
    one = model.estimate_group("new", [made]).of(made)
    alone = model.estimate("new", made)
    assert (one.mean, one.deviation) == pytest.approx((alone.mean, alone.deviation), rel=0.005)
    found, wanted = model.estimate_group("new", [made, *others]).of(made), model.estimate("new", made, others)
    assert found.median == pytest.approx(wanted.median, rel=0.15)
