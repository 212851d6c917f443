"""In what systems differ that drive a job: a row of `systems.systems`."""

from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_common.protocol.rollout.entries import PolicyName, RequestId
from tensorhub_rollout.policy.view import Action, FleetView
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, System, Trainer
from tensorhub_simulator.rollout_performance.job.trainer import TrainerRun

Placing = Callable[[FleetView], list[Action]]
"""Says where requests go."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a system may know that places requests by itself."""

    scenario: Scenario
    expected: Callable[[RequestId], float]
    """How many tokens a request is expected to have still, by what the manager knows."""
    left: Callable[[RequestId], float]
    """How many it will have."""
    now: Callable[[], float]
    """In seconds."""


def of_the_file(scenario: Scenario) -> Trainer:
    """Return the trainer of a scenario as it is."""
    return scenario.trainer


def none_wrong(_scenario: Scenario, /) -> str | None:
    """Find nothing wrong."""
    return None


@dataclass(frozen=True, slots=True)
class Drive:
    """How a system drives a job; by default with RLBoost's policy, and with all that the scenario has."""

    system: System
    policy: PolicyName = "rlboost"
    """The manager's, which places where `place` doesn't."""
    trainer: Callable[[Scenario], Trainer] = of_the_file
    """Returns a scenario's trainer as the system has it."""
    loop: type[TrainerRun] = TrainerRun
    """What that trainer does."""
    has_others: bool = True
    """Whether instances generate beside the trainer's own."""
    is_forgetful: bool = False
    """Whether what a lost machine had made of open responses is lost with it."""
    place: Callable[[Known], Placing] | None = None
    """Begins what places requests in place of the manager."""
    misfit: Callable[[Scenario], str | None] = none_wrong
    """Says why the system is not made for a scenario's trainer, and what to do; None: it is."""
