"""The offline optimum of small cases: nothing is below it, and balance in time by true lengths is near it."""

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView, InstanceView, PlaceAction
from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.models.draws import length_of
from tensorhub_simulator.rollout_performance.models.engine_model import ends_s
from tensorhub_simulator.rollout_performance.systems.balanced import balanced_in_time
from tensorhub_simulator.rollout_performance.systems.systems import job_of

COSTS = EngineCosts(fixed_s=0.01, each_s=0.002, attention_s=0.0, prefill_tokens_per_s=1e6, slots=16)


def optimum_s(lengths: Sequence[int], instances: int, prompt: int, costs: EngineCosts) -> float:
    """Return the least time in which instances make responses that all begin at once and stay where they are.

    All ways to place them are tried, so there must be few.
    """
    known: dict[tuple[int, ...], float] = {(): 0.0}
    best = float("inf")
    for parts in _parts(sorted(lengths, reverse=True), instances):
        worst = 0.0
        for part in parts:
            if part not in known:
                known[part] = ends_s(part, prompt, costs)
            worst = max(worst, known[part])
        best = min(best, worst)
    return best


def _parts(lengths: Sequence[int], instances: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to divide lengths among equal instances."""
    if not lengths:
        yield ()
        return
    *before, last = lengths
    for parts in _parts(before, instances):
        for number in range(len(parts)):
            yield (*parts[:number], (*parts[number], last), *parts[number + 1 :])
        if len(parts) < instances:
            yield (*parts, (last,))


def test_a_long_response_has_an_instance_to_itself() -> None:
    """100 tokens alone take 1.2 s; six of 30 take 0.3 + 0.36 s: one beside the long one would end it at 1.26 s."""
    lengths = [100, *[30] * 6]
    assert optimum_s(lengths, 2, 0, COSTS) == pytest.approx(1.2)
    assert ends_s([100], 0, COSTS) == pytest.approx(1.2)
    assert ends_s([30] * 6, 0, COSTS) == pytest.approx(0.66)
    # In equal counts it takes longer.
    assert ends_s([100, 30, 30, 30], 0, COSTS) == pytest.approx(1.0 + 0.38)


def placed_s(lengths: list[int], instances: int) -> float:
    """Return how long it takes where the balance in time places them."""
    requests = {RequestId(1, number): length for number, length in enumerate(lengths)}
    runners = tuple(InstanceView(f"r{number}", 16, (), ()) for number in range(instances))
    view = FleetView(tuple(requests), runners, 1)
    found: dict[str, list[int]] = {}
    for action in balanced_in_time(view, lambda of: float(requests[of]), COSTS):
        assert isinstance(action, PlaceAction)
        found.setdefault(action.runner, []).append(requests[action.request])
    assert sorted(each for part in found.values() for each in part) == sorted(lengths)
    return max(ends_s(part, 0, COSTS) for part in found.values())


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=7), instances=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_balance_in_time_is_within_a_third_of_the_optimum_and_never_below(lengths: list[int], instances: int) -> None:
    best = optimum_s(lengths, instances, 0, COSTS)
    assert best * (1 - 1e-9) <= placed_s(lengths, instances) <= best * 4 / 3
    assert best >= max(lengths) * COSTS.step.seconds(1, 0.0) * (1 - 1e-9)


ONE_STEP = b"""
name: one-step
seed: 3
engine: {fixed_s: 0.05, each_s: 0.01, attention_s: 0, prefill_tokens_per_s: 1000000, slots: 8}
lengths: {prompt: 8, median: 400, between: 0.8, within: 0.5, longest: 4000}
trainer: {steps: 1, groups: 4, group_size: 2, micro_batch: 8, token_s: 0, publish_s: 0, engines: 1, seeds: false}
spot: {changes: [[0, 3]], boot_s: 0, load_s: 0}
price: {reserved: 1, spot: 1}
"""
LATE_S = 3.0
"""Until all instances are known, have their requests, and have told of the last end."""


@pytest.mark.parametrize("seed", range(3, 8))
def test_a_step_takes_no_less_than_the_optimum_and_with_known_lengths_not_much_more(seed: int) -> None:
    """Eight responses on three instances, in the whole simulation with the production cores."""
    scenario = msgspec.structs.replace(decode(ONE_STEP, "one-step"), seed=seed)
    lengths = [length_of(scenario, 0, index) for index in range(8)]
    best = optimum_s(lengths, 3, 8, scenario.engine)
    took = job_of(scenario, "oracle").run().seconds
    assert best <= took <= 1.04 * best + LATE_S
    assert job_of(scenario, "rlboost").run().seconds >= best
