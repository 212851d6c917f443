"""Runners that come and go by what a manager wishes for: who starts, who is told to go, and who ends when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.local.launcher import DRAIN_S_MAX, Changes, changes
from tensorhub_common.protocol.rollout.questions import InstanceStateName, InstanceStatus

NAMES = ("runner-0", "runner-1", "runner-2", "runner-3")
A, B, C, D = NAMES


def instance(
    runner: str, at_work: int = 0, *, state: InstanceStateName = "serving", kept: int | None = None
) -> InstanceStatus:
    return InstanceStatus(runner, "policy", state, 1, 8, 0, at_work, 0.0, kept)


def test_more_start_under_the_lowest_free_names() -> None:
    assert changes(NAMES, (B,), {}, (instance(B),), 3, 0.0) == Changes(start=(A, C))
    assert changes(NAMES, (A, B), {B: 0.0}, (instance(A), instance(B, 1, state="leaving")), 2, 1.0) == Changes(
        start=(C,)
    ), "one that was told to go does not come back"
    assert changes(NAMES, NAMES, {}, (), 4, 0.0) == Changes()


def test_who_has_least_to_do_goes_first_and_who_keeps_a_version_last() -> None:
    """Of those that have as much, the one with the highest number. One that nobody has heard of ends."""
    instances = (instance(A, 3), instance(B, 5), instance(C, 3), instance(D, 0, kept=4))
    assert changes(NAMES, NAMES, {}, instances, 3, 0.0).notify == (C,)
    assert changes(NAMES, NAMES, {}, instances, 1, 0.0).notify == (C, A, B)
    assert changes(NAMES, NAMES, {}, instances[:2] + instances[3:], 3, 0.0) == Changes(end=(C,))


@pytest.mark.parametrize(
    ("found", "after_s", "ends"),
    [
        ((instance(B, 2, state="leaving"),), 1.0, False),
        ((instance(B, 0, state="serving"),), 1.0, False),
        ((instance(B, 0, state="leaving"),), 1.0, True),
        ((), 1.0, True),
        ((instance(B, 2, state="leaving"),), DRAIN_S_MAX, True),
    ],
    ids=["has-responses", "not-told-yet", "has-none", "is-gone", "takes-too-long"],
)
def test_who_was_told_to_go_ends_once_its_responses_have_moved(
    found: tuple[InstanceStatus, ...], after_s: float, *, ends: bool
) -> None:
    todo = changes(NAMES, (A, B), {B: 0.0}, (instance(A), *found), 1, after_s)
    assert todo.end == ((B,) if ends else ())
    assert todo.notify == ((B,) if found and found[0].state == "serving" else ()), "it may not have heard it"


@given(
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5)),
    st.integers(0, 4),
)
def test_as_many_stay_as_are_wanted_as_far_as_there_are_names(
    there: set[str], told: set[str], at_work: dict[str, int], target: int
) -> None:
    leaving = dict.fromkeys(sorted(told & there), 0.0)
    instances = tuple(instance(runner, count) for runner, count in sorted(at_work.items()))
    todo = changes(NAMES, tuple(sorted(there)), leaving, instances, target, 1.0)
    staying = there - leaving.keys() - {*todo.notify, *todo.end} | set(todo.start)
    assert len(staying) == min(target, len(NAMES) - len(leaving))
    assert not set(todo.start) & there
    assert {*todo.notify, *todo.end} <= there
    assert not set(todo.notify) & set(todo.end)
    assert not (todo.start and set(todo.notify) - leaving.keys())
