"""The commands: how they begin, what they print for people and programs, how they end, and what they refuse."""

import importlib.util
import re
import signal
import subprocess
import sys
import types
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from tests.bounds import WAIT_S
from tests.unit.client.conftest import Run, command, python
from tests.unit.client.fake_agent import FakeAgent

import tensorhub
from tensorhub._control.hub_file import HubFile, ProcessEntry
from tensorhub._control.registry_client import RegistryClient
from tensorhub._control.watch import Watched
from tensorhub.cli.commands.up import say_ready
from tensorhub.cli.hub_state import HubState, Nats, Process, ReadRow
from tensorhub.cli.main import app
from tensorhub.cli.runner import CommandDeadline
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.activity import ActiveRead, ReadSource
from tensorhub_common.protocol.queries import AgentInfo, ModelInfo, ReplicaInfo, ShardInfo, Status, VersionInfo

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands if each.callback is not None}

WITHOUT_JSON = ("up", "bench", "credentials", "runner")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the registry says, by the name of the question; an error is raised."""
    said: dict[str, Any] = {"open_job": None}

    async def answer(name: str) -> Any:
        if isinstance(said[name], Exception):
            raise said[name]
        return said[name]

    for name in ("open_job", "versions", "replicas", "status", "layout"):
        monkeypatch.setattr(RegistryClient, name, lambda *_, name=name: answer(name))
    return said


VERSION = VersionInfo(
    model="policy", version=3, state="available", publisher="trainer", published_at=0.0, holders=("trainer", "r-0")
)
SHARD = ShardInfo(
    shard=0, state="ready", version=3, agent="agent-0", host="host-0", live=True, nbytes=256, layout="0" * 64
)
REPLICA = ReplicaInfo(model="policy", replica="trainer", version=3, shards=1, spot=False, round=None, members=(SHARD,))
STATUS = Status(
    job="default",
    seq=12,
    registry="registry-0",
    term=2,
    models=(ModelInfo(model="policy", last=3, replicas=1),),
    agents=(AgentInfo(agent="agent-0", host="host-0", rack="r-0", site="s-0", live=True, incarnation=1, shards=1),),
)


def test_every_command_has_help_with_an_example(run: Run) -> None:
    assert len(COMMANDS) == 23
    for name in COMMANDS:
        help_ = run(name, "--help")
        assert help_.code == 0
        assert f"Example: tensorhub {name}" in help_.out
        assert "--job" in help_.out
        assert ("--json" in help_.out) == (name not in WITHOUT_JSON)
    assert run("--version").out.startswith("tensorhub ")


def test_simulate_becomes_the_simulator_with_the_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("os.execv", lambda program, arguments: became.append((program, arguments)))
    options = ["--alone", "--json", "--picture", "p.svg", "--processes", "3"]
    assert run("simulate", "elastic", "mine.yaml", *options).code == 0
    ((program, arguments),) = became
    assert program == arguments[0] == sys.executable
    module = ["tensorhub_launcher.become", "tensorhub_simulator.performance"]
    assert arguments[1:] == ["-m", *module, *options, "--", "elastic", "mine.yaml"]
    assert all(importlib.util.find_spec(each) is not None for each in module)


def test_simulate_rollout_becomes_the_simulator_of_rollouts(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, arguments: became.append(arguments))
    options = ["--alone", "--json", "--picture", "p.svg", "--processes", "3"]
    options += ["--system=arrival", "--system=oracle", "--seeds", "5", "--tails"]
    assert run("simulate", "rollout", *options, "no-such.yaml").code == 0
    (arguments,) = became
    module = "tensorhub_simulator.rollout_performance"
    assert arguments[1:] == ["-m", "tensorhub_launcher.become", module, *options, "--", "no-such.yaml"]
    assert importlib.import_module(f"{module}.__main__").main(arguments[4:]) == 1
    assert "'no-such.yaml' can't be read" in capsys.readouterr().err
    assert run("simulate", "rollout", "--allocate", "no-such.yaml").code == 0
    assert "--allocate" in became[-1]
    assert "are for rollouts" in run("simulate", "--seeds", "5").err
    assert "0 is no whole number from 1" in run("simulate", "rollout", "--seeds", "0").err


def test_commands_of_the_page_of_simulations_can_be_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, arguments: became.append(arguments))
    said = (Path(__file__).parents[3] / "docs" / "design" / "simulate.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    tensorhub (simulate.*?)(?:  .*)?$", said, re.MULTILINE)
    assert len(commands) > 5
    for each in commands:
        assert run(*each.split()).code == 0, each


def test_bench_runs_the_benchmarks_or_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what it measures with it begins nothing, which would end with a traceback."""
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert "not in this version" in run("bench").err
        patch.setattr("importlib.util.find_spec", lambda name: object())
        for code in (0, 3):
            patch.setattr("subprocess.run", lambda *_, code=code, **__: subprocess.CompletedProcess([], code))
            assert run("bench").code == min(code, 1)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it was begun"))
    for name in ("uvloop", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("bench").is_one_line(1, "needs ml_dtypes and uvloop", "pip install 'tensorhub[agent,server,torch]'")


def test_no_hub_is_one_line(run: Run, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers["versions"] = RegistryUnavailable("no registry answered:\n see 'tensorhub doctor'")
    assert run("versions", "policy").is_one_line(1, "tensorhub: no registry answered: see 'tensorhub doctor'\n")
    monkeypatch.delenv("TENSORHUB_NATS")
    monkeypatch.delenv("TENSORHUB_AGENT")
    for words in (["status"], ["watch", "policy"], ["pull", "policy", str(tmp_path / "out")]):
        assert run(*words, "--dir", tmp_path / "empty").is_one_line(1, "tensorhub up")
    monkeypatch.setenv("TENSORHUB_BEAT_S", "soon")
    assert run("versions", "policy").is_one_line(2, "TENSORHUB_BEAT_S")


def test_versions(run: Run, answers: dict[str, Any]) -> None:
    answers["versions"] = [VERSION]
    out = run("versions", "policy").out.splitlines()
    assert out[0].split() == ["VERSION", "STATE", "PUBLISHER", "PUBLISHED", "HOLDERS"]
    assert re.match(r"3 +available +trainer +19[67]\d-.* trainer, r-0$", out[1])
    [told] = run("versions", "policy", "--json").objects
    assert told == {**structs.asdict(VERSION), "holders": ["trainer", "r-0"]}
    assert list(told)[:6] == ["model", "version", "state", "publisher", "published_at", "holders"]
    answers |= {"versions": [], "status": STATUS}
    assert run("versions", "policy").out == "policy has no versions yet\n"
    assert run("versions", "policy", "--json").out == ""
    for more in ([], ["--json"]):
        ended = run("versions", "polciy", *more)
        assert ended.is_one_line(1, "there is no model 'polciy' in job 'default': it has policy\n")


EMPTY: dict[str, Any] = dict.fromkeys(("models", "agents", "replicas", "processes", "reads", "ailing", "troubles"), ())
NATS = Nats(url="nats://127.0.0.1:4222", server="2.12.1", round_trip_s=0.0004)
NOTHING = HubState(job="default", seq=0, registry="", term=0, level=0, nats=NATS, reads_left_out=0, **EMPTY)
READ = ActiveRead(
    model="policy",
    replica="rollout-0",
    shard=1,
    want="latest",
    version=3,
    stage="filling",
    done_bytes=768,
    total_bytes=1024,
    bytes_per_s=1.5e9,
    for_s=7.25,
    still_s=6.0,
    sources=(ReadSource(agent="agent-0", transport="ucxx", phase="flowing", nbytes=768, silent_s=6.0),),
)


def test_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = structs.replace(READ, replica="rollout-1", version=None, stage="joining", done_bytes=0, still_s=0.0)
    picture = structs.replace(
        NOTHING,
        seq=12,
        registry="registry-0",
        term=2,
        level=4,
        models=STATUS.models,
        agents=STATUS.agents,
        replicas=(REPLICA,),
        processes=(
            Process(process="planner-0", role="planner", answers=True, up_s=1.0, nats_lost=0, faults=0),
            Process(process="agent-0", role="agent", answers=False, why="process 7 is stopped (kill -CONT 7 wakes it)"),
        ),
        reads=(ReadRow(agent="agent-1", read=READ), ReadRow(agent="agent-1", read=waiting)),
        reads_left_out=2,
        troubles=("agent-0 does not answer",),
    )

    async def looked(*_: object) -> HubState:
        return picture

    monkeypatch.setattr("tensorhub.cli.commands.status.collect", looked)
    out = run("status").out
    assert "job default at entry 12 and level 4, led by registry-0" in out
    assert "NATS 2.12.1 at nats://127.0.0.1:4222 answers in 0.4 ms; planner-0 answers" in out
    assert re.search(r"^agent-0 +host-0 +r-0 +s-0 +silent +1 +-$", out, re.MULTILINE)
    assert re.search(r"^policy +3 +trainer +3 +1 +agent-0$", out, re.MULTILINE)
    shown = r"^policy/rollout-0 +1 +3 +filling +75 % +1.0 KiB +1.50 +7.2 s +agent-0 \(ucxx\)$"
    assert re.search(shown, out, re.MULTILINE)
    assert "and 2 more reads" in out
    assert "waiting for a version: policy/rollout-1" in out
    assert out.endswith("\n! agent-0 does not answer\n")
    [told] = run("status", "--json").objects
    assert list(told) == ["type", *HubState.__struct_fields__]
    assert told["type"] == "status"
    assert told["models"] == [{"model": "policy", "last": 3, "replicas": 1, "retain": 0, "pins": []}]
    assert [each["read"]["stage"] for each in told["reads"]] == ["filling", "joining"]
    picture = NOTHING
    assert "job default is not there yet" in run("status").out
    assert run("status", "--json").objects[0]["seq"] == 0


def test_watch(run: Run, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def watch(self: RegistryClient, model: str, after: int | None, kinds: Any) -> AsyncGenerator[Watched, None]:
        asked.append((after, kinds))
        yield Watched(seq=6, time=0.0, kind="version.published", model=model, version=1, replica="trainer")
        yield Watched(seq=9, time=0.0, kind="version.unavailable", model=model, version=1, reason="unpublished")

    async def bus(self: RegistryClient) -> Any:
        return types.SimpleNamespace(watch=lambda _: lambda: None)

    monkeypatch.setattr(RegistryClient, "watch", watch)
    monkeypatch.setattr(RegistryClient, "bus", bus)
    answers["status"] = STATUS
    out = run("watch", "policy").out.splitlines()
    assert re.match(r" +6  19.* version.published +policy, version 1, by trainer$", out[0])
    assert out[1].endswith("policy, version 1, unpublished")
    told = run("watch", "policy", "--json", "--after", 5, "--all").objects
    assert [each["seq"] for each in told] == [6, 9]
    assert list(told[0]) == list(told[1]) == list(Watched.__struct_fields__)
    run("watch", "policy", "--new")
    assert asked == [(None, None), (5, ()), (12, None)]


# ------------------------------------------------------------------------------------------------- publish and pull


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.arange(4.0), "scale": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}, first)
    save_file({"bias": torch.ones(2, dtype=torch.bfloat16)}, second)
    return [first, second]


def other(tmp_path: Path, value: float, names: tuple[str, ...] = ("w", "scale", "bias")) -> Path:
    path = tmp_path / f"{value}.safetensors"
    kinds = {"w": ((4,), torch.float32), "scale": ((2,), torch.float8_e4m3fn), "bias": ((2,), torch.bfloat16)}
    save_file({name: torch.full(kinds[name][0], value).to(kinds[name][1]) for name in names}, path)
    return path


def test_publish(agent: FakeAgent, run: Run, files: list[Path], answers: dict[str, Any], tmp_path: Path) -> None:
    agent.last["policy"] = 6
    assert run("publish", "policy", "--version", 5, *files).is_one_line(1, "version 5 is not newer than 6\n")
    assert not agent.shards
    [told] = run("publish", "policy", "--version", 7, *files, "--json").objects
    assert (told["model"], told["version"], told["replica"], told["tensors"]) == ("policy", 7, "published", 3)
    [shard] = agent.shards.values()
    assert (shard.key, shard.version) == (("policy", "published", 0), 7)
    assert "version 7 is published" in run("publish", "policy", "--version", 7, *files).out
    answers["status"] = STATUS
    for version, file, said in (
        (7, other(tmp_path, 2), "other values of tensor"),
        (3, other(tmp_path, 2), "not newer than the last published one, 3"),
        (8, other(tmp_path, 1, ("w",)), "other tensors"),
        (7, Path(__file__), ""),
    ):
        assert run("publish", "policy", "--version", version, file).is_one_line(1, said)
    assert shard.version == 7
    assert run("publish", "policy", other(tmp_path, 2)).out.startswith("policy version 8 is published by replica")
    assert shard.version == 8
    # Sorted by name, "w" comes third, and each begins at a multiple of 256.
    assert torch.frombuffer(bytearray(agent.bytes_of(shard)[512:528]), dtype=torch.float32).tolist() == [2, 2, 2, 2]


def test_pull_takes_the_latest_that_is_available(run: Run, answers: dict[str, Any], tmp_path: Path) -> None:
    """An engine may hold a version that a rewind retired for as long as it likes; its number is the highest."""
    out = tmp_path / "out.safetensors"
    retired = structs.replace(VERSION, version=5, state="retired", holders=("r-1",))
    engine = structs.replace(REPLICA, replica="r-1", version=5)
    answers |= {"versions": [VERSION, retired], "replicas": [engine, REPLICA]}
    answers["layout"] = RegistryUnavailable("the layout of version 3 was asked for")
    assert run("pull", "policy", out).is_one_line(1, "the layout of version 3 was asked for")
    ended = run("pull", "policy", "--version", 5, out)
    assert ended.is_one_line(1, "tensorhub: version 5 of policy was retired by a rewind: pull the latest\n")
    assert run("pull", "policy", "--version", 8, out).is_one_line(1, "no version 8 that anybody holds")
    # Between the two questions the holder has gone.
    for versions in ([VERSION], []):
        answers |= {"versions": versions, "replicas": []}
        assert run("pull", "policy", out).is_one_line(1, "no version that anybody holds")
    assert not out.exists()


@pytest.mark.long
def test_a_closed_pipe_ends_a_watch(agent: FakeAgent) -> None:
    """`tensorhub watch … | head -1` must not wait for the next event."""
    code = """
import asyncio
from tensorhub.cli.commands import watch

async def quiet():
    print("first", flush=True)
    await asyncio.Event().wait()

asyncio.run(watch._while_read(quiet()))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")


def test_a_folder_with_spaces_is_told_as_a_shell_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    process = ProcessEntry(pid=1)
    file = HubFile(nats="nats://a:1", nats_pid=1, credentials="key", registry=process, planner=process, agents=[])
    say_ready(file, Path("/tmp/a b"), "default")  # noqa: S108 (it is only told)
    assert "export TENSORHUB_DIR='/tmp/a b'" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------- arguments

GOOD: dict[str, list[str]] = {
    "versions": ["policy"],
    "watch": ["policy"],
    "publish": ["policy", "weights.safetensors"],
    "pull": ["policy", "out.safetensors"],
    "retain": ["policy", "--last", "1"],
    "pin": ["policy", "1"],
    "unpin": ["policy", "1"],
    "rewind": ["policy", "--to", "1"],
    "quota": ["1GiB"],
    "drain": ["agent-0"],
}
"""What else each must be given."""

NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "", "x", "9" * 25, "9" * 5000, "0x1", "\u0663\u0664\u0665x")
NO_NAMES = ("a.b", "_mine", "", "x" * 65, "a b", "\u00fc", "*", ">")
NAMES = ("job", "model", "replica", "agent")


def arguments_of(name: str) -> Iterator[tuple[str, type, Any]]:
    """Yield the name, the kind and what typer knows of each argument."""
    for argument, hint in get_type_hints(COMMANDS[name], include_extras=True).items():
        if argument != "return":
            annotated = _first(hint)
            assert get_origin(annotated) is Annotated, f"{name} does not say what {argument} is"
            kind, info = get_args(annotated)
            yield argument, _first(kind), info


def _first(hint: Any) -> Any:
    """Return what it is where it is not None."""
    return get_args(hint)[0] if get_origin(hint) in (Union, types.UnionType) else hint


def given(name: str, argument: str, info: Any, value: str) -> list[str]:
    """Return the command line with this value in its place."""
    rest = list(GOOD.get(name, []))
    if type(info).__name__ == "OptionInfo":
        flag = info.param_decls[0] if info.param_decls else f"--{argument.replace('_', '-')}"
        if flag in rest:
            place = rest.index(flag)
            del rest[place : place + 2]
        return [name, f"{flag}={value}", *rest]
    place = {"version": 1}.get(argument, 0)
    options = [each for each in rest if each.startswith("--")]
    words = rest[: rest.index(options[0])] if options else list(rest)
    words[place : place + 1] = [value]
    return [name, *rest[len(words) :], "--", *words]


def cases() -> Iterator[Any]:
    for name in COMMANDS:
        for argument, kind, info in arguments_of(name):
            if kind in (int, float) or argument in ("version", "nbytes"):
                yield pytest.param(name, argument, info, NO_NUMBERS, id=f"{name}-{argument}")
            elif argument in NAMES and kind is str:
                yield pytest.param(name, argument, info, NO_NAMES, id=f"{name}-{argument}")


@pytest.mark.parametrize(("name", "argument", "info", "values"), list(cases()))
def test_what_can_not_be_is_one_line_and_nothing_was_asked_of_any_hub(
    name: str, argument: str, info: Any, values: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in values:
        ended = command(*given(name, argument, info, value))
        assert ended.is_one_line(2), (value, ended)
        assert "Input should" not in ended.err
        assert len(ended.err) < 400


@pytest.mark.parametrize("name", [each for each in COMMANDS if "nats" in get_type_hints(COMMANDS[each])])
def test_no_address_of_nats_is_one_line(name: str, tmp_path: Path) -> None:
    for address in ("junk", "http://127.0.0.1", "nats://", "nats://127.0.0.1:99999", ","):
        assert command(name, "--nats", address, "--dir", tmp_path, *GOOD.get(name, [])).is_one_line(2), address


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "policy", "-"], "not written to stdout"),
        (["pull", "policy", "{folder}"], "is a directory"),
        (["pull", "policy", "/dev/full"], "no regular file"),
        (["pull", "policy", "{folder}/none/out"], "there is no directory"),
        (["pull", "policy", "{folder}/" + "x" * 300], "can't be written: File name too long"),
        (["publish", "policy", "-"], "not read from stdin"),
        (["publish", "policy", "{folder}"], "no regular file"),
        (["publish", "policy", "/dev/zero"], "no regular file"),
        (["publish", "policy", "{folder}/\udcff\udcfe"], "can't be read: No such file"),
        (["publish", "policy", "{folder}/none"], "can't be read: No such file"),
        (["publish", "policy", "{folder}/" + "x" * 300], "can't be read: File name too long"),
        (["simulate", "elastic", "--picture", "/dev/full"], "no regular file"),
        (["demo", "--attach", "{folder}/none"], "no agent's socket"),
        (["delete"], "name a MODEL, or with --job a whole job"),
        (["delete", "policy", "--forget"], "leave MODEL out"),
        (["up", "--nats-nodes", "2"], "take 1, 3 or 5"),
        (["up", "--agents", "1", "--hosts", "2"], "2 hosts need as many agents"),
        (["trace", ""], "trace"),
        (["credentials", "{folder}", "--renew", "none"], "there is no key 'none'"),
        (["nonsense"], "no such command"),
        (["status", "--nonsense"], "no such option"),
        (["versions"], "missing"),
        (["versions", "policy", "other"], "unexpected"),
        (["retain", "policy"], "--last"),
    ],
)
def test_what_can_be_no_file_or_place_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert command(*(each.replace("{folder}", str(tmp_path)) for each in arguments)).is_one_line(2, words)
    assert list(tmp_path.iterdir()) == []


def test_keys_are_made_for_whom_they_are_named_and_kept_by_the_next_run(tmp_path: Path) -> None:
    """Each user in a file of its own, and all of them in the server's."""
    keys = tmp_path / "keys"
    arguments = ("--agent", "a", "--runner", "r", "--runner", "s", "--job", "run-7")
    assert command("credentials", str(keys), *arguments).code == 0
    made = {str(path.relative_to(keys)): path.read_text() for path in keys.rglob("*.nk")}
    named = ("agents/a.nk", "runners/r.nk", "runners/s.nk", "jobs/run-7.nk")
    assert set(made) == {*named, "admin.nk", "registry.nk", "planner.nk", "rollout.nk", "client.nk"}
    assert command("credentials", str(keys), "--renew", "runners/r").code == 0
    again = {name: (keys / name).read_text() for name in made}
    assert [name for name in made if again[name] != made[name]] == ["runners/r.nk"]
    conf = (keys / "nats-users.conf").read_text()
    for user in ("runner r", "runner s", "rollout", "agent a", "client run-7"):
        assert f"# {user}\n" in conf


def test_a_call_is_made_only_while_time_is_left_for_it_and_gets_a_little_less() -> None:
    """Its own error comes before that of the command; and nobody is said to be silent who was not asked."""
    bound = CommandDeadline(0.0)
    assert bound.ends_within(0.0)
    with pytest.raises(tensorhub.TensorHubError, match="within 0 s, and was asking the registry then"):
        bound.left_s("asking the registry")
    bound = CommandDeadline(1000.0)
    assert not bound.ends_within(10.0)
    assert 10.0 < bound.left_s("asking the registry") < 1000.0
    assert bound.ends_within(1000.0)


# ------------------------------------------------------------------------------------------- before it has begun

SLOW_IMPORT = """
import importlib.abc, os, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "tensorhub":
            os.write(1, b"importing\\n")
            time.sleep(60)

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    "begin",
    [
        "from tensorhub_launcher import main; main()",
        "import runpy; sys.argv[1:] = ['tensorhub']; runpy.run_module('tensorhub_launcher.become', None, '__main__')",
    ],
)
def test_ctrl_c_while_the_command_is_imported_is_one_line(begin: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT + begin], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, "tensorhub: interrupted\n")


IGNORING = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tensorhub_launcher import listen
listen()
os.kill(os.getpid(), signal.SIGINT)
print("goes on")
"""
BLOCKING = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
os.execv(sys.executable, [sys.executable, '-m', 'tensorhub_launcher.become', 'json.tool', '--help'])
"""


def test_ctrl_c_reaches_another_program_and_none_that_a_shell_started_in_its_background() -> None:
    """`tensorhub simulate` has blocked it until it becomes the other program."""
    ended = python(IGNORING)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")
    ended = python(BLOCKING)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "tensorhub: interrupted\n")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_file_is_no_error(closed: int) -> None:
    again = [sys.executable, "-m", "tensorhub_launcher", "--version"]
    ended = python(f"import os; os.close({closed}); os.execv({sys.executable!r}, {again!r})")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "" if closed == 1 else ended.stdout.startswith("tensorhub ")
