"""`tensorhub replay`: what it prints and refuses, and how it ends."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.kit.tiny_engines import SIZES
from tests.unit.client.conftest import Run
from tests.unit.client.test_replay import EXACT, record_of, run_of, score

from tensorhub._rollouts import records
from tensorhub._rollouts.records import ResponseRecord
from tensorhub._rollouts.replay import NotScored
from tensorhub.cli.replay import scoring, verdict_table
from tensorhub.cli.replay.scoring import RunPlace, Scores
from tensorhub_runner.app import engines
from tensorhub_runner.engines.engine import EngineFacts

RECORDS = [
    record_of(run_of(0, 2, 7), run_of(2, 4, 8)),
    msgspec.structs.replace(record_of(run_of(0, 4, 8)), index=1),
    msgspec.structs.replace(record_of(finish_reason="cancelled"), group="q"),
]
Script = Callable[[ResponseRecord, RunPlace], Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    records.append(path, RECORDS)
    return path


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """What is scored of a run; by default what was made."""
    said: list[Script] = [lambda record, place: score(record, record.runs[place.run])]

    async def scores(_: object, __: object, found: Sequence[ResponseRecord], ___: float) -> Scores:
        await asyncio.sleep(0)
        places = [RunPlace(number, index) for number, each in enumerate(found) for index in range(len(each.runs))]
        return {place: said[0](found[place.response], place) for place in places}

    monkeypatch.setattr(scoring, "score", scores)
    facts = EngineFacts("torch", (("torch", "2.9"),), "cpu", "float64", is_exact=True, decode_s=(), prefill_s=None)
    loaded = SimpleNamespace(engine=SimpleNamespace(facts=facts))
    monkeypatch.setattr(engines, "load_engine", lambda _: loaded)
    return said


def test_what_is_confirmed_is_counted_by_version(run: Run, model: Path, file: Path, script: list[Script]) -> None:
    ended = run("replay", file, "--model", model)
    assert ended.code == 0, ended.err
    head, seven, eight, empty, told, by = ended.out.splitlines()
    assert head.split()[:7] == ["VERSION", "RUNS", "TOKENS", "CONFIRMED", "DIFFER", "GONE", "KEPT"]
    assert seven.split() == ["7", "1", "2", "1", "0", "0", "0", "0", "0"]
    assert eight.split() == ["8", "2", "6", "2", "0", "0", "0", "0", "0"]
    assert (empty, told) == ("", "3 responses (8 tokens in 3 runs): 2 confirmed, 1 empty")
    assert by == "scored in float64 by torch: torch 2.9"


def gone(record: ResponseRecord, place: RunPlace) -> Any:
    if record.runs[place.run].version == 7:
        return NotScored("gone", "version 7 is no longer in the hub")
    return score(record, record.runs[place.run])


def differs(record: ResponseRecord, place: RunPlace) -> Any:
    return gone(record, place) if place.response == 0 else score(record, record.runs[place.run], drawn=(0, 1, 9, 3))


def test_a_version_that_is_gone_has_its_own_exit_code_and_what_differs_comes_before_it(
    run: Run, model: Path, file: Path, script: list[Script]
) -> None:
    script[0] = gone
    ended = run("replay", file, "--model", model)
    assert (ended.code, ended.err) == (3, "")
    assert "p/0 tokens 0 to 2 (runner-0) can't be scored: version 7 is no longer in the hub" in ended.out
    assert "1 gone, 1 confirmed, 1 empty" in ended.out
    script[0] = differs
    ended = run("replay", file, "--model", model)
    assert ended.code == 1
    first, second = ended.out.splitlines()[4:6]
    assert first == "p/1 tokens 0 to 4 (runner-0) differ: token 2 is 2, and its seed draws 9"
    assert second.startswith("p/0 tokens 0 to 2")


def test_programs_get_one_object_for_each_response(run: Run, model: Path, file: Path, script: list[Script]) -> None:
    script[0] = differs
    ended = run("replay", file, "--model", model, "--json")
    assert ended.code == 1
    first, second, third = ended.objects
    assert [each["verdict"] for each in (first, second, third)] == ["gone", "differs", "empty"]
    (told,) = second["runs"]
    assert (told["version"], told["root"], told["first_difference"], told["drawn_again"]) == (8, "root-8", 2, 3)
    assert told["engine"]["dtype"] == EXACT.dtype
    assert second["seed"] == RECORDS[1].seed


def test_a_tolerance_counts_for_all(run: Run, model: Path, file: Path, script: list[Script]) -> None:
    script[0] = lambda record, place: score(
        record,
        record.runs[place.run],
        logprobs=[(each or 0.0) + 0.25 for each in record.logprobs[: _size(record, place)]],
    )
    assert run("replay", file, "--model", model, "--tolerance", "1").code == 0
    assert run("replay", file, "--model", model).code == 1


def _size(record: ResponseRecord, place: RunPlace) -> int:
    each = record.runs[place.run]
    return each.end - each.start


def test_only_some_reasons_are_printed(
    run: Run, model: Path, tmp_path: Path, script: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_table, "REASONS_MAX", 2)
    path = tmp_path / "many.jsonl"
    records.append(path, [record_of(run_of(0, 2, 7))] * 5)
    script[0] = gone
    ended = run("replay", path, "--model", model)
    assert ended.out.count("is no longer in the hub") == 2
    assert "and 3 more: --json tells all" in ended.out


def test_several_models_and_no_responses_are_refused(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.touch()
    assert run("replay", path, "--model", model).is_one_line(2, "has no response")
    records.append(path, [RECORDS[0], msgspec.structs.replace(RECORDS[0], model="critic")])
    assert run("replay", path, "--model", model).is_one_line(2, "critic of job default, policy of job default")


def test_what_can_not_be_replayed_is_told(
    run: Run, model: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("replay", tmp_path / "none.jsonl", "--model", model).is_one_line(2, "can't be read: No such file")
    assert run("replay", file).is_one_line(2, "--model ./my-model")
    assert run("replay", file, "--model", tmp_path).is_one_line(2, "there is no config.json in")
    assert run("replay", file, "--model", model, "--tolerance", "-1").is_one_line(2, "no number from 0 to 1000")
    assert run("replay", file, "--model", model, "--job", "a.b").is_one_line(2, "job name 'a.b'")
    (model / "config.json").write_text("{}")
    assert run("replay", file, "--model", model).is_one_line(2, "can't be used")
    monkeypatch.setenv("TENSORHUB_RUNNER_MODEL", str(model))
    assert run("replay", file).is_one_line(2, "can't be used")
    file.write_text("{}\n")
    assert run("replay", file, "--model", model).is_one_line(2, "line 1: it is no response")
