"""StreamRL's allocation: cases by hand, and no better one by brute force."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.allocation import (
    Allocation,
    SecondsWith,
    one_site,
    two_sites,
    wants_one_less,
    wants_one_more,
)


def shared(work_s: float, fixed_s: float = 0.0) -> SecondsWith:
    """Return the time of work that units share, beside a part that they don't."""
    return lambda units: fixed_s + work_s / units


works = st.builds(shared, st.floats(1, 1000), st.floats(0, 100))


def test_one_site_by_hand() -> None:
    """60 s of generation and 30 of training by 6 units: 4 and 2 take 15 s each."""
    assert one_site(6, shared(60), shared(30)) == Allocation(4, 2, 15.0)
    assert one_site(6, lambda _: 20.0, shared(30)) == Allocation(1, 2, 20.0), "more make nothing faster"
    with pytest.raises(ValueError, match="two are needed"):
        one_site(1, shared(1), shared(1))


def test_two_sites_by_hand() -> None:
    """12 units generate in 5 s and 2 train in 15: 4 units of generation match that. Turned around, training shrinks."""
    assert two_sites(12, 2, shared(60), shared(30)) == Allocation(4, 2, 15.0)
    assert two_sites(2, 12, shared(30), shared(60)) == Allocation(2, 4, 15.0)
    assert two_sites(3, 3, shared(30), shared(30)) == Allocation(3, 3, 10.0)


@pytest.mark.parametrize(
    ("generation_s", "training_s", "more_s", "wants"),
    [(20, 15, 16, True), (20, 16, 16, True), (20, 17, 16, False), (10, 15, 8, False), (20, 10, 20, False)],
)
def test_one_more_is_wanted_once_the_gap_is_what_it_would_win(
    generation_s: float, training_s: float, more_s: float, *, wants: bool
) -> None:
    assert wants_one_more(generation_s, training_s, more_s) is wants


@given(st.integers(2, 12), works, works)
def test_no_division_of_a_site_is_faster_and_none_as_fast_is_smaller(
    units: int, generation: SecondsWith, training: SecondsWith
) -> None:
    found = one_site(units, generation, training)
    for x, y in product(range(1, units), repeat=2):
        if x + y <= units:
            seconds = max(generation(x), training(y))
            assert found.seconds <= seconds
            assert seconds > found.seconds or x + y >= found.generation + found.training


@given(st.integers(1, 12), st.integers(1, 12), works, works)
def test_the_slower_site_keeps_all_and_no_other_size_of_the_faster_is_nearer(
    generating: int, trainable: int, generation: SecondsWith, training: SecondsWith
) -> None:
    found = two_sites(generating, trainable, generation, training)
    if generation(generating) < training(trainable):
        assert found.training == trainable
        gaps = [abs(generation(count) - training(trainable)) for count in range(1, generating + 1)]
        assert abs(generation(found.generation) - training(trainable)) == min(gaps)
    else:
        assert found.generation == generating
        gaps = [abs(training(count) - generation(generating)) for count in range(1, trainable + 1)]
        assert abs(training(found.training) - generation(generating)) == min(gaps)


@given(st.integers(1, 12), works, st.floats(1, 1000))
def test_one_more_and_one_less_come_to_rest_beside_the_fewest_that_keep_up(
    units: int, generation: SecondsWith, training_s: float
) -> None:
    most, seen = 40, []
    for _ in range(most + 1):
        seen.append(units)
        if units < most and wants_one_more(generation(units), training_s, generation(units + 1)):
            units += 1
        elif units > 1 and wants_one_less(generation(units), training_s, generation(units - 1)):
            units -= 1
    assert seen == sorted(seen) or seen == sorted(seen, reverse=True), "it never turns around"
    assert seen[-1] == units, "it rests"
    enough = next((count for count in range(1, most) if generation(count) <= training_s), most)
    assert enough - 1 <= units <= enough
    assert units >= seen[0] or generation(units) <= training_s, "what gives back stays as fast as training"
