"""How long a step of a scenario takes with a number of instances: what StreamRL's allocation asks. Pure.

Generation is as StreamRL's model of latency has it (arXiv 2504.15930, section 4.3): the longest fifth of a step's
responses on instances of its own, the others on the rest, divided so that both are done soonest (`skew`). Training is
divided evenly among the trainer's instances, and publishes once. Both are for steps that run beside each other: with
responses that stream, and one step ahead.
"""

import math
from functools import cache

from tensorhub_rollout.policy.allocation import SecondsWith
from tensorhub_rollout.policy.skew import REST_QUANTILE, TAIL_QUANTILE, TAIL_SHARE, Fleet, Part, divided
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.models.draws import length_of


def lengths_of(scenario: Scenario, step: int) -> list[int]:
    """Return the lengths of a step's responses in tokens, the longest first."""
    count = scenario.trainer.groups * scenario.trainer.group_size
    return sorted((length_of(scenario, step, index) for index in range(count)), reverse=True)


def generation_of(scenario: Scenario, costs: EngineCosts, step: int = 0) -> SecondsWith:
    """Return how long instances of a kind take to make a step's responses, by their number."""
    lengths = lengths_of(scenario, step)
    cut = round(TAIL_SHARE * len(lengths))
    tail, rest = (
        _part(part, quantile, scenario.lengths.prompt)
        for part, quantile in ((lengths[:cut], TAIL_QUANTILE), (lengths[cut:], REST_QUANTILE))
    )
    slots = costs.slots
    if costs.kv_tokens is not None:
        # As many as there is memory for when each has half of its tokens.
        context = scenario.lengths.prompt + sum(lengths) / len(lengths) / 2
        slots = max(1, min(slots, math.floor(costs.kv_tokens / context)))

    @cache
    def seconds(instances: int) -> float:
        return divided(tail, rest, Fleet(instances, slots, costs.step)).seconds

    return seconds


def training_of(scenario: Scenario, step: int = 0) -> SecondsWith:
    """Return how long it takes to train a step and to publish, by the number of the trainer's instances."""
    trainer = scenario.trainer
    work_s = sum(lengths_of(scenario, step)) * trainer.token_s * trainer.engines
    return lambda engines: work_s / engines + trainer.publish_s


def _part(lengths: list[int], quantile: float, prompt: int) -> Part:
    if not lengths:
        return Part(0, 0.0)
    tokens = float(lengths[round((1 - quantile) * (len(lengths) - 1))])
    return Part(len(lengths), tokens, prompt + tokens / 2)
