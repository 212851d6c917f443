"""`--allocate`: no other split is better by the profile, and what is beside it is simulated as well."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_simulator.rollout_performance.__main__ import main
from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.sizing.allocate import splits
from tensorhub_simulator.rollout_performance.sizing.profile import generation_of, training_of
from tensorhub_simulator.rollout_performance.systems.systems import job_of

JOB = b"""
name: mine
seed: 3
engine: {fixed_s: 0.05, each_s: 0.004, attention_s: 0, prefill_tokens_per_s: 10000, slots: 8}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 3, groups: 8, group_size: 4, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 2, seeds: false,
   steps_ahead: 1}
spot: {changes: [[0, 4]], boot_s: 0}
far: {instances: 6, price: 2, gbit_s: 10, rtt_ms: 30}
price: {reserved: 4, spot: 4}
weights: {gbytes: 1, shards: 1, nic_gbit_s: 100}
"""


def job(token_s: float = 0.004) -> Scenario:
    found = decode(JOB, "mine")
    return msgspec.structs.replace(found, trainer=msgspec.structs.replace(found.trainer, token_s=token_s))


@given(token_s=st.floats(0.0005, 0.05))
def test_no_split_of_a_site_is_sooner_by_the_profile_and_work_stays_the_same(token_s: float) -> None:
    scenario = job(token_s)
    generation, training = generation_of(scenario, scenario.engine), training_of(scenario)
    found = [each for each in splits(scenario) if each.sites == "one site"]
    chosen = next(each for each in found if each.is_chosen)
    assert chosen.step_s == min(max(generation(x), training(6 - x)) for x in range(1, 6))
    for each in found:
        trainer = each.scenario.trainer
        assert abs(each.generation - chosen.generation) <= 1
        assert trainer.token_s * trainer.engines == pytest.approx(token_s * 2)
        assert (each.scenario.spot.first, each.scenario.far) == (each.generation, None)


def test_more_instances_are_never_slower_by_the_profile() -> None:
    generation, training = generation_of(job(), job().engine), training_of(job())
    assert all(generation(x) >= generation(x + 1) for x in range(1, 12))
    assert training(1) - 0.5 == pytest.approx(2 * (training(2) - 0.5))


def test_of_two_sites_the_slower_keeps_all_and_what_is_beside_differs_in_the_other() -> None:
    slow_training = [each for each in splits(job(token_s=0.05)) if each.sites == "two sites"]
    assert {each.training for each in slow_training} == {6}
    assert next(each.generation for each in slow_training if each.is_chosen) < 6
    assert len({each.generation for each in slow_training}) == len(slow_training) > 1
    slow_generation = [each for each in splits(job(token_s=0.0005)) if each.sites == "two sites"]
    assert {each.generation for each in slow_generation} == {6}
    assert all(each.scenario.far is not None and each.scenario.far.instances == 6 for each in slow_generation)


def test_a_profile_is_near_what_is_simulated() -> None:
    """The profile is a model of a model: within a factor of two here."""
    chosen = next(each for each in splits(job()) if each.is_chosen)
    simulated = job_of(chosen.scenario, "streamrl").run().step_s[-1]
    assert chosen.step_s / 2 < simulated < chosen.step_s * 2


@pytest.mark.long
def test_the_command_has_a_line_for_each_split_and_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(JOB)
    arguments = [str(path), "--allocate", "--system", "arrival", "--processes", "1"]
    assert main([*arguments, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["is_chosen"] for each in found].count(True) == 2
    assert all(each["step_s"] > 0 and each["predicted_step_s"] > 0 for each in found)
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "mine, one site" in said
    assert "mine, two sites" in said


def test_what_can_not_be_divided_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--allocate"])
    assert "name one" in capsys.readouterr().err
    for unused in (["--picture", str(tmp_path / "x.svg")], ["--tails"], ["--alone"], ["--seeds", "2"]):
        with pytest.raises(SystemExit):
            main(["mine.yaml", "--allocate", *unused])
        assert f"has no use for {unused[0]}" in capsys.readouterr().err
    path = tmp_path / "mine.yaml"
    path.write_bytes(JOB.replace(b"seeds: false,\n   steps_ahead: 1", b"seeds: true"))
    assert main([str(path), "--allocate"]) == 1
    assert "say trainer.seeds: false" in capsys.readouterr().err
    alone = JOB.replace(b"[[0, 4]]", b"[[0, 0]]").replace(b"engines: 2", b"engines: 1").replace(b"far:", b"#")
    with pytest.raises(ScenarioError, match="two are needed"):
        splits(decode(alone, "mine"))
