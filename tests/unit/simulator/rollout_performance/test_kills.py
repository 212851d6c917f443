"""Machines that go at any moment, with notice and without: each system trains all, and counts each machine once."""

from random import Random
from typing import Final, get_args

import pytest

from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, System
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
from tensorhub_simulator.rollout_performance.systems.systems import DRIVES, job_of

KILLED: Final = """
name: killed
seed: {seed}
engine: {{fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 4000, slots: 6}}
lengths: {{prompt: 8, median: 40, between: 0.6, within: 0.4, longest: 200, prompts: 4}}
trainer:
  {{steps: 3, groups: 4, group_size: 2, micro_batch: 2, token_s: 0.002, publish_s: 0.1, engines: 2, seed_first_s: 2,
   repack: {{parts: 1, requests: 8}}, {trainer}}}
spot: {{changes: {changes}, boot_s: 0.1, load_s: 0.3, notice_s: {notice_s}}}
price: {{reserved: 4, spot: 1}}
"""
TRAINERS: Final = ("seeds: true", "seeds: false, steps_ahead: 1", "seeds: false, streams: true, steps_ahead: 2")
LAST_S: Final = 30.0


def killed(trainer: str, notice_s: float, seed: int) -> Scenario:
    """Return a job whose machines live about a second."""
    random, at = Random(seed), 0.0
    changes = [[at, 4]]
    while at < LAST_S:
        at += round(0.05 + random.random(), 2)
        changes.append([at, random.randint(1, 4)])
    return decode(
        KILLED.format(seed=seed, trainer=trainer, changes=changes, notice_s=notice_s).encode(), f"killed {seed}"
    )


@pytest.mark.parametrize("system", get_args(System))
def test_each_system_trains_all_whenever_machines_go(system: System) -> None:
    """`JobRun` asserts of each response that it has its tokens, and that the job does not hang."""
    runs = 0
    for trainer in TRAINERS:
        for seed, notice_s in enumerate((0.0, 0.0, 1.5)):
            scenario = killed(trainer, notice_s, seed)
            if DRIVES[system].misfit(scenario) is None:
                assert job_of(scenario, system).run().responses == 3 * 4 * 2
                runs += 1
    assert runs


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_was_told_to_go_is_not_one_of_those_that_go_next(seed: int) -> None:
    """Of four that are there three are told, one after the other, before the first of them has gone."""
    scenario = decode(
        KILLED.format(
            seed=seed, trainer="seeds: true", changes=[[0, 4], [2, 3], [2.5, 2], [3, 1]], notice_s=2
        ).encode(),
        "told",
    )
    seen = Timeline(every_s=0.1)
    job_of(scenario, "rlboost", seen).run()
    counts = [each.spot for each in seen.samples if each.at_s > 1.0]
    assert list(dict.fromkeys(counts)) == [4, 3, 2, 1]


def test_what_still_generates_once_the_job_is_over_is_not_lost() -> None:
    scenario = decode(KILLED.format(seed=1, trainer=TRAINERS[2], changes=[[0, 4]], notice_s=0).encode(), "none goes")
    assert job_of(scenario, "arrival").run().lost == 0
