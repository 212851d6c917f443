"""RollPacker's rounds: each trains as many responses, short ones come sooner, and no prompt is lost."""

import msgspec
import pytest

from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Rounds, Scenario, ScenarioError, System
from tensorhub_simulator.rollout_performance.job.job import JobRun
from tensorhub_simulator.rollout_performance.systems.rounds import Round, RoundsTrainer
from tensorhub_simulator.rollout_performance.systems.systems import job_of

JOB = b"""
name: in-step
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 10000, slots: 32}
lengths: {prompt: 8, median: 60, between: 0.9, within: 0.3, longest: 2000, prompts: 16}
trainer: {steps: 12, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.001, publish_s: 0.5, engines: 2}
spot: {changes: [[0, 1]], boot_s: 0, load_s: 0.5}
price: {reserved: 4, spot: 1}
"""


def job(**trainer: object) -> Scenario:
    found = decode(JOB, "in-step")
    return msgspec.structs.replace(found, trainer=msgspec.structs.replace(found.trainer, **trainer))


def rounds_of(run: JobRun) -> tuple[RoundsTrainer, list[Round]]:
    trainer = run._trainer
    assert isinstance(trainer, RoundsTrainer)
    found = [each for each in trainer.submitted if isinstance(each, Round)]
    assert len(found) == 12
    return trainer, found


@pytest.mark.parametrize("system", ["rollpacker", "rounds"])
def test_each_round_trains_a_step_and_a_prompt_that_waits_comes_in_a_long_round(system: System) -> None:
    run = job_of(job(), system)
    report = run.run()
    assert report.responses == 12 * 4 * 4
    assert report.made > report.tokens, "what is too many is lost"
    trainer, found = rounds_of(run)
    long = [each for each in found if each.is_long]
    assert len(long) == trainer.long_rounds >= 1
    deferred = [prompt for each in found if not each.is_long for prompt in each.deferred]
    assert [prompt for each in long for prompt in each.prompts] == deferred[: 4 * len(long)]
    assert all(len(each.whole) == 4 for each in found)
    assert all(not each.deferred for each in long)
    short = [each.longest for each in found if not each.is_long]
    assert sum(short) / len(short) < sum(each.longest for each in long) / len(long)


def test_rounds_are_sooner_than_waiting_for_all_and_nothing_too_many_is_asked_for_where_none_is_wanted() -> None:
    waits, rounds = job_of(job(), "waitall").run(), job_of(job(), "rollpacker").run()
    assert rounds.seconds < waits.seconds
    assert waits.trained_s == pytest.approx(0.001 * 2 / 3 * waits.tokens), "all machines train"
    none = job_of(job(rounds=Rounds(1.0, 1.0)), "rounds").run()
    assert none.made == none.tokens


def test_graded_rounds_begin_with_what_was_short_once_all_prompts_are_known() -> None:
    run = job_of(job(rounds=Rounds(1.0, 1.0)), "graded")
    run.run()
    _, found = rounds_of(run)
    first, second = found[:4], found[4:8]
    assert sorted(prompt for each in second for prompt in each.prompts) == sorted(
        prompt for each in first for prompt in each.prompts
    )
    assert second[0].longest < second[-1].longest
    assert sum(each.longest for each in second) < sum(each.longest for each in first)


def test_fewer_than_are_trained_are_refused() -> None:
    wrong = JOB.replace(b"engines: 2}", b"engines: 2, rounds: {prompts: 0.5}}")
    with pytest.raises(ScenarioError, match=r"trainer.rounds.prompts is 0.5, and must be from 1 to 8"):
        decode(wrong, "in-step")
