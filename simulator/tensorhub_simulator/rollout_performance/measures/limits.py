"""What no placement of requests is faster than, in a run's own set-up. Pure."""

import msgspec

from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.measures.report import Report


class Limit(msgspec.Struct, frozen=True):
    """The least that a step takes on average, in seconds, and what follows from that."""

    training_s: float
    """The trainer trains each token, and publishes."""
    alone_s: float
    """A step's longest response has an instance to itself; 0 where a trainer has no steps."""
    tokens_per_s: float


def limit_of(scenario: Scenario, report: Report) -> Limit:
    """Return the limit of a run. A response that was submitted a step ahead has two steps' time."""
    trainer, steps = scenario.trainer, report.steps
    training_s = report.trained_s / steps + trainer.publish_s
    alone_s = sum(each.bound_s for each in report.tails) / steps / (1 + trainer.steps_ahead)
    return Limit(training_s, alone_s, report.tokens / steps / max(training_s, alone_s))
