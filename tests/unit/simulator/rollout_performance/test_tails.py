"""When a step's responses are whole."""

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.measures.tails import tail_of
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress

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
