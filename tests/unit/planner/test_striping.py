"""The model of how many sources are worth it, in numbers that can be checked by hand."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_planner.planning.cost_model import StripeCandidate, stripe
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, Rates

GB = 10**9
RATES = Rates(ingest_bps=10 * GB, source_bps=10 * GB, setup_s=0.01)
FREE = Rates(ingest_bps=1e15, source_bps=GB, setup_s=0)
"""Asking one more costs nothing, and the reader is no bound."""
IDLE = StripeCandidate(0)


def test_one_idle_source_fills_the_reader() -> None:
    """Four idle sources can't beat one, since the reader takes no more."""
    found = stripe(10 * GB, [IDLE] * 4, RATES, 16, 0.1)
    assert sum(found.nbytes) == 10 * GB
    assert len(found.nbytes) == 1
    assert found.seconds == found.seconds_alone
    assert found.seconds == pytest.approx(1.01)


def test_busy_sources_are_striped() -> None:
    """Two sources with one reader each fill the reader together: 1.02 s instead of 2.01 s; a third adds nothing."""
    found = stripe(10 * GB, [StripeCandidate(1)] * 3, RATES, 16, 0.1)
    assert found.nbytes == pytest.approx((5 * GB, 5 * GB))
    assert found.seconds == pytest.approx(1.02)
    assert found.seconds_alone == pytest.approx(2.01)


def test_a_busier_source_gives_less() -> None:
    """With one and three readers they give 5 and 2.5 GB/s, so two thirds and one third."""
    found = stripe(9 * GB, [StripeCandidate(1), StripeCandidate(3)], RATES, 16, 0.0)
    assert found.nbytes == pytest.approx((6 * GB, 3 * GB))


def test_a_slow_source_gives_less() -> None:
    """One that was measured to give a quarter of the other's gives a fifth, so that both end together."""
    found = stripe(10 * GB, [StripeCandidate(0, 0, 4 * GB), StripeCandidate(0, 0, 1 * GB)], RATES, 16, 0.0)
    assert found.nbytes == pytest.approx((8 * GB, 2 * GB))
    assert found.seconds == pytest.approx(2.02)


def test_a_small_read_is_not_striped() -> None:
    """Where asking one more source costs more than it brings."""
    assert len(stripe(1024, [StripeCandidate(3)] * 4, RATES, 16, 0.1).nbytes) == 1


def test_on_one_host_nothing_is_striped() -> None:
    """The reader copies by itself: its speed is the bound, however many sources there are and however busy."""
    found = stripe(12 * GB, [StripeCandidate(7)] * 4, LOCAL, 16, 0.1)
    assert list(found.nbytes) == [12 * GB]
    assert found.seconds == found.seconds_alone == pytest.approx(1.0005)


def test_no_more_sources_than_allowed() -> None:
    assert len(stripe(100 * GB, [StripeCandidate(20)] * 40, RATES, 4, 0.0).nbytes) == 4


def test_what_the_plan_reads_already_counts() -> None:
    """A source that already gives 6 GB of this plan gets less, so that both end together."""
    found = stripe(4 * GB, [StripeCandidate(1), StripeCandidate(1, begun=2 * GB)], RATES, 16, 0.0)
    assert found.nbytes == pytest.approx((3 * GB, 1 * GB))


def test_one_that_ends_too_late_gets_nothing() -> None:
    found = stripe(GB, [IDLE, StripeCandidate(0, begun=50 * GB)], FREE, 16, 0.0)
    assert found.nbytes[0] == pytest.approx(GB)
    assert sum(found.nbytes[1:]) == 0


def test_nothing_to_read() -> None:
    """No second source is asked for that, even where the first still has much to give."""
    assert stripe(0, [StripeCandidate(4)] * 3, NETWORK, 16, 0.1).nbytes == (0,)
    assert stripe(0, [StripeCandidate(0, begun=GB), IDLE], FREE, 16, 0.1).nbytes == (0,)


candidates = st.lists(st.builds(StripeCandidate, st.integers(0, 20), st.integers(0, 10**12)), min_size=1, max_size=40)
rates = st.builds(
    lambda ingest, source, setup: Rates(ingest_bps=ingest, source_bps=source, setup_s=setup),
    st.floats(1e6, 1e12),
    st.none() | st.floats(1e6, 1e12),
    st.floats(0, 1),
)


@given(st.integers(0, 10**13), candidates, rates, st.integers(1, 16), st.floats(0, 1))
@example(GB, [StripeCandidate(0, begun=3 * GB), StripeCandidate(0, begun=GB)], FREE, 2, 0.0)
@example(GB, [StripeCandidate(9, begun=GB), StripeCandidate(0, begun=8 * GB)], FREE, 2, 0.0)
def test_all_bytes_are_given_out(
    nbytes: int, some: list[StripeCandidate], speed: Rates, stripes_max: int, slack: float
) -> None:
    """Neither more nor less than all bytes, to the first few sources; and never slower than from one, but for slack."""
    found = stripe(nbytes, some, speed, stripes_max, slack)
    assert sum(found.nbytes) == pytest.approx(nbytes, rel=1e-6, abs=1), "but for a byte of rounding"
    assert all(each >= 0 for each in found.nbytes)
    assert 1 <= len(found.nbytes) <= min(len(some), stripes_max)
    assert found.seconds <= found.seconds_alone * (1 + slack) * (1 + 1e-9)


def seconds_of(nbytes: int, used: list[StripeCandidate], speed: Rates) -> float:
    """Return what the model says, with the common end found by trying: by then all that end sooner give everything."""
    setup = speed.setup_s * sum(not each.begun for each in used)
    ingest = (nbytes + sum(each.begun for each in used)) / speed.ingest_bps
    if speed.source_bps is None:
        return ingest + setup
    early, late = 0.0, max((nbytes + each.begun) * (each.readers + 1) for each in used) / speed.source_bps
    for _ in range(100):
        end = (early + late) / 2
        given_by_then = sum(max(0.0, end * speed.source_bps / (each.readers + 1) - each.begun) for each in used)
        early, late = (early, end) if given_by_then >= nbytes else (end, late)
    return max(late, ingest) + setup


@given(st.integers(1, 10**13), candidates, rates, st.integers(1, 16), st.floats(0, 1))
@example(1, [StripeCandidate(0, begun=GB), IDLE], FREE, 2, 0.0)
def test_no_other_number_of_sources_is_faster(
    nbytes: int, some: list[StripeCandidate], speed: Rates, stripes_max: int, slack: float
) -> None:
    """But for the slack; where the reader is the bound, there is nothing to gain from more than one."""
    found = stripe(nbytes, some, speed, stripes_max, slack)
    all_of_them = range(1, min(len(some), stripes_max) + 1) if speed.source_bps is not None else [1]
    times = [seconds_of(nbytes, some[:count], speed) for count in all_of_them]
    assert found.seconds == pytest.approx(times[len(found.nbytes) - 1])
    assert found.seconds_alone == pytest.approx(times[0])
    assert found.seconds <= min(times) * (1 + slack) * (1 + 1e-6)


@given(st.integers(1, 10**13), candidates, rates, st.integers(1, 16))
@example(4 * GB, [StripeCandidate(0, begun=GB), StripeCandidate(9, begun=GB)], FREE, 2)
def test_sources_end_together(nbytes: int, some: list[StripeCandidate], speed: Rates, stripes_max: int) -> None:
    """Whoever gets a part ends with the others, all that it had begun included; whoever gets none ends no sooner."""
    found = stripe(nbytes, some, speed, stripes_max, 0.0)
    if speed.source_bps is None:
        return
    used = some[: len(found.nbytes)]
    ends = [(each.begun + part) * (each.readers + 1) for each, part in zip(used, found.nbytes, strict=True)]
    last = max(end for end, part in zip(ends, found.nbytes, strict=True) if part)
    assert min(ends) >= last * (1 - 1e-9)


def test_a_part_of_a_plan_need_not_end_before_the_whole() -> None:
    """Two busy sources would bring a tenth in half the time; but the reader takes in the rest for longer than that."""
    busy = [StripeCandidate(3)] * 4
    assert len(stripe(GB, busy, RATES, 16, 0.1).nbytes) > 1
    found = stripe(GB, busy, RATES, 16, 0.1, floor_s=1.0)
    assert list(found.nbytes) == [GB]
    assert found.seconds == pytest.approx(1.01)
