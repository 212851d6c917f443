"""`tensorhub simulate rollout --allocate`: how many of a scenario's instances generate, and how many train. Pure.

StreamRL's allocation (arXiv 2504.15930, section 4.4) asks the profile of the scenario's engines and trainer. Its answer
and the splits beside it are then simulated, so that one sees how far the profile is off.

One site: the trainer's instances and those beside it are of one kind, and each may do either. Two sites: the trainer's
site trains, and the far one generates.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from tensorhub_rollout.policy.allocation import Allocation, one_site, two_sites
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.sizing.profile import generation_of, training_of

Sites = Literal["one site", "two sites"]


class Split(msgspec.Struct, frozen=True):
    """One way to use the instances, what the profile says of it, and the scenario that has it. Times in seconds."""

    sites: Sites
    generation: int
    training: int
    generation_s: float
    training_s: float
    is_chosen: bool
    scenario: Scenario

    @property
    def step_s(self) -> float:
        """The slower of both."""
        return max(self.generation_s, self.training_s)


def splits(scenario: Scenario) -> list[Split]:
    """Return what is chosen and what is beside it, for one site, and for two where there are two.

    Raises `ScenarioError` for a scenario whose instances do both, or come and go.
    """
    if scenario.trainer.seeds:
        raise ScenarioError(
            f"{scenario.name}: the trainer's GPUs generate and train in turn: to divide instances, say trainer.seeds: "
            "false"
        )
    if scenario.spot.trace is not None:
        raise ScenarioError(f"{scenario.name}: spot.trace has machines that come and go: name those that stay instead")
    training = training_of(scenario)
    near = scenario.trainer.engines + scenario.spot.first
    found: list[Split] = []
    if near > 1:
        generation = generation_of(scenario, scenario.engine)
        found += _around(scenario, "one site", one_site(near, generation, training), near)
    far = scenario.far
    if far is not None:
        generation = generation_of(scenario, far.engine or scenario.engine)
        found += _around(scenario, "two sites", two_sites(far.instances, near, generation, training), near)
    if not found:
        raise ScenarioError(f"{scenario.name} has one instance: two are needed, one to generate and one to train")
    return found


def _around(scenario: Scenario, sites: Sites, chosen: Allocation, near: int) -> Iterator[Split]:
    """Yield what is beside the chosen one, with one instance less and one more that generates, and itself.

    Where all of a site are used, training has one more, or one less. Where the far site has no more, training shrinks
    and grows.
    """
    costs, most = scenario.engine, near - 1
    if sites == "two sites":
        assert scenario.far is not None
        costs, most = scenario.far.engine or scenario.engine, scenario.far.instances
    generation, training = generation_of(scenario, costs), training_of(scenario)
    is_full = sites == "one site" and chosen.generation + chosen.training == near
    by_training = sites == "two sites" and chosen.generation == most and chosen.training < near
    for more in (-1, 0, 1):
        x = chosen.generation + (0 if by_training else more)
        y = chosen.training + (more if by_training else -more if is_full else 0)
        if not (1 <= x <= most and 1 <= y <= near):
            continue
        divided = _with(scenario, sites, x, y)
        yield Split(sites, x, y, generation(x), training(y), not more, divided)


def _with(scenario: Scenario, sites: Sites, generation: int, training: int) -> Scenario:
    """Return a scenario with this split."""
    trainer = scenario.trainer
    token_s = trainer.token_s * trainer.engines / training
    here = generation if sites == "one site" else 0
    return replace(
        scenario,
        name=f"{scenario.name}, {sites}",
        trainer=replace(trainer, engines=training, token_s=token_s),
        spot=replace(scenario.spot, changes=((0.0, here),), delta_from=None),
        far=replace(scenario.far, instances=generation) if scenario.far is not None and not here else None,
    )
