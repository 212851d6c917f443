"""StreamRL's rule of delta in a simulated job: the fleet follows the lengths, and stays within what there is."""

from itertools import pairwise

import msgspec
import pytest

from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress
from tensorhub_simulator.rollout_performance.sizing.fleet_size import FleetSize
from tensorhub_simulator.rollout_performance.systems.systems import job_of

JOB = b"""
name: growing
seed: 3
engine: {fixed_s: 0.05, each_s: 0.01, attention_s: 0.0001, prefill_tokens_per_s: 10000, slots: 16}
lengths: {prompt: 8, median: 60, between: 0.2, within: 0.3, longest: 2000, grows: 1.2}
trainer:
  {steps: 10, groups: 8, group_size: 4, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 1, seeds: false,
   steps_ahead: 1}
spot: {changes: [[0, 6]], boot_s: 1, load_s: 0.5, delta_from: 1}
price: {reserved: 4, spot: 1}
"""


def job(**trainer: object) -> Scenario:
    found = decode(JOB, "growing")
    return msgspec.structs.replace(found, trainer=msgspec.structs.replace(found.trainer, **trainer))


@pytest.mark.long
def test_a_fleet_grows_with_its_responses_and_no_further_than_there_are() -> None:
    found = job_of(job(), "arrival").run()
    assert found.instances[0] == 1 < found.instances[-1] <= 6
    assert all(abs(later - sooner) <= 1 for sooner, later in pairwise(found.instances))
    less = msgspec.structs.replace(job(), spot=msgspec.structs.replace(job().spot, changes=((0.0, 2),)))
    assert max(job_of(less, "arrival").run().instances) == 2


@pytest.mark.long
def test_a_fleet_that_is_faster_than_its_trainer_gives_back_and_loses_nothing() -> None:
    scenario = job(token_s=0.02)
    scenario = msgspec.structs.replace(scenario, spot=msgspec.structs.replace(scenario.spot, delta_from=6))
    found = job_of(scenario, "arrival").run()
    assert found.instances[0] == 6 > found.instances[-1] >= 1
    assert found.made == found.tokens
    assert found.spot_s < 0.9 * 6 * found.seconds


def test_a_step_that_seems_short_beside_a_long_one_gives_nothing_back() -> None:
    """A step ahead, each second step seems to take 40 s and the others 260: 150 s each, where training takes 100."""
    size = FleetSize(job(), 6)
    for number, end_s in enumerate((260.0, 300.0, 560.0, 600.0, 860.0, 900.0)):
        size.step_ended(StepProgress(job().trainer, number, ends=[end_s]), 100.0)
    assert size.units_of_steps == [6] * 6
    in_step = job(steps_ahead=0)
    size = FleetSize(in_step, 6)
    for number, end_s in enumerate((260.0, 300.0)):
        size.step_ended(StepProgress(in_step.trainer, number, ends=[end_s]), 100.0)
    assert size.units == 5, "of steps one after the other each tells by itself"


def test_a_number_that_there_is_not_is_told() -> None:
    with pytest.raises(ScenarioError, match=r"spot.delta_from is 7, and must be from 1 to the 6"):
        decode(JOB.replace(b"delta_from: 1", b"delta_from: 7"), "growing")
    with pytest.raises(ScenarioError, match=r"with trainer.seeds: false and trainer.streams: false"):
        decode(JOB.replace(b"seeds: false", b"seeds: false, streams: true"), "growing")
    with pytest.raises(ScenarioError, match=r"spot.delta_from goes with spot.changes"):
        decode(JOB.replace(b"changes: [[0, 6]]", b"trace: parcae-hh, instances: 6"), "growing")
