"""StreamRL's dispatch: divisions of a fleet by hand and against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.skew import Fleet, Part, TimesCount, divided, seconds_of

STEPS = StepModel(0.01, 0.001, 0.0)
"""A step takes 10 ms, and 1 ms for each request."""

parts = st.builds(Part, st.integers(0, 200), st.floats(1, 10_000), st.floats(0, 10_000))
fleets = st.builds(Fleet, st.integers(0, 12), st.integers(1, 64), st.just(STEPS))


def test_a_division_by_hand() -> None:
    """Of 4 instances of 16, 20 long responses take 52, 20 or 17 s on 1, 2 or 3, and 80 short ones 13 s on one."""
    tail, rest, fleet = Part(20, 1000), Part(80, 100), Fleet(4, 16, STEPS)
    assert seconds_of(tail, 1, 16, STEPS) == pytest.approx(0.026 * 1000 * 2)
    assert seconds_of(tail, 2, 16, STEPS) == pytest.approx(0.020 * 1000)
    assert seconds_of(tail, 3, 16, STEPS) == pytest.approx(0.017 * 1000)
    assert seconds_of(rest, 1, 16, STEPS) == pytest.approx(0.026 * 100 * 5)
    found = divided(tail, rest, fleet)
    assert found.tail_instances == 3
    assert found.seconds == pytest.approx(17.0)
    assert divided(tail, rest, fleet, TimesCount.SUM).tail_instances == 2, "20 + 7.8 s are less than 17 + 13"


def test_one_instance_serves_both_and_what_is_not_there_needs_none() -> None:
    tail, rest = Part(2, 100), Part(8, 10)
    alone = divided(tail, rest, Fleet(1, 16, STEPS))
    assert alone.tail_instances == 0
    assert alone.seconds == pytest.approx(0.012 * 100 + 0.018 * 10)
    assert divided(Part(0, 0), rest, Fleet(4, 16, STEPS)).tail_instances == 0
    assert divided(tail, Part(0, 0), Fleet(2, 1, STEPS)).tail_instances == 2
    assert divided(tail, rest, Fleet(0, 16, STEPS)).seconds == math.inf


@given(parts, parts, fleets, st.sampled_from(TimesCount))
def test_no_other_division_ends_earlier(tail: Part, rest: Part, fleet: Fleet, how: TimesCount) -> None:
    found = divided(tail, rest, fleet, how)
    if fleet.instances < 2:
        return
    join = max if how is TimesCount.LATER else sum

    def ends(count: int) -> float:
        halves = (
            seconds_of(tail, count, fleet.slots, fleet.steps),
            seconds_of(rest, fleet.instances - count, fleet.slots, fleet.steps),
        )
        return join(halves)

    assert found.seconds == min(ends(count) for count in range(fleet.instances + 1)) == ends(found.tail_instances)
