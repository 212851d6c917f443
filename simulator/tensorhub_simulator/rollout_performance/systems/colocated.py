"""A trainer on all machines, which generate together until a step is made, and then train it. Pure."""

from msgspec.structs import replace

from tensorhub_simulator.rollout_performance.config.scenario import Scenario, Trainer


def colocated(scenario: Scenario) -> Trainer:
    """Return a scenario's trainer on its machines and on those that are there at first beside them."""
    found = scenario.trainer
    engines = found.engines + scenario.spot.first
    token_s = found.token_s * found.engines / engines
    return replace(found, seeds=True, steps_ahead=0, streams=False, engines=engines, token_s=token_s)
