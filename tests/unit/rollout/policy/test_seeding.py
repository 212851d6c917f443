"""RLBoost's Algorithm 1: cases computed by hand from the paper's formulas, and where it settles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.questions import SeedingState
from tensorhub_rollout.policy.seeding import SeedingSettings, StepTimes, after_step, first

SETTINGS = SeedingSettings(gain=3.0, initial_s=150.0)


def times(**more: float | bool) -> StepTimes:
    said = {"train_wait_s": 0.0, "train_s": 100.0, "remote_s": 200.0, "remote_wait_s": 0.0, "remote_units": 4.0}
    return StepTimes(**{**said, "is_steady": True, **more})  # type: ignore[arg-type]  # each by its name


def test_it_begins_with_the_settings() -> None:
    assert first(SETTINGS, 2) == SeedingState(150.0, 2)


@pytest.mark.parametrize(
    ("measured", "seed_s", "remote_max"),
    [
        # 150 + (30 - 0) / 3 = 160;  (200 * 4 + 160 * 2) / 100 = 11.2
        (times(train_wait_s=30.0), 160.0, 12),
        # 150 + (0 - 60) / 3 = 130;  (200 * 4 + 130 * 2) / 100 = 10.6
        (times(remote_wait_s=60.0), 130.0, 11),
        # 150 + (9 - 9) / 3 = 150;   (50 * 2 + 150 * 2) / 100 = 4
        (times(train_wait_s=9.0, remote_wait_s=9.0, remote_s=50.0, remote_units=2.0), 150.0, 4),
        # never below nothing;       (200 * 4 + 0) / 100 = 8
        (times(remote_wait_s=900.0), 0.0, 8),
        # half an instance:          (200 * 0.5 + 150 * 2) / 100 = 4
        (times(remote_units=0.5), 150.0, 4),
        # nothing was trained, so nothing is known of the cap
        (times(train_s=0.0), 150.0, 2),
    ],
)
def test_a_step_moves_the_seeding_by_a_share_of_the_difference_and_sets_the_cap(
    measured: StepTimes, seed_s: float, remote_max: int
) -> None:
    state = after_step(first(SETTINGS, 2), measured, SETTINGS, 2, next_units=4.0)
    assert state.seed_s == pytest.approx(seed_s)
    assert state.remote_max == remote_max


def test_a_count_of_instances_that_was_there_before_begins_where_it_was() -> None:
    state = after_step(first(SETTINGS, 2), times(train_wait_s=30.0), SETTINGS, 2, next_units=2.0)
    assert state.seed_s == pytest.approx(160.0), "of 2 instances nothing is known"
    state = after_step(state, times(remote_units=2.0, remote_wait_s=90.0), SETTINGS, 2, next_units=4.0)
    assert state.seed_s == pytest.approx(160.0), "as it was with 4"
    state = after_step(state, times(remote_wait_s=30.0, is_steady=False), SETTINGS, 2, next_units=4.0)
    assert state.seed_s == pytest.approx(160.0), "a step in which one came or went teaches nothing"
    assert dict(state.remembered) == {4.0: pytest.approx(160.0), 2.0: pytest.approx(130.0)}


def test_so_many_counts_are_remembered_the_latest() -> None:
    settings = SeedingSettings(remembered_max=2)
    state = first(settings, 1)
    for units in (1.0, 2.0, 1.0, 3.0):
        state = after_step(state, times(remote_units=units), settings, 1, next_units=9.0)
    assert [units for units, _ in state.remembered] == [1.0, 3.0]


def step_of(seed_s: float, remote_units: float, *, work_s: float, train_s: float, reserved: int) -> StepTimes:
    """Return a step of a modelled trainer; `work_s` is how long one unit alone would generate."""
    remote_s = max(0.0, work_s - seed_s * reserved) / remote_units
    trained_at = seed_s + train_s
    end = max(trained_at, remote_s)
    return StepTimes(end - trained_at, train_s, remote_s, end - remote_s, remote_units, is_steady=True)


@given(st.floats(200.0, 5000.0), st.floats(20.0, 400.0), st.integers(1, 8), st.integers(1, 16), st.integers(1, 16))
def test_it_settles_within_sixty_steps_of_a_change_of_instances(
    work_s: float, train_s: float, reserved: int, before: int, after: int
) -> None:
    """Then neither the trainer nor the remote instances wait for the other by more than a second, or seeding is off."""
    settings = SeedingSettings(gain=1.0 + reserved)
    state, units = first(settings, reserved), float(before)
    for step in range(120):
        units = float(before if step < 60 else after)
        measured = step_of(state.seed_s, units, work_s=work_s, train_s=train_s, reserved=reserved)
        state = after_step(state, measured, settings, reserved, units)
        assert state.seed_s >= 0
        if step in {59, 119}:
            waits = abs(measured.train_wait_s - measured.remote_wait_s)
            assert waits <= 1.0 or state.seed_s == 0.0 or measured.remote_s == 0.0
