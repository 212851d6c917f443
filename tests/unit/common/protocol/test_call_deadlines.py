"""A caller's bound is the bound, and within it the agent still has time to say what became of the call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.call_deadlines import END_S_MIN, OUTCOME_S_MAX, bound_of


@given(st.floats(0, 7 * 24 * 3600))
def test_the_agent_answers_before_the_caller_stops_waiting(timeout_s: float) -> None:
    bound = bound_of(timeout_s)
    assert bound.end_s == max(timeout_s, END_S_MIN)
    assert 0 <= bound.gives_up_s <= timeout_s
    assert 0.3 < bound.outcome_s <= OUTCOME_S_MAX
    assert bound.gives_up_s + bound.outcome_s < bound.end_s


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_who_has_more_time_gives_up_no_sooner(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert bound_of(less).gives_up_s <= bound_of(more).gives_up_s


@pytest.mark.parametrize(
    ("timeout_s", "gives_up_s", "outcome_s"), [(0, 0, 1.6), (1, 1, 0.8), (3, 2.25, 0.6), (60, 57.5, 2)]
)
def test_some_bounds(timeout_s: float, gives_up_s: float, outcome_s: float) -> None:
    bound = bound_of(timeout_s)
    assert tuple(bound)[:2] == pytest.approx((gives_up_s, outcome_s))
