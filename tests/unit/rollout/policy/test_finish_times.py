"""When an instance is done with all that it has: against steps made one by one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.finish_times import Load, Work
from tensorhub_rollout.policy.lengths import Knowledge, LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel

STEPS = StepModel(0.005, 2e-5, 3e-8)


def known(length: int, made: int = 0) -> LengthEstimate:
    """Return an estimate that is sure of a length."""
    return LengthEstimate(math.log(length), 1e-6, made, Knowledge.JOB)


def stepped(requests: list[tuple[int, int]], steps: StepModel) -> float:
    """Return how long requests of (left, context) take, one step after the other."""
    seconds, running = 0.0, [[left, context] for left, context in requests]
    while running:
        contexts = sum(context for _, context in running)
        seconds += steps.seconds(len(running), contexts / len(running))
        for each in running:
            each[0] -= 1
            each[1] += 1
        running = [each for each in running if each[0]]
    return seconds


def loaded(requests: list[tuple[int, int]], steps: StepModel) -> Load:
    load = Load()
    for left, context in requests:
        load.add(Work(left, left * left, left, context), steps)
    return load


requests = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 500)), min_size=1, max_size=12)


@given(requests, st.floats(1e-4, 1e-2), st.floats(0, 1e-4), st.floats(0, 1e-6))
def test_the_sum_is_what_steps_take_one_by_one(
    each: list[tuple[int, int]], fixed_s: float, each_s: float, attention_s: float
) -> None:
    steps = StepModel(fixed_s, each_s, attention_s)
    # The sum counts half a token of context more in each step.
    half_s = attention_s * sum(left for left, _ in each) / 2
    assert loaded(each, steps).finish_s(steps) == pytest.approx(stepped(each, steps) + half_s)


@given(requests, st.integers(1, 200), st.integers(0, 500))
def test_one_more_request_is_counted_as_if_it_were_there_already(
    each: list[tuple[int, int]], left: int, context: int
) -> None:
    work, load = Work(left, left * left, left, context), loaded(each, STEPS)
    with_it_s = load.finish_with_s(work, STEPS)
    load.add(work, STEPS, is_new=True)
    assert load.finish_s(STEPS) == pytest.approx(with_it_s)
    assert load.finish_s(STEPS) >= loaded([*each, (left, context)], STEPS).finish_s(STEPS)


def test_a_context_costs_its_tokens_at_the_price_of_a_request() -> None:
    assert Work(1, 1, 1, 3000).prefill_s(STEPS) == pytest.approx(0.06)


def test_work_of_a_length_that_is_known_is_what_is_left_of_it() -> None:
    work = Work.of(known(1000, 400), 912, 64)
    assert work.left == pytest.approx(600, rel=1e-3)
    assert work.square == pytest.approx(360_000, rel=1e-2)
    assert work.most == pytest.approx(600, rel=1e-2)
    assert work.context == 912


def test_the_longest_of_many_is_longer_and_never_past_the_limit() -> None:
    length = LengthEstimate(math.log(1000), 0.5, 0, Knowledge.JOB, 4000)
    most = [Work.of(length, 0, beside).most for beside in (1, 8, 64, 100_000)]
    assert most[0] == pytest.approx(1000)
    assert most == sorted(most)
    assert most[-1] == 4000


@given(requests, requests)
def test_what_is_due_is_done_no_later_than_all_where_the_rest_lasts_as_long(
    urgent: list[tuple[int, int]], rest: list[tuple[int, int]]
) -> None:
    longest = max(left for left, _ in urgent)
    load, only = Load(), Load()
    for left, context in urgent:
        work = Work(left, left * left, left, context)
        load.add(work, STEPS, is_due=True)
        only.add(work, STEPS, is_due=True)
    assert only.due_s(STEPS) == pytest.approx(only.finish_s(STEPS))
    for _, context in rest:
        load.add(Work(longest, longest * longest, longest, context), STEPS)
    # The rest's contexts grow meanwhile, which is left out.
    assert only.due_s(STEPS) <= load.due_s(STEPS) <= load.finish_s(STEPS) + 1e-9


def test_each_request_that_is_not_due_makes_the_steps_of_those_longer_that_are() -> None:
    load = Load()
    load.add(Work(100, 10_000, 100, 50), STEPS, is_due=True)
    alone_s = load.due_s(STEPS)
    for _ in range(3):
        load.add(Work(900, 810_000, 900, 200), STEPS)
    # 100 steps, each longer by three requests of 200 tokens.
    assert load.due_s(STEPS) - alone_s == pytest.approx(100 * 3 * (2e-5 + 3e-8 * 200))


def test_what_is_done_meanwhile_is_taken_off_of_all_and_of_what_is_due() -> None:
    load = Load(as_of=1.0)
    load.add(Work(100, 10_000, 100, 0), STEPS, is_due=True)
    load.add(Work(400, 160_000, 400, 0), STEPS)
    finish_s, due_s = load.finish_s(STEPS), load.due_s(STEPS)
    load.advance(STEPS, 1.0 + due_s / 2)
    assert load.finish_s(STEPS) == pytest.approx(finish_s - due_s / 2)
    assert load.due_s(STEPS) == pytest.approx(due_s / 2)
    load.advance(STEPS, 1.0)
    assert load.due_s(STEPS) == pytest.approx(due_s / 2), "a clock that goes back gives nothing back"
