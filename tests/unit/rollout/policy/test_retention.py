"""Which versions are held: those that are needed, the bound, and what stays."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.retention import RetentionLimits, decide

VERSIONS = st.frozensets(st.integers(1, 12))


@given(VERSIONS, VERSIONS, VERSIONS, st.integers(1, 5), st.booleans())
def test_what_is_held_is_needed_bounded_and_stays(
    needed: frozenset[int],
    available: frozenset[int],
    held: frozenset[int],
    most: int,
    can_load: bool,  # noqa: FBT001 (hypothesis draws it)
) -> None:
    found = decide(needed, available, held, RetentionLimits(versions_max=most), can_load=can_load)
    assert {*found} <= needed & (available | held)
    assert len(found) <= most
    still = needed & held
    assert still <= {*found} or ({*found} <= still and len(found) == most), "what is held and needed goes first"
    assert decide(needed, available, found, RetentionLimits(versions_max=most), can_load=can_load) == found


def test_the_oldest_goes_first_and_a_newer_one_takes_its_place_once_it_is_not_needed() -> None:
    two = RetentionLimits(versions_max=2)
    assert decide({3, 4, 5}, {3, 4, 5}, (), two, can_load=True) == (3, 4)
    assert decide({2, 3, 4, 5}, {2, 3, 4, 5}, (3, 4), two, can_load=True) == (3, 4)
    assert decide({2, 4, 5}, {2, 4, 5}, (3, 4), two, can_load=True) == (2, 4)


def test_nothing_is_held_anew_where_no_instance_could_load_it_and_nothing_at_all_without_the_term() -> None:
    assert decide({3, 4}, {3, 4}, (3,), RetentionLimits(), can_load=False) == (3,)
    assert decide({3, 4}, {3, 4}, (3,), RetentionLimits(is_on=False), can_load=True) == ()
