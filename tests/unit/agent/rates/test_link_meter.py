"""What makes a sample of a link: bytes, and the time in which any were under way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent.transfer.driver import source_id

from tensorhub_agent.rates.link_rates import (
    SAMPLE_BYTES_LEAST,
    SAMPLE_BYTES_MIN,
    SAMPLE_S_MIN,
    LinkMeter,
    LinkMeters,
    LinkSample,
)
from tensorhub_common.protocol.plans import Share, Transport

MANY = SAMPLE_BYTES_MIN


def share(link: str, name: str = "a", transport: Transport = "ucxx") -> Share:
    return Share(source=source_id(name), transport=transport, pieces=((0, 1),), nbytes=0, why="", link=link)


def brought(meter: LinkMeter, nbytes: int, begin: float, end: float) -> None:
    meter.begins(begin)
    meter.came(nbytes)
    meter.ends(end)


def test_only_the_time_counts_in_which_something_was_under_way() -> None:
    meter = LinkMeter()
    brought(meter, MANY, 1.0, 2.0)
    brought(meter, MANY, 100.0, 101.0)
    assert meter.take(200.0) == (2 * MANY, 2.0)


def test_what_comes_from_several_sources_at_once_is_one_stream_on_the_link() -> None:
    """Two sources of one site, from 0 to 3 and from 1 to 4: 4 s, and not 6."""
    meters = LinkMeters()
    one, other = meters.of(share("wan/paris")), meters.of(share("wan/paris", "b"))
    one.begins(0.0)
    other.begins(1.0)
    one.came(MANY)
    one.ends(3.0)
    other.came(MANY)
    other.ends(4.0)
    assert meters.take(9.0) == [LinkSample(("wan/paris", "ucxx"), 2 * MANY, 4.0, 1)]


def test_a_read_under_way_is_told_of_once() -> None:
    """A read that asks for another plan tells what it has seen of its sources so far."""
    meter = LinkMeter()
    meter.begins(0.0)
    meter.came(MANY)
    assert meter.take(2.0) == (MANY, 2.0)
    meter.came(3 * MANY)
    meter.ends(3.0)
    assert meter.take(9.0) == (3 * MANY, 1.0)
    assert meter.take(9.0) is None


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


def test_a_pause_of_the_reader_is_nobodys_slowness() -> None:
    meters = LinkMeters()
    meter = meters.of(share("site/node-2"))
    meter.begins(0.0)
    meters.paused(10.0, 11.0)
    meter.came(MANY)
    meter.ends(11.0)
    [sample] = meters.take(11.0)
    assert sample.seconds == pytest.approx(1.0)


def test_links_are_told_apart_and_counted() -> None:
    meters = LinkMeters()
    for link in ("site/node-2", "site/node-3", ""):
        brought(meters.of(share(link)), MANY, 0.0, 1.0)
    meters.of(share("site/node-4"))
    assert [(sample.link[0], sample.parallel) for sample in meters.take(2.0)] == [
        ("site/node-2", 2),
        ("site/node-3", 2),
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 5.0), st.integers(0, 3 * MANY)), max_size=20))
def test_no_byte_is_told_of_twice_and_no_second_beyond_those_that_passed(
    turns: list[tuple[int, float, int]],
) -> None:
    """Sources begin and end as they like, and somebody asks now and then."""
    meters = LinkMeters()
    meter, busy, now, came = meters.of(share("wan/paris")), [False] * 2, 0.0, 0
    told: list[LinkSample] = []
    for who, passed, nbytes in turns:
        now += passed
        if who == len(busy):
            told += meters.take(now)
        elif busy[who]:
            meter.came(nbytes)
            came += nbytes
            meter.ends(now)
            busy[who] = False
        else:
            meter.begins(now)
            busy[who] = True
    told += meters.take(now)
    assert sum(sample.nbytes for sample in told) + meter.nbytes == came
    assert all(sample.seconds > 0 for sample in told)
    assert sum(sample.seconds for sample in told) <= now * (1 + 1e-9)


def test_what_came_as_patches_tells_nothing_of_the_link() -> None:
    meter = LinkMeter()
    meter.begins(0.0)
    meter.came(64 << 20)
    meter.forget(1.0)
    assert meter.take(2.0) is None
    meter.came(32 << 20)
    assert meter.take(3.0) == (32 << 20, 2.0)
