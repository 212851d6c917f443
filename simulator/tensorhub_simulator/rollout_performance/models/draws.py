"""Which prompt a group is of, and how long each response is: equal in all systems of a scenario. Pure."""

import math
from random import Random

from tensorhub_simulator.rollout_performance.config.scenario import Scenario


def prompt_of(scenario: Scenario, step: int, group: int) -> str:
    """Return the name of a group's prompt; steps and groups count from 0."""
    count, groups = scenario.lengths.prompts, scenario.trainer.groups
    if count is not None:
        step, group = divmod((step * groups + group) % count, groups)
    return f"{step + 1} {group}"


def length_of(scenario: Scenario, step: int, index: int) -> int:
    """Return how many tokens the response of a step with this number has."""
    prompt = prompt_of(scenario, step, index // scenario.trainer.group_size)
    return response_length(scenario, prompt, f"{step + 1} {index}", step)


def response_length(scenario: Scenario, prompt: str, response: str, step: int) -> int:
    """Return how many tokens a response to a prompt has, by their names."""
    lengths, seed = scenario.lengths, scenario.seed
    median = lengths.median * lengths.grows**step
    of_prompt = Random(f"{seed} {prompt}").gauss(0.0, lengths.between)
    of_response = Random(f"{seed} {response}").gauss(0.0, lengths.within)
    return max(1, min(lengths.longest, round(median * math.exp(of_prompt + of_response))))
