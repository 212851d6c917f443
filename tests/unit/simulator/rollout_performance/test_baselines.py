"""Placements for comparison: in turns, and one response of each group first."""

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView, InstanceView, PlaceAction
from tensorhub_simulator.rollout_performance.baselines import ProbesFirst, in_turns
from tensorhub_simulator.rollout_performance.config import decode
from tensorhub_simulator.rollout_performance.tails import tail_of
from tensorhub_simulator.rollout_performance.trainer import StepProgress

REQUESTS = tuple(RequestId(1, number) for number in range(6))


def view(waiting: tuple[RequestId, ...], *sizes: int) -> FleetView:
    """Instances with two slots, and what they run."""
    runners = tuple(
        InstanceView(f"r{number}", 2, (), tuple(RequestId(9, number * 10 + each) for each in range(size)))
        for number, size in enumerate(sizes)
    )
    return FleetView(waiting, runners, 1)


def test_turns_give_each_instance_equally_many_beyond_its_slots() -> None:
    found = [each.runner for each in in_turns(view(REQUESTS, 1, 0)) if isinstance(each, PlaceAction)]
    assert found == ["r1", "r0", "r1", "r0", "r1", "r0"]
    assert in_turns(view(REQUESTS)) == []


def test_one_of_each_group_is_placed_before_the_longest_as_far_as_there_are_slots() -> None:
    """Two groups of three: their first ones, then what is expected to be longer, of the second group."""
    seer = ProbesFirst(3, lambda of: float(of.index))
    found = [
        (each.request.index, each.runner)
        for each in seer.actions(view(REQUESTS, 0, 0))
        if isinstance(each, PlaceAction)
    ]
    assert [index for index, _ in found] == [0, 3, 5, 4]
    assert sorted(runner for _, runner in found) == ["r0", "r0", "r1", "r1"]
    later = [each.request.index for each in seer.actions(view(REQUESTS[:3], 1, 2)) if isinstance(each, PlaceAction)]
    assert later == [2], "its group was begun, and there is one slot"


JOB = b"""
name: small
seed: 3
engine: {fixed_s: 0.5, each_s: 0.5, attention_s: 0, prefill_tokens_per_s: 10, slots: 8}
lengths: {prompt: 20, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer: {steps: 1, groups: 5, group_size: 2, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 1}
spot: {changes: [[0, 2]], boot_s: 2, load_s: 0.5}
price: {reserved: 4, spot: 1}
"""


def test_a_tail_is_from_the_ninth_of_ten_to_the_last() -> None:
    """Responses are whole at 1, 2, ... 9 and 20 s of a step that began at 100; the longest takes 2 s and 7 alone."""
    scenario = decode(JOB, "small")
    step = StepProgress(scenario.trainer)
    step.add((RequestId(1, number), 3, 101.0 + number) for number in reversed(range(9)))
    step.add([(RequestId(1, 9), 7, 120.0)])
    found = tail_of(step, 100.0, scenario)
    assert (found.most_s, found.nearly_s, found.all_s, found.bound_s) == (8.0, 9.0, 20.0, 9.0)
    assert (found.tail80_s, found.tail_s) == (12.0, 11.0)
