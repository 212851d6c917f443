"""How fast a source is taken to be, and what follows: what it may have under way, and how long it may be silent."""

import pytest

from tensorhub_agent.rates.source_rate import AHEAD_S, FADE, RELAY_S, BatchLimits, SourceRate

MIB = 1024 * 1024


def at(mib_in_s: float) -> SourceRate:
    """Return a source between hosts that has brought so many MiB in one second."""
    pace = SourceRate()
    pace.record(round(mib_in_s * MIB), 1.0)
    return pace


def test_the_rate_is_what_came_lately() -> None:
    pace = at(0)
    assert pace.rate is None, "nothing has come, however long that took"
    pace = SourceRate()
    pace.record(100, 0.0)
    assert pace.rate is None
    pace.record(200, 2.0)
    assert pace.rate == pytest.approx((100 * FADE + 200) / 2.0)
    pace.record(40, 4.0)
    assert pace.rate == pytest.approx(((100 * FADE + 200) * FADE + 40) / (2.0 * FADE + 4.0))


@pytest.mark.parametrize(
    ("mib_in_s", "share_mib", "batch_mib", "relayed_mib", "under_way_mib"),
    [
        (0, 64, 8, 1, 0),
        (0.1, 64, 1, 1, 0.1 * AHEAD_S),
        (16, 64, 2, 1, 16 * AHEAD_S),
        (24, 64, 3, 1, 24 * AHEAD_S),
        (300, 64, 8, 300 * RELAY_S, 64),
        (10_000, 64, 8, 8, 64),
        (10_000, 4, 2, 2, 4),
        (0.1, 1, 0.5, 0.5, 0.1 * AHEAD_S),
    ],
)
def test_it_is_asked_for_its_part_and_what_it_brings_in_a_moment_in_two_batches_within_bounds(
    mib_in_s: float, share_mib: int, batch_mib: float, relayed_mib: float, under_way_mib: float
) -> None:
    """They are short while others wait for them."""
    pace, share_bytes = at(mib_in_s), share_mib * MIB
    assert pace.batch_bytes(share_bytes) == pytest.approx(batch_mib * MIB)
    assert pace.batch_bytes(share_bytes, relayed=True) == pytest.approx(relayed_mib * MIB)
    assert pace.in_flight_limit(share_bytes) == pytest.approx(under_way_mib * MIB, abs=1)


def test_the_window_of_a_wire_bounds_what_comes_over_one_and_not_what_is_in_memory() -> None:
    limits = BatchLimits(wire_window_bytes=5 * MIB)
    for reads_memory, under_way_mib in ((False, 5), (True, 64)):
        pace = SourceRate(limits=limits, reads_memory=reads_memory)
        pace.record(10_000 * MIB, 1.0)
        assert pace.in_flight_limit(64 * MIB) == under_way_mib * MIB


def test_a_batch_is_never_of_nothing_larger_within_a_host_and_small_at_first_from_far() -> None:
    assert SourceRate().batch_bytes(0) == 1
    assert at(1).batch_bytes(1) == 1
    assert SourceRate(reads_memory=True).batch_bytes(256 * MIB) == BatchLimits().memory_bytes > BatchLimits().wire_bytes
    assert SourceRate(is_far=True).batch_bytes(256 * MIB) == BatchLimits().least_bytes


def test_silence_lowers_what_is_expected_of_it() -> None:
    assert SourceRate().remaining_s(MIB, 3.0) == 3.0
    assert at(2).remaining_s(4 * MIB, 0.0) == pytest.approx(2.0)
    assert at(2).remaining_s(4 * MIB, 1.0) == pytest.approx(4.0)
    assert at(1000).remaining_s(0, 7.0) == 7.0
