"""Whether a soak's samples show growth."""

import random

import pytest
from benchmarks.growth import KIB, MIB, SLACK, growth
from benchmarks.soak import OF_HUB, OF_PROCESS

UPDATES = list(range(0, 2000, 20))


def test_a_leak_of_one_descriptor_now_and_then_is_found() -> None:
    leaking = [20.0 + update // 200 for update in UPDATES]
    assert not growth("agent-0", "fds", UPDATES, leaking).is_bounded


def test_a_leak_of_memory_is_found_under_noise() -> None:
    chance = random.Random(1)
    leaking = [40 * MIB + 4096 * update + chance.uniform(0, MIB) for update in UPDATES]
    found = growth("agent-0", "uss", UPDATES, leaking)
    assert not found.is_bounded
    assert found.grown == pytest.approx(4096 * 1000, rel=0.3)


def test_noise_peaks_and_a_beginning_are_no_growth() -> None:
    chance = random.Random(2)
    values = [min(update, 400) * 16384 + 30 * MIB + chance.uniform(0, MIB) for update in UPDATES]
    values[-3] += 100 * MIB
    assert growth("agent-0", "uss", UPDATES, values).is_bounded


def test_one_step_in_the_second_half_stays_within_the_slack() -> None:
    values = [20.0] * 80 + [21.0] * 20
    assert growth("agent-0", "fds", UPDATES, values).is_bounded


def test_falling_is_no_growth() -> None:
    assert growth("agent-0", "threads", UPDATES, [100.0 - update / 100 for update in UPDATES]).is_bounded


def test_books_of_the_log_may_grow_with_it_and_no_more() -> None:
    for per_update, is_bounded in ((6 * KIB, True), (16 * KIB, False)):
        values = [30.0 * MIB + per_update * update for update in UPDATES]
        assert growth("registry", "uss", UPDATES, values).is_bounded is is_bounded


def test_too_few_samples_tell_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth("agent-0", "uss", UPDATES[:8], [1.0] * 8)


def test_every_metric_has_a_slack() -> None:
    assert {*OF_PROCESS, *OF_HUB} == set(SLACK)
