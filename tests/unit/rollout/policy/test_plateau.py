"""The batch size past which throughput no longer grows: found again from the steps of a modelled engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.messages import EngineStep
from tensorhub_rollout.policy.plateau import STEPS_KEPT, StepModel, StepSums, fitted


def test_a_plateau_by_hand() -> None:
    """0.9 / 0.1 * 18 ms / (1 ms + 1 us * 1,000) = 81 requests; longer contexts have an earlier one."""
    model = StepModel(0.018, 0.001, 0.000001)
    assert model.seconds(10, 1000) == pytest.approx(0.038)
    assert [model.plateau(context, 512) for context in (0, 1000, 8000)] == [162, 81, 18]
    assert (model.plateau(0, 64), StepModel(0.0, 0.001, 0.0).plateau(0, 64)) == (64, 1)
    assert StepModel(0.02, 0.0, 0.0).plateau(100, 64) == 64, "more requests cost nothing"


@given(
    st.floats(0.001, 0.1),
    st.floats(0.00001, 0.01),
    st.floats(0.0, 0.00001),
    st.lists(st.tuples(st.integers(1, 256), st.integers(1, 20_000)), min_size=8, max_size=60),
)
def test_the_steps_of_an_engine_give_its_model_again(
    fixed_s: float, each_s: float, attention_s: float, drawn: list[tuple[int, int]]
) -> None:
    true = StepModel(fixed_s, each_s, attention_s)
    steps = tuple(EngineStep(batch, context, true.seconds(batch, context)) for batch, context in drawn)
    found = fitted(StepSums.of(steps))
    if found is None:
        assert len({batch for batch, _ in drawn}) == 1
        return
    for step in steps:
        assert found.seconds(step.batch, step.context_tokens) == pytest.approx(step.seconds, rel=0.02)


@pytest.mark.parametrize(
    "steps",
    [(), (EngineStep(4, 10, 0.1),) * 20, tuple(EngineStep(number, 10, 0.1) for number in range(1, 8))],
    ids=["none", "one-batch-size", "too-few"],
)
def test_where_too_little_was_measured_nothing_is_known(steps: tuple[EngineStep, ...]) -> None:
    assert fitted(StepSums.of(steps)) is None


@given(st.lists(st.builds(EngineStep, st.integers(1, 64), st.floats(0, 5000), st.floats(0, 2)), max_size=40))
def test_whatever_was_measured_no_term_is_negative(steps: list[EngineStep]) -> None:
    model = fitted(StepSums.of(steps))
    if model is not None:
        assert min(model.fixed_s, model.each_s, model.attention_s) >= 0
        assert 1 <= model.plateau(1000, 64) <= 64


def test_the_latest_steps_count_in_blocks_and_those_before_them_no_more() -> None:
    """An engine that was ten times slower at first is taken for what it is now."""
    slow, fast = StepModel(0.1, 0.01, 0.0), StepModel(0.01, 0.001, 0.0)

    def steps(model: StepModel, count: int) -> list[EngineStep]:
        return [EngineStep(1 + at % 8, 100.0, model.seconds(1 + at % 8, 100.0)) for at in range(count)]

    sums = StepSums.of(steps(slow, STEPS_KEPT))
    sums.extend(steps(fast, STEPS_KEPT))
    found = fitted(sums)
    assert found is not None
    assert fast.seconds(8, 0) < found.seconds(8, 0) < slow.seconds(8, 0), "both count"
    sums.extend(steps(fast, 1))
    found = fitted(sums)
    assert found is not None
    assert found.seconds(8, 0) == pytest.approx(fast.seconds(8, 0))
    assert sums.context_tokens == pytest.approx(100.0)
