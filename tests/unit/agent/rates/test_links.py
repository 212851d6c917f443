"""What makes a sample of a link, bytes and the time in which any were under way; and the rate made of the samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent.transfer.driver import share

from tensorhub_agent.rates.link_rates import (
    FALL,
    RISE,
    SAMPLE_BYTES_LEAST,
    SAMPLE_BYTES_MIN,
    SAMPLE_S_MIN,
    SLOW_SAMPLES_MIN,
    LinkKey,
    LinkMeter,
    LinkMeters,
    LinkRates,
    LinkSample,
)
from tensorhub_common.protocol.plans import RATES_MAX, LinkRate

MANY = SAMPLE_BYTES_MIN
NEAR: LinkKey = ("site/node-2", "ucxx")


def meter_of(meters: LinkMeters, link: str, name: str = "a") -> LinkMeter:
    return meters.of(share(name, (0, 1), transport="ucxx", link=link))


def brought(meter: LinkMeter, nbytes: int, begin: float, end: float) -> None:
    meter.begins(begin)
    meter.came(nbytes)
    meter.ends(end)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "tells"),
    [
        (MANY, SAMPLE_S_MIN / 100, True),
        (MANY - 1, SAMPLE_S_MIN / 100, False),
        (SAMPLE_BYTES_LEAST, SAMPLE_S_MIN, True),
        (SAMPLE_BYTES_LEAST - 1, 100 * SAMPLE_S_MIN, False),
        (0, 10 * SAMPLE_S_MIN, False),
        (MANY, 0.0, False),
    ],
)
def test_little_that_came_soon_tells_of_round_trips_and_not_of_the_link(
    nbytes: int, seconds: float, *, tells: bool
) -> None:
    meter = LinkMeter()
    brought(meter, nbytes, 0.0, seconds)
    assert (meter.take(20.0) is not None) == tells


def test_what_comes_from_several_sources_at_once_is_one_stream_on_the_link_and_links_are_told_apart() -> None:
    """Two sources of one site, from 0 to 3 and from 1 to 4: 4 s, and not 6. What was nowhere is told by no link."""
    meters = LinkMeters()
    one, other = meter_of(meters, "wan/paris"), meter_of(meters, "wan/paris", "b")
    one.begins(0.0)
    brought(other, MANY, 1.0, 3.0)
    one.came(MANY)
    one.ends(4.0)
    for link in ("site/node-2", ""):
        brought(meter_of(meters, link), MANY, 0.0, 1.0)
    meter_of(meters, "site/node-4")
    assert meters.take(9.0) == [
        LinkSample(("wan/paris", "ucxx"), 2 * MANY, 4.0, 2),
        LinkSample(("site/node-2", "ucxx"), MANY, 1.0, 2),
    ]


def test_what_is_told_of_once_is_told_of_no_more() -> None:
    """A read that asks for another plan tells what it has seen of its sources so far."""
    meter = LinkMeter()
    meter.begins(0.0)
    meter.came(MANY)
    assert meter.take(2.0) == (MANY, 2.0)
    meter.came(3 * MANY)
    meter.ends(3.0)
    assert meter.take(9.0) == (3 * MANY, 1.0)
    assert meter.take(9.0) is None
    brought(meter, MANY, 10.0, 11.0)
    brought(meter, MANY, 100.0, 101.0)
    assert meter.take(200.0) == (2 * MANY, 2.0), "only the time counts in which something was under way"


def test_what_came_as_patches_and_a_pause_of_the_reader_tell_nothing_of_the_link() -> None:
    meters = LinkMeters()
    meter = meter_of(meters, "site/node-2")
    meter.begins(0.0)
    meter.came(4 * MANY)
    meter.forget(1.0)
    assert meter.take(2.0) is None
    meters.paused(10.0, 13.0)
    meter.came(2 * MANY)
    meter.ends(13.0)
    assert meters.take(13.0) == [LinkSample(NEAR, 2 * MANY, 2.0, 1)]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 5.0), st.integers(0, 3 * MANY)), max_size=20))
def test_no_byte_is_told_of_twice_and_no_second_beyond_those_that_passed(
    turns: list[tuple[int, float, int]],
) -> None:
    """Sources begin and end as they like, and somebody asks now and then."""
    meters = LinkMeters()
    meter, busy, now, came = meter_of(meters, "wan/paris"), [False] * 2, 0.0, 0
    told: list[LinkSample] = []
    for who, passed, nbytes in turns:
        now += passed
        if who == len(busy):
            told += meters.take(now)
            continue
        if busy[who]:
            meter.came(nbytes)
            came += nbytes
            meter.ends(now)
        else:
            meter.begins(now)
        busy[who] = not busy[who]
    told += meters.take(now)
    assert sum(sample.nbytes for sample in told) + meter.nbytes == came
    assert all(sample.seconds > 0 for sample in told)
    assert sum(sample.seconds for sample in told) <= now * (1 + 1e-9)


# The rates that an agent makes of its samples.


def sample(bps: float, *, link: str = "site/node-2", seconds: float = 2.0, parallel: int = 1) -> LinkSample:
    return LinkSample((link, "ucxx"), round(bps * seconds), seconds, parallel)


def told(*samples: LinkSample) -> LinkRate:
    """Return the rate of one link after these."""
    measured = LinkRates()
    measured.note(list(samples), 5.0)
    [rate] = measured.told(7.5)
    return rate


@pytest.mark.parametrize(
    ("samples", "bps"),
    [
        ([sample(1000)], 1000),
        ([sample(1000), sample(2000)], 1000 + RISE * 1000),
        ([sample(1000), sample(500)], 1000 - FALL * 500),
        ([sample(1000), sample(200, parallel=4)], 1000 - FALL / 4 * 800),
        ([LinkSample(NEAR, 1, 100.0, 1)], 1),
    ],
    ids=["the first", "more at once", "less slowly", "used beside others", "never told as nothing"],
)
def test_what_came_is_the_least_that_the_link_gives(samples: list[LinkSample], bps: float) -> None:
    """Of several links that were used at once the reader may have been the bound, and each had a part of it."""
    assert told(*samples) == LinkRate("site/node-2", "ucxx", int(bps), len(samples), 2.5)


def test_one_bad_moment_makes_no_link_a_slow_one_and_one_sample_makes_it_a_fast_one() -> None:
    """Bytes that came were brought by the link. By a slow one patches would come, and no read would see more of it."""
    measured = LinkRates()
    for number in range(1, SLOW_SAMPLES_MIN):
        measured.note([sample(25e6)], number)
        assert measured.rate(NEAR) is None
    measured.note([sample(25e6)], SLOW_SAMPLES_MIN)
    assert measured.rate(NEAR) == pytest.approx(25e6)
    fast = LinkRates()
    fast.note([sample(20e9)], 0.0)
    assert fast.rate(NEAR) == pytest.approx(20e9)


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


@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e-3, 1e4), st.integers(1, 8)), min_size=1, max_size=30),
    st.floats(1e3, 1e10),
    st.integers(1, 4),
)
def test_an_estimate_stays_within_what_was_seen_and_comes_to_what_the_link_gives(
    drawn: list[tuple[int, float, int]], after_bps: float, parallel: int
) -> None:
    samples = [LinkSample(NEAR, *each) for each in drawn]
    seen = [each.nbytes / each.seconds for each in samples]
    assert min(seen) * (1 - 1e-9) - 1 <= told(*samples).bps <= max(seen) * (1 + 1e-9) + 1
    later = [sample(after_bps, seconds=1000.0, parallel=parallel)] * 400
    assert told(sample(seen[0], seconds=1000.0), *later).bps == pytest.approx(after_bps, rel=0.01)
