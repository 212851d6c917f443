"""How fast a source is taken to be, and what follows: what it may have under way, and how long it may be silent."""

import pytest

from tensorhub_agent.rates.source_rate import (
    AHEAD_S,
    BATCH_BYTES_MIN,
    FADE,
    LOCAL_BATCH_BYTES,
    RELAY_S,
    STALL_MIN_S,
    STALL_TIMES,
    UCXX_BATCH_BYTES,
    SourceRate,
    batch_bytes_max,
)

MIB = 1024 * 1024
STALL_S = 60.0


def at(mib_in_s: float) -> SourceRate:
    """Return a source between hosts that has brought so many MiB in one second."""
    pace = SourceRate("ucxx")
    pace.record(round(mib_in_s * MIB), 1.0)
    return pace


def test_a_batch_is_larger_within_a_host() -> None:
    assert (batch_bytes_max("local"), batch_bytes_max("ucxx")) == (LOCAL_BATCH_BYTES, UCXX_BATCH_BYTES)


def test_the_rate_is_what_came_lately() -> None:
    pace = SourceRate("ucxx")
    assert pace.rate is None
    pace.record(0, 1.0)
    assert pace.rate is None, "nothing has come, however long that took"
    pace = SourceRate("ucxx")
    pace.record(100, 0.0)
    assert pace.rate is None
    pace.record(200, 2.0)
    assert pace.rate == pytest.approx((100 * FADE + 200) / 2.0)
    pace.record(40, 4.0)
    assert pace.rate == pytest.approx(((100 * FADE + 200) * FADE + 40) / (2.0 * FADE + 4.0))


def test_it_is_asked_for_no_more_ahead_than_its_part_and_what_it_brings_in_a_moment() -> None:
    assert SourceRate("ucxx").in_flight_limit(64 * MIB) == 0
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
    assert SourceRate("ucxx").batch_bytes(0) == 1
    assert at(1).batch_bytes(1) == 1


def test_batches_are_short_while_others_wait_for_them() -> None:
    assert SourceRate("ucxx").batch_bytes(64 * MIB, relayed=True) == BATCH_BYTES_MIN
    assert at(300).batch_bytes(64 * MIB, relayed=True) == pytest.approx(300 * MIB * RELAY_S)
    assert at(100_000).batch_bytes(64 * MIB, relayed=True) == UCXX_BATCH_BYTES


def test_it_may_be_silent_for_some_times_what_is_under_way_should_take_between_bounds() -> None:
    assert at(1).patience_s(5 * MIB, STALL_S) == pytest.approx(STALL_TIMES * 5)
    assert at(1000).patience_s(MIB, STALL_S) == STALL_MIN_S
    assert at(1).patience_s(5000 * MIB, STALL_S) == STALL_S
    assert at(1000).patience_s(MIB, 0.5) == 0.5


def test_who_is_not_measured_or_was_forgiven_or_is_on_this_host_has_the_long_bound() -> None:
    assert SourceRate("ucxx").patience_s(MIB, STALL_S) == STALL_S
    forgiven = at(1000)
    forgiven.is_trusted = True
    assert forgiven.patience_s(MIB, STALL_S) == STALL_S
    local = SourceRate("local")
    local.record(1000 * MIB, 1.0)
    assert local.patience_s(MIB, STALL_S) == STALL_S


def test_silence_lowers_what_is_expected_of_it() -> None:
    assert SourceRate("ucxx").remaining_s(MIB, 3.0) == 3.0
    assert at(2).remaining_s(4 * MIB, 0.0) == pytest.approx(2.0)
    assert at(2).remaining_s(4 * MIB, 1.0) == pytest.approx(4.0)
    assert at(1000).remaining_s(0, 7.0) == 7.0
