"""The rates that an agent makes of its samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.rates.link_rates import FALL, RISE, SLOW_SAMPLES_MIN, LinkKey, LinkRates, LinkSample
from tensorhub_common.protocol.plans import RATES_MAX, LinkRate

NEAR: LinkKey = ("site/node-2", "ucxx")


def sample(bps: float, *, link: str = "site/node-2", seconds: float = 2.0, parallel: int = 1) -> LinkSample:
    return LinkSample((link, "ucxx"), round(bps * seconds), seconds, parallel)


def rate(measured: LinkRates, now: float = 0.0) -> LinkRate:
    [told] = measured.told(now)
    return told


def test_the_first_sample_is_the_rate() -> None:
    measured = LinkRates()
    measured.note([sample(1000)], 5.0)
    assert measured.told(7.5) == (LinkRate("site/node-2", "ucxx", 1000, 1, 2.5),)


def test_what_came_is_the_least_that_the_link_gives_so_more_counts_at_once_and_less_slowly() -> None:
    measured = LinkRates()
    measured.note([sample(1000)], 0.0)
    measured.note([sample(2000)], 1.0)
    assert rate(measured).bps == 1000 + RISE * 1000
    measured.note([sample(500)], 2.0)
    assert rate(measured).bps == 1500 - FALL * 1000


def test_one_of_several_links_that_were_used_at_once_says_less_by_being_slow() -> None:
    """The reader may have been the bound, and each link had a part of it."""
    alone, beside = LinkRates(), LinkRates()
    for measured, parallel in ((alone, 1), (beside, 4)):
        measured.note([sample(1000), sample(200, parallel=parallel)], 0.0)
    assert rate(alone).bps == 1000 - FALL * 800
    assert rate(beside).bps == 1000 - FALL / 4 * 800


def test_a_link_that_has_become_slow_is_known_after_some_reads() -> None:
    measured = LinkRates()
    measured.note([sample(1000)], 0.0)
    for number in range(10):
        measured.note([sample(10)], number)
    assert rate(measured).bps < 100


def test_one_bad_moment_makes_no_link_a_slow_one() -> None:
    """Patches would come of all pieces then, and be waited for, and no read would see more of the link."""
    measured = LinkRates()
    for number in range(1, SLOW_SAMPLES_MIN):
        measured.note([sample(25e6)], number)
        assert measured.rate(NEAR) is None
    measured.note([sample(25e6)], SLOW_SAMPLES_MIN)
    assert measured.rate(NEAR) == pytest.approx(25e6)


def test_one_sample_makes_a_link_a_fast_one() -> None:
    """Bytes that came were brought by the link, whatever the machine did."""
    measured = LinkRates()
    measured.note([sample(20e9)], 0.0)
    assert measured.rate(NEAR) == pytest.approx(20e9)


def test_the_link_that_was_not_used_for_longest_is_forgotten_first() -> None:
    measured = LinkRates()
    for number in range(RATES_MAX):
        measured.note([sample(1, link=f"site/{number}")], number)
    measured.note([sample(1, link="site/0")], 100)
    measured.note([sample(1, link="site/new")], 101)
    links = [told.link for told in measured.told(101)]
    assert len(links) == RATES_MAX
    assert "site/1" not in links
    assert links[-2:] == ["site/0", "site/new"]


def test_a_rate_is_never_told_as_nothing() -> None:
    """A planner would divide by it."""
    measured = LinkRates()
    measured.note([LinkSample(NEAR, 1, 100.0, 1)], 0.0)
    assert rate(measured).bps == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 2**40), st.floats(1e-3, 1e4), st.integers(1, 8), st.floats(0, 100)),
        min_size=1,
        max_size=30,
    )
)
def test_an_estimate_stays_within_what_was_seen(samples: list[tuple[int, float, int, float]]) -> None:
    measured, now = LinkRates(), 0.0
    for nbytes, seconds, parallel, passed in samples:
        now += passed
        measured.note([LinkSample(NEAR, nbytes, seconds, parallel)], now)
    told = rate(measured, now)
    seen = [nbytes / seconds for nbytes, seconds, _, _ in samples]
    assert min(seen) * (1 - 1e-9) - 1 <= told.bps <= max(seen) * (1 + 1e-9) + 1
    assert (told.samples, told.age_s) == (len(samples), 0.0)


@given(st.floats(1e3, 1e10), st.floats(1e3, 1e10), st.integers(1, 4))
def test_an_estimate_comes_to_what_the_link_gives_from_above_and_from_below(
    before: float, after: float, parallel: int
) -> None:
    measured = LinkRates()
    measured.note([sample(before, seconds=1000.0)], 0.0)
    for _ in range(400):
        measured.note([sample(after, seconds=1000.0, parallel=parallel)], 0.0)
    assert rate(measured).bps == pytest.approx(after, rel=0.01)
