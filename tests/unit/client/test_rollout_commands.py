"""`tensorhub rollouts`, `tensorhub runner` and `tensorhub up --runners`: what they print, begin and refuse."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.conftest import Run

from tensorhub._control.registry_client import RegistryClient
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub_common.config.settings import load
from tensorhub_common.errors import BadCommand, RolloutUnavailable
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.questions import (
    AttemptWhy,
    ConsumerStatus,
    ExpectedLength,
    InstanceStatus,
    RequestWhy,
    RolloutStatus,
    WhyAnswer,
    WhyQuestion,
)
from tensorhub_rollout.policy.lengths import Knowledge

STATUS = RolloutStatus(
    "run-7",
    "rollout-0.8f0c",
    3,
    4815,
    (ConsumerStatus("main", "policy", 1, 12, 4, 2, (7, 1)), ConsumerStatus("eval", "policy", 0, 0, 0, 0)),
    (
        InstanceStatus("runner-0", "policy", "serving", 12, 64, 1, 7, 1920.5, version_kept=12),
        InstanceStatus("runner-1", "policy", "loading", None, 64, 0, 0, 0.0),
    ),
    1920.5,
    8192,
)

asked: list[tuple[str, Any]] = []
"""What the rollout manager was asked."""


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the rollout manager says; an error is raised."""
    asked.clear()
    said: list[Any] = [STATUS]

    async def ask(_: Any, what: str, question: Any, *__: Any) -> Any:
        asked.append((what, question))
        if isinstance(said[0], Exception):
            raise said[0]
        return said[0]

    async def bus(*_: Any) -> None:
        return None

    monkeypatch.setattr(RegistryClient, "bus", bus)
    monkeypatch.setattr(ManagerClient, "ask", ask)
    return said


def test_consumers_queue_and_instances_are_shown(run: Run, answer: list[Any]) -> None:
    shown = run("rollouts", "--job", "run-7")
    assert shown.code == 0, shown.err
    lines = [line.split() for line in shown.out.splitlines() if line]
    assert shown.out.startswith(
        "job run-7: 12 open, 4 of them wait; 2 instance(s), 1920 tokens/s; payloads 8.0 KiB; "
        "led by rollout-0.8f0c (term 3)\n"
    )
    assert lines[1:] == [
        ["CONSUMER", "MODEL", "EPOCH", "OPEN", "WAITING", "ENDED", "VERSIONS", "BEHIND"],
        ["main", "policy", "1", "12", "4", "2", "0:", "7,", "1:", "1"],
        ["eval", "policy", "0", "0", "0", "0", "-"],
        ["INSTANCE", "MODEL", "STATE", "VERSION", "KEPT", "SLOTS", "PENDING", "EXECUTING", "TOKENS/S"],
        ["runner-0", "policy", "serving", "12", "12", "64", "1", "7", "1920"],
        ["runner-1", "policy", "loading", "-", "-", "64", "0", "0", "0"],
    ]
    (told,) = run("rollouts", "--job", "run-7", "--json").objects
    assert (told["tokens_per_s"], told["consumers"][0]["versions_behind"]) == (1920.5, [7, 1])
    assert told["instances"][1]["version"] is None


def test_without_a_manager_it_is_one_line_and_another_word_than_watch_is_wrong_usage(
    run: Run, answer: list[Any]
) -> None:
    answer[0] = RolloutUnavailable("the rollouts of job 'run-7' can't be had within the bound: no manager answers")
    assert run("rollouts").is_one_line(1, "no manager answers")
    ended = run("rollouts", "look")
    assert ended.code == 2
    assert "watch" in ended.err


HELD = "version 7 is held until its last request ends, and the hub has a copy of it"


def test_why_shows_what_each_response_of_a_group_waits_for_and_its_attempts(run: Run, answer: list[Any]) -> None:
    attempt = AttemptWhy(
        "runner-0", Attempt(3, 17), 12.52, 9.2, 0, 128, 0.5, "stopped", None, "done soonest", "its machine goes away"
    )
    answer[0] = WhyAnswer(
        "p-17",
        (
            RequestWhy("main", 0, "executing", 40, None, ExpectedLength(512.4, 870.0, "finished"), held=HELD),
            RequestWhy(
                "main",
                1,
                "waiting",
                128,
                "it waits for runner-3",
                ExpectedLength(300.0, 400.0, "job"),
                (attempt,),
                held=HELD,
            ),
            RequestWhy("main", 2, "ended", 0, "its trainer's done()", ended_by="failed", error="no prompt"),
        ),
        left_out=2,
    )
    shown = run("rollouts", "why", "p-17", "--job", "run-7")
    assert shown.code == 0, shown.err
    lines = [re.split(r"  +", line.strip()) for line in shown.out.splitlines() if line]
    there = "3 response(s), 2 of them open, 1 without an instance; 2 more: ask for them by their index"
    assert lines == [
        [f"group p-17 of job run-7: {there}"],
        [HELD],
        ["CONSUMER", "INDEX", "STATE", "TOKENS", "EXPECTED", "FROM", "WAITS FOR"],
        ["main", "0", "executing", "40", "512 (9 in 10: 870)", "what ended of its prompt", "-"],
        ["main", "1", "waiting", "128", "300 (9 in 10: 400)", "other prompts", "it waits for runner-3"],
        ["main", "2", "ended: failed (no prompt)", "0", "-", "-", "its trainer's done()"],
        ["CONSUMER", "INDEX", "ATTEMPT", "INSTANCE", "PLACED", "LASTED", "TOKENS", "FIRST AFTER", "END", "WHY"],
        [
            *["main", "1", "3/17", "runner-0", "12.5 s ago", "9.2 s", "0 to 128", "0.50 s", "stopped"],
            "done soonest; taken away: its machine goes away",
        ],
    ]
    (told,) = run("rollouts", "why", "p-17", "1", "--json").objects
    assert asked == [("why", WhyQuestion("p-17")), ("why", WhyQuestion("p-17", 1))]
    assert told["requests"][1]["attempts"][0]["withdrawn_why"] == "its machine goes away"
    answer[0] = WhyAnswer("p-17", is_done=True)
    assert "all of its responses are done" in run("rollouts", "why", "p-17").out


@pytest.mark.parametrize("knowledge", Knowledge)
def test_why_says_in_words_what_a_length_is_expected_from(run: Run, answer: list[Any], knowledge: Knowledge) -> None:
    answer[0] = WhyAnswer("p", (RequestWhy("main", 0, "waiting", 0, None, ExpectedLength(5.0, 8.0, knowledge)),))
    *_, row = (re.split(r"  +", line) for line in run("rollouts", "why", "p").out.splitlines())
    assert "prompt" in row[5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["why"], "why needs a group, as in: tensorhub rollouts why p-17"),
        (["why", "p-17", "-1"], "no such option"),
        (["why", "p-17", "three"], "three is no whole number from 0"),
        (["watch", "p-17"], "only why takes a group"),
        (["why", "p-\udcff"], r"'p-\udcff' is no text in UTF-8"),
    ],
)
def test_why_says_what_it_lacks(run: Run, answer: list[Any], arguments: list[str], said: str) -> None:
    ended = run("rollouts", *arguments)
    assert ended.code == 2
    assert said.lower() in ended.err.lower()


def test_why_tells_of_an_unknown_group_in_one_line(run: Run, answer: list[Any]) -> None:
    answer[0] = BadCommand("job 'run-7' has no group 'p-18': not done yet are p-17")
    assert run("rollouts", "why", "p-18").is_one_line(1, "not done yet are p-17")


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """The processes that a command has become."""
    found: list[tuple[tuple[str, ...], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environment: found.append((arguments, environment)))
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_runner_becomes_its_process_with_its_settings(
    run: Run, became: list[tuple[tuple[str, ...], dict[str, str]]], model: Path
) -> None:
    options = [
        "--hub-model",
        "critic",
        "--replica",
        "runner-7",
        "--spot",
        "--slots",
        "8",
        "--fast",
        "--device",
        "cuda:1",
    ]
    ended = run("runner", "--engine", "my.engine:load", "--model", model, *options, "--job", "run-7", "--mapped")
    assert ended.code == 0, ended.err
    ((arguments, environment),) = became
    assert arguments == (sys.executable, "-P", "-m", "tensorhub_runner")
    settings = load({name: text for name, text in environment.items() if name.startswith("TENSORHUB_")})
    assert (settings.job, settings.runner_id, settings.runner_engine) == ("run-7", "runner-7", "my.engine:load")
    assert (settings.runner_model, settings.runner_hub_model) == (model, "critic")
    assert (settings.runner_spot, settings.runner_install, settings.runner_slots) == (True, "mapped", 8)
    assert (settings.runner_exact, settings.runner_device) == (False, "cuda:1")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--engine", "sglang"], 2, "needs --url"),
        (["--engine", "vllm"], 2, "needs --url"),
        (["--engine", "vllm", "--model", "/nowhere"], 2, "there is no config.json in /nowhere"),
        (["--url", "http://127.0.0.1:8000", "--engine", "vllm", "--engine-args", "-x"], 2, "without --url"),
        (["--engine", "vllm", "--url", "http://10.0.0.7:8000"], 2, "no authentication"),
        (["--engine", "vllm", "--url", "http://127.0.0.1:8000", "--mapped"], 2, "leave --mapped out"),
        (["--url", "http://127.0.0.1:8000"], 2, "is no server: leave --url out"),
        ([], 2, "needs a model"),
        (["--model", "/nowhere"], 2, "there is no config.json in /nowhere"),
        (["--engine", "my.engine:load", "--slots", "0"], 2, "--slots"),
        (["--engine", "my.engine:load", "--replica", "a.b"], 2, "runner name 'a.b'"),
        (["--engine", "my.engine:load", "--device", "gpu"], 2, "must be cpu, cuda"),
        (["--engine", "my.engine:load", "--device", "cuda"], 2, "add --fast"),
    ],
)
def test_a_runner_that_can_not_be_is_told(
    run: Run,
    became: list[tuple[tuple[str, ...], dict[str, str]]],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    ended = run("runner", *arguments)
    assert (ended.code, became) == (code, [])
    assert said in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--runners", "2"], "runners of torch need a model"),
        (["--runners", "-1", "--engine", "my.engine:load"], "--runners"),
        (["--runners", "1", "--model", "/nowhere"], "there is no config.json in /nowhere"),
    ],
)
def test_up_says_what_its_runners_lack(run: Run, arguments: list[str], said: str) -> None:
    ended = run("up", *arguments)
    assert ended.code == 2
    assert said in ended.err
