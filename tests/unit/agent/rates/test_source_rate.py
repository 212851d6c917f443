"""How fast a source is taken to be, and what follows: what it may have under way, and how long it may be silent."""

import pytest

from tensorhub_agent.rates.source_rate import (
    AHEAD_S,
    FADE,
    RELAY_S,
    BatchLimits,
    SourceRate,
)

MIB = 1024 * 1024


def at(mib_in_s: float) -> SourceRate:
    """Return a source between hosts that has brought so many MiB in one second."""
    pace = SourceRate()
    pace.record(round(mib_in_s * MIB), 1.0)
    return pace


def test_a_batch_is_larger_within_a_host() -> None:
    assert BatchLimits().largest_bytes(reads_memory=True) > BatchLimits().largest_bytes(reads_memory=False)


def test_the_rate_is_what_came_lately() -> None:
    pace = SourceRate()
    assert pace.rate is None
    pace.record(0, 1.0)
    assert pace.rate is None, "nothing has come, however long that took"
    pace = SourceRate()
    pace.record(100, 0.0)
    assert pace.rate is None
    pace.record(200, 2.0)
    assert pace.rate == pytest.approx((100 * FADE + 200) / 2.0)
    pace.record(40, 4.0)
    assert pace.rate == pytest.approx(((100 * FADE + 200) * FADE + 40) / (2.0 * FADE + 4.0))


def test_it_is_asked_for_no_more_ahead_than_its_part_and_what_it_brings_in_a_moment() -> None:
    assert SourceRate().in_flight_limit(64 * MIB) == 0
    assert at(100).in_flight_limit(64 * MIB) == 100 * MIB * AHEAD_S
    assert at(100).in_flight_limit(MIB) == MIB


@pytest.mark.parametrize(
    ("mib_in_s", "share_mib", "batch_mib"),
    [(0.1, 64, 1), (16, 64, 2), (24, 64, 3), (10_000, 64, 8), (10_000, 4, 2), (0.1, 1, 0.5)],
)
def test_a_batch_is_half_of_what_may_be_under_way_between_bounds(
    mib_in_s: float, share_mib: int, batch_mib: float
) -> None:
    assert at(mib_in_s).batch_bytes(share_mib * MIB) == pytest.approx(batch_mib * MIB)


def test_a_batch_is_never_of_nothing() -> None:
    assert SourceRate().batch_bytes(0) == 1
    assert at(1).batch_bytes(1) == 1


def test_batches_are_short_while_others_wait_for_them() -> None:
    assert SourceRate().batch_bytes(64 * MIB, relayed=True) == BatchLimits().least_bytes
    assert at(300).batch_bytes(64 * MIB, relayed=True) == pytest.approx(300 * MIB * RELAY_S)
    assert at(100_000).batch_bytes(64 * MIB, relayed=True) == BatchLimits().wire_bytes


def test_silence_lowers_what_is_expected_of_it() -> None:
    assert SourceRate().remaining_s(MIB, 3.0) == 3.0
    assert at(2).remaining_s(4 * MIB, 0.0) == pytest.approx(2.0)
    assert at(2).remaining_s(4 * MIB, 1.0) == pytest.approx(4.0)
    assert at(1000).remaining_s(0, 7.0) == 7.0
