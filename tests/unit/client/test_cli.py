"""The commands: what they print, for people and for programs, and how they end."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from tests.unit.client.fake_agent import FakeAgent
from typer.testing import CliRunner

from tensorhub._control.hub_file import HubFile, ProcessEntry
from tensorhub._control.registry_client import RegistryClient
from tensorhub._control.watch import Watched
from tensorhub.cli.commands.up import say_ready
from tensorhub.cli.doctor import hub_checks
from tensorhub.cli.doctor.finding import Finding, ok
from tensorhub.cli.hub_state import HubState, Nats, Process, ReadRow
from tensorhub.cli.main import app
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.activity import ActiveRead, ReadSource
from tensorhub_common.protocol.queries import AgentInfo, ModelInfo, ReplicaInfo, ShardInfo, Status, VersionInfo

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands if each.callback is not None}

WITHOUT_JSON = ("up", "bench", "credentials")


class Ended:
    def __init__(self, result: Any) -> None:
        self.code: int = result.exit_code
        self.out: str = result.stdout
        self.err: str = result.stderr

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a command where a fake agent and a NATS that nobody asks are."""
    monkeypatch.setenv("TENSORHUB_AGENT", str(agent.path))
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    runner = CliRunner()
    return lambda *arguments: Ended(runner.invoke(app, [str(each) for each in arguments]))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the registry says, by the name of the question; an error is raised."""
    said: dict[str, Any] = {"open_job": None}

    def asked(name: str) -> None:
        async def answer(self: RegistryClient, *arguments: Any) -> Any:
            if isinstance(said[name], Exception):
                raise said[name]
            return said[name]

        monkeypatch.setattr(RegistryClient, name, answer)

    for name in ("open_job", "versions", "replicas", "status", "layout"):
        asked(name)
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
    agents=(
        AgentInfo(agent="agent-0", host="host-0", rack="rack-0", site="site-0", live=True, incarnation=1, shards=1),
    ),
)


def test_every_command_has_help_with_an_example(run: Callable[..., Ended]) -> None:
    assert len(COMMANDS) == 20
    for command in COMMANDS:
        help_ = run(command, "--help")
        assert help_.code == 0
        assert f"Example: tensorhub {command}" in help_.out
        assert "--job" in help_.out
        assert ("--json" in help_.out) == (command not in WITHOUT_JSON)
    assert run("--version").out.startswith("tensorhub ")


def test_a_bad_setting_is_wrong_usage(run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_BEAT_S", "soon")
    ended = run("versions", "policy")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "TENSORHUB_BEAT_S" in ended.err


def test_simulate_becomes_the_simulator_with_the_options(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("os.execv", lambda program, arguments: became.append((program, arguments)))
    options = ["--alone", "--json", "--picture", "p.svg", "--processes", "3"]
    assert run("simulate", "elastic", "mine.yaml", *options).code == 0
    ((program, arguments),) = became
    assert program == arguments[0] == sys.executable
    module = ["tensorhub_launcher.become", "tensorhub_simulator.performance"]
    assert arguments[1:] == ["-m", *module, *options, "--", "elastic", "mine.yaml"]
    assert all(importlib.util.find_spec(each) is not None for each in module)


def test_a_full_disk_is_one_line_and_no_traceback_at_the_exit() -> None:
    program = (
        "import sys\n"
        "from tensorhub.cli.output import json_line\n"
        "from tensorhub_common.errors import TensorHubError\n"
        "try: json_line({})\n"
        "except TensorHubError as error: sys.exit(str(error))\n"
    )
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False, timeout=120
        )
    assert (ended.returncode, ended.stderr) == (1, b"what it says can't be written: No space left on device\n")


def test_bench_runs_the_benchmarks_or_says_where_they_are(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not in this version" in run("bench").err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for code in (0, 3):
        monkeypatch.setattr("subprocess.run", lambda *_, code=code, **__: subprocess.CompletedProcess([], code))
        assert run("bench").code == min(code, 1)


def test_bench_without_what_it_measures_with_says_what_to_install(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And begins nothing, which would end with a traceback."""
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it was begun"))
    for name in ("uvloop", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = run("bench")
    said = "bench needs ml_dtypes and uvloop, not installed here: pip install 'tensorhub[agent,server,torch]'"
    assert (ended.code, ended.out, ended.err) == (1, "", f"tensorhub: {said}\n")


def test_what_the_hub_refuses_is_one_line_on_stderr(run: Callable[..., Ended], answers: dict[str, Any]) -> None:
    answers["versions"] = RegistryUnavailable("no registry answered:\n see 'tensorhub doctor'")
    ended = run("versions", "policy")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "tensorhub: no registry answered: see 'tensorhub doctor'\n"


def test_no_hub_says_how_to_start_one(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TENSORHUB_NATS")
    monkeypatch.delenv("TENSORHUB_AGENT")
    for command in (["status"], ["watch", "policy"], ["pull", "policy", str(tmp_path / "out")]):
        ended = run(*command, "--dir", tmp_path / "empty")
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert "tensorhub up" in ended.err


def test_versions(run: Callable[..., Ended], answers: dict[str, Any]) -> None:
    answers["versions"] = [VERSION]
    out = run("versions", "policy").out.splitlines()
    assert out[0].split() == ["VERSION", "STATE", "PUBLISHER", "PUBLISHED", "HOLDERS"]
    assert re.match(r"3 +available +trainer +19[67]\d-.* trainer, r-0$", out[1])
    [told] = run("versions", "policy", "--json").objects
    assert told == {
        "model": "policy",
        "version": 3,
        "state": "available",
        "publisher": "trainer",
        "published_at": 0.0,
        "holders": ["trainer", "r-0"],
        "retained": False,
        "gone": "",
    }
    answers |= {"versions": [], "status": STATUS}
    assert run("versions", "policy").out == "policy has no versions yet\n"
    assert run("versions", "policy", "--json").out == ""
    for more in ([], ["--json"]):
        ended = run("versions", "polciy", *more)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err == "tensorhub: there is no model 'polciy' in job 'default': it has policy\n"


NOTHING = HubState(
    job="default",
    seq=0,
    registry="",
    term=0,
    level=0,
    models=(),
    agents=(),
    replicas=(),
    nats=Nats(url="nats://127.0.0.1:4222", server="2.12.1", round_trip_s=0.0004),
    processes=(),
    reads=(),
    reads_left_out=0,
    ailing=(),
    troubles=(),
)
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


def test_status(run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table for people and the object for programs are of the same state."""
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
    assert re.search(r"^agent-0 +host-0 +rack-0 +site-0 +silent +1 +-$", out, re.MULTILINE)
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


def test_watch(run: Callable[..., Ended], answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def watch(self: RegistryClient, model: str, after: int | None, kinds: Any) -> AsyncGenerator[Watched, None]:
        asked.append((after, kinds))
        yield Watched(seq=6, time=0.0, kind="version.published", model=model, version=1, replica="trainer")
        yield Watched(seq=9, time=0.0, kind="version.unavailable", model=model, version=1, reason="unpublished")

    class Quiet:
        def watch(self, watcher: object) -> Callable[[], None]:
            return lambda: None

    async def bus(self: RegistryClient) -> Quiet:
        return Quiet()

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


def test_publish_leaves_the_version_with_the_agent(
    agent: FakeAgent, run: Callable[..., Ended], files: list[Path], answers: dict[str, Any], tmp_path: Path
) -> None:
    ended = run("publish", "policy", "--version", 7, *files, "--json")
    [told] = ended.objects
    assert (told["model"], told["version"], told["replica"], told["tensors"]) == ("policy", 7, "published", 3)
    [shard] = agent.shards.values()
    assert (shard.key, shard.version) == (("policy", "published", 0), 7)
    assert "version 7 is published" in run("publish", "policy", "--version", 7, *files).out

    refused = run("publish", "policy", "--version", 7, other(tmp_path, 2))
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "other values of tensor" in refused.err
    answers["status"] = STATUS
    refused = run("publish", "policy", "--version", 3, other(tmp_path, 2))
    assert refused.code == 1
    assert "not newer than the last published one, 3" in refused.err
    assert shard.version == 7

    assert run("publish", "policy", other(tmp_path, 2)).out.startswith("policy version 8 is published by replica")
    assert shard.version == 8
    # Sorted by name, "w" comes third, and each begins at a multiple of 256.
    assert torch.frombuffer(bytearray(agent.bytes_of(shard)[512:528]), dtype=torch.float32).tolist() == [2, 2, 2, 2]


def test_publish_of_other_tensors_is_one_clear_line(
    agent: FakeAgent, run: Callable[..., Ended], answers: dict[str, Any], files: list[Path], tmp_path: Path
) -> None:
    assert run("publish", "policy", "--version", 1, *files).code == 0
    refused = run("publish", "policy", "--version", 2, other(tmp_path, 1, ("w",)))
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "other tensors" in refused.err
    ended = run("publish", "policy", "--version", 1, __file__)
    assert (ended.code, ended.err.count("\n")) == (1, 1)


def test_a_publish_that_fails_takes_away_what_it_brought(
    agent: FakeAgent, run: Callable[..., Ended], answers: dict[str, Any], files: list[Path]
) -> None:
    agent.last["policy"] = 9
    refused = run("publish", "policy", "--version", 5, *files)
    assert (refused.code, refused.err) == (1, "tensorhub: version 5 is not newer than 9\n")
    assert not agent.shards


def test_pull_of_what_nobody_holds(run: Callable[..., Ended], answers: dict[str, Any], tmp_path: Path) -> None:
    answers |= {"versions": [VERSION], "replicas": [REPLICA]}
    ended = run("pull", "policy", "--version", 8, tmp_path / "out.safetensors")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "no version 8 that anybody holds" in ended.err
    # Between the two questions the holder has gone.
    answers["replicas"] = []
    assert "no version that anybody holds" in run("pull", "policy", tmp_path / "out.safetensors").err
    answers["versions"] = []
    assert "no version that anybody holds" in run("pull", "policy", tmp_path / "out.safetensors").err
    assert not (tmp_path / "out.safetensors").exists()


def test_pull_takes_the_latest_that_is_available_and_not_what_a_rewind_retired(
    run: Callable[..., Ended], answers: dict[str, Any], tmp_path: Path
) -> None:
    """An engine may hold a retired version for as long as it likes; its number is the highest."""
    retired = structs.replace(VERSION, version=5, state="retired", holders=("r-1",))
    engine = structs.replace(REPLICA, replica="r-1", version=5)
    answers |= {"versions": [VERSION, retired], "replicas": [engine, REPLICA]}
    answers["layout"] = RegistryUnavailable("the layout of version 3 was asked for")
    assert "the layout of version 3 was asked for" in run("pull", "policy", tmp_path / "out.safetensors").err
    ended = run("pull", "policy", "--version", 5, tmp_path / "out.safetensors")
    assert (ended.code, ended.err) == (
        1,
        "tensorhub: version 5 of policy was retired by a rewind: pull the latest\n",
    )


# ----------------------------------------------------------------------------------------------------------- doctor


def test_doctor_without_a_hub_fails_and_says_what_to_do(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_checks, "CONNECT_S", 0.2)
    ended = run("doctor", "--quick", "--json")
    found = {each["check"]: each for each in ended.objects}
    assert ended.code == 1
    assert found["nats"]["level"] == "fail"
    assert "tensorhub up" in found["nats"]["advice"]
    assert found["python"]["level"] == "ok"
    assert found["torch"]["found"].startswith(torch.__version__)
    assert all(each["advice"] for each in ended.objects if each["level"] != "ok")
    assert "fail  nats" in run("doctor", "--quick").out


def test_doctor_where_nothing_is_installed_that_an_agent_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that only asks: it is warned that no agent can run here, and all else is looked at."""
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    program = """
import sys
sys.modules |= dict.fromkeys(("uvloop", "ml_dtypes", "torch"))
from tensorhub.cli.main import main
main()
"""
    asked = [sys.executable, "-c", program, "doctor", "--quick", "--json"]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
    found = {each["check"]: each for each in map(json.loads, ended.stdout.splitlines())}
    assert (ended.returncode, ended.stderr) == (1, "")
    needs = found["agent's needs"]
    assert needs["level"] == "warn"
    assert needs["found"] == "ml_dtypes, uvloop can't be imported, so no agent can run here"
    assert "pip install 'tensorhub[agent]'" in needs["advice"]
    assert (found["torch"]["level"], found["nats"]["level"]) == ("warn", "fail")


def test_doctor_ends_though_the_hub_does_not_answer(run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> AsyncIterator[Finding]:
        yield ok("nats", "answers")
        await asyncio.Event().wait()

    monkeypatch.setattr("tensorhub.cli.commands.doctor.hub", silent)
    monkeypatch.setattr("tensorhub.cli.commands.doctor.HUB_S_MAX", 0.05)
    ended = run("doctor", "--quick", "--json")
    assert ended.code == 1
    assert ended.objects[-1]["check"] == "hub"
    assert ended.objects[-1]["found"] == "its checks did not end within 0.05 s; nats was the last that did"


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
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    watchdog = threading.Timer(20, process.kill)
    watchdog.start()
    assert process.wait() == 0
    watchdog.cancel()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_folder_with_spaces_is_told_as_a_shell_takes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    process = ProcessEntry(pid=1)
    file = HubFile(nats="nats://a:1", nats_pid=1, credentials="key", registry=process, planner=process, agents=[])
    say_ready(file, tmp_path / "a b", "default")
    assert f"export TENSORHUB_DIR='{tmp_path}/a b'" in capsys.readouterr().out
