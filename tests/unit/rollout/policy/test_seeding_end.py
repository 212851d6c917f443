"""When a trainer's own engines have generated enough, as predicted."""

import pytest

from tensorhub_rollout.policy.finish_times import Load
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.seeding_end import CORRECTION_MAX, CORRECTION_MIN, Correction, others_take_s

STEPS = StepModel(0.005, 1e-4, 0.0)


def test_the_others_take_the_longest_response_and_their_share_of_the_rest() -> None:
    others = [Load(1000, 20.0, 5.0), Load(4000, 40.0, 7.0)]
    assert others_take_s(others, [], STEPS) == pytest.approx(0.005 * 4000 + 60 / 2)
    # What the trainer's engines have is computed anew, and may be the longest.
    assert others_take_s(others, [Load(6000, 30.0, 4.0 / STEPS.each_s)], STEPS) == pytest.approx(
        0.005 * 6000 + (60 + 30 + 4) / 2
    )


def test_without_others_there_is_no_time() -> None:
    with pytest.raises(ValueError, match="no other instances"):
        others_take_s([], [Load(1, 1.0, 1.0)], STEPS)


def test_a_correction_goes_half_the_way_and_stays_within_its_limits() -> None:
    assert Correction().after(100, 120).factor == pytest.approx(1.1)
    assert Correction(1.2).after(100, 120).factor == pytest.approx(1.2)
    assert Correction().after(100, 10_000).factor == pytest.approx((1 + CORRECTION_MAX) / 2)
    assert Correction().after(100, 0).factor == pytest.approx((1 + CORRECTION_MIN) / 2)
    assert Correction(1.3).after(0, 5) == Correction(1.3)
