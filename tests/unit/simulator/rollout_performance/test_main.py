"""`tensorhub simulate rollout`: seeds and assumptions in a row, a picture, and mistakes in one line."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tensorhub_simulator.rollout_performance.__main__ import FOLDER, OURS, main, read, traced
from tensorhub_simulator.rollout_performance.comparison.cases import cases

SMALL = """
name: small
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 10000, slots: 8}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 2, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 1, seed_first_s: 4}
spot: {trace: mine.csv, instances: 2, boot_s: 2, load_s: 0.5}
price: {reserved: 4, spot: 1}
vary:
  - {what: a notice, set: {spot.notice_s: 2}}
"""
TRACE = "0,comes,a\n0,comes,b\n5,goes,a\n8,comes,c\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine.csv").write_text(TRACE)
    found = tmp_path / "mine.yaml"
    found.write_text(SMALL)
    return found


@pytest.mark.long
def test_each_system_runs_with_each_seed_and_each_assumption(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["--system", "reserved", "--system", "rlboost"]
    assert main([str(path), *systems, "--seeds", "2", "--json", "--processes", "1"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["what"], each["seed"], each["system"]) for each in found] == [
        (what, seed, system) for what in ("", "a notice") for seed in (3, 4) for system in ("reserved", "rlboost")
    ]
    assert found[0]["tokens"] != found[2]["tokens"]
    assert main([str(path), *systems, "--seeds", "2", "--processes", "2"]) == 0
    said = capsys.readouterr().out
    assert "small: 2 steps, 32 responses; median of 2 seeds (least-most)" in said
    assert "a notice" in said


def test_a_trainer_without_steps_has_no_tails(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streams = "seeds: false, streams: true, steps_ahead: 2, "
    path.write_text(SMALL.replace("{steps: 2", f"{{{streams}steps: 2").replace(", seed_first_s: 4", ""))
    options = [str(path), "--alone", "--processes", "1", "--system", "disaggregated", "--system", "arrival"]
    assert main([*options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[0]["tail_s"] >= 0
    assert found[1]["tail_s"] is None
    assert main([*options, "--tails"]) == 0
    assert "not all of these trainers have some" in capsys.readouterr().out


def test_the_picture_has_all_systems(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "small.svg"
    assert main([str(path), "--alone", "--picture", str(picture), "--processes", "1"]) == 0
    said = picture.read_text(encoding="utf-8")
    for each in ("reserved", "disaggregated", "recompute", "rlboost", "streamrl", "arrival"):
        assert f">{each}: " in said


@pytest.mark.parametrize("name", OURS)
def test_ours_can_be_run_with_all_their_systems_and_assumptions(name: str) -> None:
    scenario, beside = read(name)
    assert (scenario.name, beside) == (name, FOLDER)
    assert scenario.vary
    found = [*cases(scenario, scenario.systems, 1, partial(traced, beside=beside), alone=False)]
    assert {(each.what, each.system) for each in found} == {
        (what, system) for what in ("", *(each.what for each in scenario.vary)) for system in scenario.systems
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mine.csv", "other.csv", "spot.trace"),
        (
            "spot.notice_s",
            "spot.warning_s",
            "small with 'a notice' is no scenario of rollouts: Object contains",
        ),
        ("spot.notice_s: 2", "trainers.steps: 2", "nothing stands at 'trainers.steps'"),
        ("load_s: 0.5", "notice_s: 0", "spot.load_s and weights exclude each other"),
        ("instances: 2", "instances: 0", "spot.instances is 0"),
        ("longest: 300", "longest: 300, prompts: 0", "lengths.prompts is 0, and must be from 4"),
        ("mine.csv", '"a\\0b"', "can't be read (embedded null byte)"),
        ("what: a notice", 'what: ""', "each of vary needs a `what` of its own"),
        ("vary:", "vary:\n  - {what: a notice, set: {}}", "each of vary needs a `what` of its own"),
        (
            "trace: mine.csv, instances: 2",
            "changes: [[0, 0]]",
            "no instance would ever generate with 'disaggregated'",
        ),
        (
            "trace: mine.csv, instances: 2",
            "changes: [[0, 2], [.nan, 1]]",
            "the times of spot.changes must be from 0 to",
        ),
        ("name: small", "name: " + "[" * 5000, "is no scenario of rollouts: its brackets are nested too deeply"),
        (
            "prefill_tokens_per_s: 10000",
            "prefill_tokens_per_s: 0",
            "engine.prefill_tokens_per_s is 0, and must be from",
        ),
        ("publish_s: 0.5", "publish_s: 1.0e12", "s at least, and 1e+07 s are simulated at most: take fewer steps"),
        ("fixed_s: 0.05", "fixed_s: 1.0e12", "s at least, and 1e+07 s are simulated at most"),
    ],
)
def test_a_mistake_is_one_line(path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str) -> None:
    assert old in SMALL
    path.write_text(SMALL.replace(old, new))
    assert main([str(path), "--processes", "1"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]


def test_a_system_that_is_named_twice_runs_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "--alone", "--json", "--processes", "1", *(["--system", "arrival"] * 2)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_trace_that_is_none_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path.parent / "mine.csv").write_text("0,goes,a\n")
    assert main([str(path), "--processes", "1"]) == 1
    assert "is no trace: line 1: a goes, and is not there" in capsys.readouterr().err


def test_weights_that_are_moved_take_the_place_of_one_number(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 GB over a card of 100 Gbit/s take 9 s and 10 take 0.9: some of it is in the way of the job."""
    took = []
    for gbytes in (10, 100):
        weights = f"\nweights: {{gbytes: {gbytes}, shards: 1, nic_gbit_s: 100}}\n"
        path.write_text(SMALL.replace(", load_s: 0.5", "") + weights)
        assert main([str(path), "--alone", "--json", "--system", "disaggregated", "--processes", "1"]) == 0
        took.append(msgspec.json.decode(capsys.readouterr().out)["seconds"])
    assert took[1] > took[0] + 4
