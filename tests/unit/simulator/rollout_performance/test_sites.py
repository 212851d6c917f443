"""Instances at another site: their weights cross the line once, and what they make is trained like all else."""

import msgspec
import pytest

from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.config.weights import FarSite, Weights
from tensorhub_simulator.rollout_performance.models.arrivals import arrivals_s
from tensorhub_simulator.rollout_performance.systems.systems import job_of

WEIGHTS = Weights(gbytes=16.0, shards=2, nic_gbit_s=100)
FAR = FarSite(instances=4, price=1.0, gbit_s=10, rtt_ms=30)
LINE_S = 16.0 / (10 / 8)
"""A copy over the line, without what its headers take."""
FAR_JOB = b"""
name: far-job
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 10000, slots: 8}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 3, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 1, seeds: false}
spot: {changes: [[0, 1]], boot_s: 0}
far: {instances: 3, price: 2, gbit_s: 10, rtt_ms: 30}
price: {reserved: 4, spot: 1}
weights: {gbytes: 1, shards: 1, nic_gbit_s: 100}
"""


@pytest.mark.parametrize("readers", [1, 4, 13])
def test_a_version_crosses_the_line_once_for_all_of_a_site(readers: int) -> None:
    here, there = arrivals_s(WEIGHTS, 3, FAR, readers)
    assert (len(here), len(there)) == (3, readers)
    assert LINE_S <= there[0] <= there[-1] < 1.5 * LINE_S
    assert here[-1] < there[0], "the trainer's site waits for nothing of the line"
    assert arrivals_s(WEIGHTS, 0, FAR, readers)[0] == []


def job(**far: object) -> Scenario:
    found = decode(FAR_JOB, "far-job")
    assert found.far is not None
    return msgspec.structs.replace(found, far=msgspec.structs.replace(found.far, **far))


def test_what_a_far_site_makes_is_trained_and_a_slow_line_and_slow_engines_cost_time() -> None:
    whole = job_of(job(), "arrival").run()
    near = job_of(msgspec.structs.replace(job(), far=None), "arrival").run()
    assert whole.tokens == near.tokens
    assert whole.seconds < near.seconds
    assert whole.cost == pytest.approx(whole.seconds / 3600 * (4 + 1 + 3 * 2), rel=1e-3)
    slow_line = job_of(job(gbit_s=0.5), "arrival").run()
    assert slow_line.seconds > whole.seconds + 5, "16 s for a copy: what is far makes little of the later steps"
    slow = msgspec.structs.replace(job().engine, fixed_s=0.2)
    assert job_of(job(engine=slow), "arrival").run().seconds > whole.seconds


def test_a_far_instance_that_stayed_on_its_version_has_the_next_one_over_the_line() -> None:
    """A version takes 40 s over the slow line, about as long as the whole job, and 0.8 s over the other one."""
    found = {}
    for gbit_s in (10, 0.2):
        scenario = job(gbit_s=gbit_s)
        trainer = msgspec.structs.replace(scenario.trainer, steps=6, steps_ahead=1)
        spot = msgspec.structs.replace(scenario.spot, changes=((0.0, 0),))
        found[gbit_s] = job_of(msgspec.structs.replace(scenario, trainer=trainer, spot=spot), "arrival").run()
    assert found[0.2].seconds > found[10].seconds + 60, "two versions at least are waited for"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"weights: {gbytes: 1, shards: 1, nic_gbit_s: 100}", b"", "spot.load_s and weights exclude each other"),
        (b"boot_s: 0}", b"boot_s: 0, load_s: 1}", "spot.load_s and weights exclude each other"),
        (b"instances: 3", b"instances: 0", "far.instances is 0"),
        (b"price: 2", b"price: -1", "far.price is -1"),
        (b"gbit_s: 10,", b"gbit_s: 0,", "links.0.gbit_s is 0"),
        (
            b"rtt_ms: 30",
            b"rtt_ms: 30, engine: {fixed_s: 1, each_s: 0, attention_s: 0, prefill_tokens_per_s: 1, slots: 0}",
            "far.engine.slots is 0",
        ),
    ],
)
def test_a_mistake_in_a_far_site_is_told(old: bytes, new: bytes, said: str) -> None:
    assert old in FAR_JOB
    with pytest.raises(ScenarioError) as found:
        decode(FAR_JOB.replace(old, new), "far-job")
    assert said in str(found.value)


def test_a_line_on_which_a_piece_takes_too_long_is_told() -> None:
    with pytest.raises(ScenarioError, match="name smaller pieces"):
        arrivals_s(WEIGHTS, 1, msgspec.structs.replace(FAR, gbit_s=0.01), 2)
