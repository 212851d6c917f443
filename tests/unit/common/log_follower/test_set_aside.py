"""When a job that was set aside is tried again."""

import pytest

from tensorhub_common.log_follower.set_aside import RetryLimits, SetAside, set_aside

LIMITS = RetryLimits(first_s=5.0, max_s=600.0)


def again(before: SetAside | None, seq: int, now: float, *, has_recovered: bool = False) -> SetAside:
    return set_aside(before, seq, now, LIMITS, has_recovered=has_recovered)


def test_a_job_that_fails_at_each_try_is_tried_ever_more_rarely() -> None:
    aside = again(None, 7, 0.0)
    waits = [aside.wait_s]
    for number in range(11):
        aside = again(aside, 8 + number, aside.again_at + 1.0)
        assert aside.since == 0.0
        assert aside.again_at == sum(waits) + number + 1 + aside.wait_s
        waits.append(aside.wait_s)
    assert waits == [*(5.0 * 2**n for n in range(7)), *[600.0] * 5]


def test_a_job_that_recovered_begins_again() -> None:
    aside = again(again(None, 7, 0.0), 7, 6.0)
    assert (aside.failures, aside.wait_s) == (2, 10.0)
    later = aside.again_at + aside.wait_s
    assert [aside.has_lasted(now) for now in (later - 0.1, later)] == [False, True]
    assert again(aside, 8, later, has_recovered=True) == SetAside(8, later, 1, 5.0, later + 5.0)


def test_a_job_that_got_less_far_keeps_where_it_failed() -> None:
    """Its log can't be read at all now."""
    assert again(again(None, 7, 0.0), 0, 5.0).seq == 7


@pytest.mark.parametrize("failures", [64, 100_000])
def test_no_number_of_failures_is_too_many(failures: int) -> None:
    assert again(SetAside(7, 0.0, failures, 600.0, 0.0), 7, 0.0).wait_s == LIMITS.max_s
