"""Which protocol two releases speak with each other, and what they say where they have none in common."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.call_deadlines import END_S_MIN, OUTCOME_S_MAX, bound_of
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL, Speaks, agreed, speaks
from tensorhub_common.protocol.log.commands import PROTOCOL


@pytest.mark.parametrize(
    ("here", "there", "spoken"),
    [
        (Speaks("a", 1, 1), Speaks("b", 1, 1), 1),
        # A release with one protocol says no more than that.
        (Speaks("a", 1, 3), Speaks("b", 1), 1),
        (Speaks("a", 1, 3), Speaks("b", 2, 5), 3),
        (Speaks("a", 3, 3), Speaks("b", 1, 3), 3),
    ],
)
def test_both_take_the_newest_that_they_have_in_common(here: Speaks, there: Speaks, spoken: int) -> None:
    assert agreed(here, there) == agreed(there, here) == spoken


def test_the_older_one_is_to_be_upgraded() -> None:
    newer, older = Speaks("agent a", 3, 4, "0.5.0"), Speaks("worker 17", 1, 2, "0.1.0")
    sentence = (
        "worker 17 (release 0.1.0, protocol 1 to 2) is too old for agent a (release 0.5.0, protocol 3 to 4): "
        "upgrade tensorhub where worker 17 runs"
    )
    for here, there in ((newer, older), (older, newer)):
        with pytest.raises(BadCommand) as refusal:
            agreed(here, there)
        assert str(refusal.value) == sentence


def test_this_release_speaks_with_the_one_before() -> None:
    assert OLDEST_PROTOCOL <= 1 <= PROTOCOL
    assert agreed(speaks("agent a"), Speaks("worker 17", 1)) == 1


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
