"""Whether a soak's samples show growth."""

import random

import pytest
from benchmarks.soak.growth import KIB, MIB, SAMPLES_MIN, SLACK, Growth, first_settled, growth
from benchmarks.soak.run import OF_HUB, OF_PROCESS, RUN_S_MAX, SETTLED_S, WINDOWS_S, Samples, is_enough, words

UPDATES = list(range(1000, 2000, 20))
WINDOW_S = max(WINDOWS_S.values())
PER_S = 60
"""Updates of the soaks below."""


def test_a_leak_of_one_descriptor_now_and_then_is_found() -> None:
    leaking = [20.0 + update // 200 for update in UPDATES]
    assert not growth("agent-0", "fds", UPDATES, leaking).is_bounded


def test_a_leak_of_memory_is_found_under_noise() -> None:
    chance = random.Random(1)
    leaking = [40 * MIB + 4096 * update + chance.uniform(0, MIB) for update in UPDATES]
    found = growth("agent-0", "memory", UPDATES, leaking)
    assert not found.is_bounded
    assert found.grown == pytest.approx(4096 * 1000, rel=0.3)


def test_noise_and_peaks_are_no_growth() -> None:
    chance = random.Random(2)
    values = [30 * MIB + chance.uniform(0, MIB) for _ in UPDATES]
    values[-3] += 100 * MIB
    assert growth("agent-0", "memory", UPDATES, values).is_bounded


def test_one_step_stays_within_the_slack() -> None:
    values = [20.0] * 30 + [21.0] * 20
    assert growth("agent-0", "fds", UPDATES, values).is_bounded


def test_falling_is_no_growth() -> None:
    assert growth("agent-0", "threads", UPDATES, [100.0 - update / 100 for update in UPDATES]).is_bounded


def test_books_of_the_log_may_grow_with_it_and_no_more() -> None:
    for per_update, is_bounded in ((6 * KIB, True), (16 * KIB, False)):
        values = [30.0 * MIB + per_update * update for update in UPDATES]
        assert growth("registry", "memory", UPDATES, values).is_bounded is is_bounded


def test_a_run_is_settled_in_its_second_half_and_not_before_the_window_has_passed() -> None:
    each_second = [float(second) for second in range(100)]
    assert first_settled(each_second, 10) == 50
    assert first_settled(each_second, 70) == 70
    with pytest.raises(ValueError, match="7 samples after 93 s are too few"):
        first_settled(each_second, 93)
    assert first_settled(each_second[:10], 0) == 10 - SAMPLES_MIN


def test_a_soak_goes_on_until_there_were_the_updates_and_the_windows_have_passed() -> None:
    assert not is_enough(2000, 2000, WINDOW_S)
    assert not is_enough(1999, 2000, 2 * (WINDOW_S + SETTLED_S))
    assert is_enough(2000, 2000, WINDOW_S + SETTLED_S)
    with pytest.raises(RuntimeError, match="ask for fewer"):
        is_enough(2000, 10**6, RUN_S_MAX + 1)


def soak(leak: float = 0) -> Samples:
    """A soak in which NATS remembers message ids for the window, and an agent leaks so many bytes with each update."""
    samples = Samples()
    chance = random.Random(3)
    for second in range(0, int(WINDOW_S + SETTLED_S) + 1, 2):
        updates = PER_S * second
        ids = min(updates, PER_S * WINDOW_S) * 16 * KIB
        sample = {
            ("nats", "memory"): 20 * MIB + ids + chance.uniform(0, MIB),
            ("agent-0", "memory"): 35 * MIB + leak * updates + chance.uniform(0, MIB),
        }
        samples.add(updates, second, sample)
    return samples


def grown(samples: Samples) -> list[Growth]:
    return [each for each in samples.verdict() if not each.is_bounded]


def test_what_fills_a_window_is_no_growth() -> None:
    samples = soak()
    assert grown(samples) == []
    assert "nothing grew" in words("local", samples, samples.verdict())
    # It is judged as growth while the window fills, or the test above would show nothing.
    filling = slice(samples.first_settled // 2, samples.first_settled)
    values = samples.series["nats", "memory"][filling]
    assert not growth("nats", "memory", samples.updates[filling], values).is_bounded


def test_a_leak_is_found_behind_the_window() -> None:
    samples = soak(leak=2 * KIB)
    assert [(each.process, each.metric) for each in grown(samples)] == [("agent-0", "memory")]
    text = words("local", samples, samples.verdict())
    assert "something grew" in text
    assert "**agent-0: memory grew by" in text


def test_every_metric_has_a_slack() -> None:
    assert {*OF_PROCESS, *OF_HUB} == set(SLACK)
