"""Every command where something is missing, silent, full, closed or broken off: one line, one code, within its bound.

What stands on the command line itself is the business of tests/unit/client/test_command_arguments.py.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import PROGRAM_S, Ended, environment, nursery
from tests.stopping import stop

from tensorhub_common.bus.address import CONNECT_TIMEOUT_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LAUNCH: Final = """
import os, sys
from tensorhub_launcher import main
os.chdir(sys.argv.pop(1))
try:
    main()
except SystemExit as end:
    # What is still to be written is written now; to take apart an interpreter that has torch would take longest of all.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
"""
LATE_S: Final = 8.0
"""How much later than its bound a command may end on a machine that is busy with other things."""

OF_HUB: Final = (
    ["status"],
    ["status", "--json"],
    ["versions", "policy"],
    ["watch", "policy"],
    ["trace"],
    ["retain", "policy", "--last", "1"],
    ["pin", "policy", "1"],
    ["unpin", "policy", "1"],
    ["rewind", "policy", "--to", "1"],
    ["quota", "1GiB"],
    ["drain", "agent-0"],
    ["delete", "policy"],
    ["delete", "--job", "job", "--yes"],
    ["delete", "--job", "job", "--forget"],
    ["upgrade"],
    ["upgrade", "--all", "--look"],
    ["publish", "policy", "in.safetensors"],
    ["pull", "policy", "out.safetensors"],
)
WITHOUT_TIMEOUT: Final = (["watch", "policy"], ["watch", "policy", "--new"], ["trace"], ["trace", "deadbeef"])
WITH_TIMEOUT: Final = tuple(each for each in OF_HUB if each[0] not in ("watch", "trace"))
BY_AGENT: Final = ("publish", "pull")


class Run:
    """A command in a process of its own, which is forked from one that has imported all."""

    def __init__(self, folder: Path, arguments: Sequence[str], told: dict[str, str], stdout: int | None = None) -> None:
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        files = (os.open(os.devnull, os.O_RDWR), self._out if stdout is None else stdout, self._err)
        self.began = time.monotonic()
        self.pid, self._code = nursery().start(LAUNCH, (str(folder), *arguments), told, files)
        os.close(files[0])

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            code = self._code.result(PROGRAM_S)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        return code, _taken(self._out), _taken(self._err)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def _taken(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, size, 0).decode()
    os.close(file)
    return text


def one_line(ended: Ended, code: int) -> str:
    """Check that a command ended so, and return what it complained of."""
    assert (ended[0], ended[1]) == (code, ""), ended
    assert ended[2].count("\n") == 1, ended
    assert ended[2].startswith("tensorhub: ")
    assert "fault of TensorHub" not in ended[2]
    return ended[2]


def plain(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    return own | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(8.0)}, tmp_path / "in.safetensors")
    return tmp_path


class Silent:
    """Listens, takes connections, and never says a word: as a process that was stopped."""

    def __init__(self, listening: socket.socket) -> None:
        self.reached = threading.Event()
        self._listening = listening
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._listening.accept()[0])
                self.reached.set()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        for each in self._taken:
            each.close()


@pytest.fixture
def silent(folder: Path) -> Iterator[tuple[dict[str, str], Silent, Silent]]:
    """An environment with a NATS and an agent that never answer."""
    path = folder / "agent.sock"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    unix.listen()
    tcp = socket.create_server(("127.0.0.1", 0))
    address = f"nats://127.0.0.1:{tcp.getsockname()[1]}"
    nats, agent = Silent(tcp), Silent(unix)
    yield plain(TENSORHUB_NATS=address, TENSORHUB_AGENT=str(path)), nats, agent
    nats.close()
    agent.close()


@pytest.mark.parametrize("arguments", OF_HUB, ids=" ".join)
async def test_without_a_hub_each_says_how_to_start_one(folder: Path, arguments: list[str]) -> None:
    assert "tensorhub up" in one_line(Run(folder, arguments, plain(TENSORHUB_DIR=str(folder / "none"))).ended(), 1)
    assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize("arguments", WITH_TIMEOUT, ids=" ".join)
async def test_who_is_silent_is_told_within_the_bound(
    folder: Path, silent: tuple[dict[str, str], Silent, Silent], arguments: list[str]
) -> None:
    """Of seconds that a command is late, those that a busy machine takes from it don't count."""
    run = Run(folder, [*arguments, "--timeout", "0.5"], silent[0])
    complaint = one_line(run.ended(), 1)
    assert ("no agent answers" if arguments[0] in BY_AGENT else "NATS at") in complaint
    assert run.seconds < 0.5 + LATE_S


@pytest.mark.long
async def test_what_takes_no_bound_has_one_of_its_own_where_nats_is_silent(
    folder: Path, silent: tuple[dict[str, str], Silent, Silent]
) -> None:
    """All at once: each waits for nothing but the end of its bound."""
    runs = [Run(folder, arguments, silent[0]) for arguments in WITHOUT_TIMEOUT]
    for run in runs:
        assert "does not answer" in one_line(await asyncio.to_thread(run.ended), 1)
        assert run.seconds < CONNECT_TIMEOUT_S + LATE_S


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        *((each, signal.SIGINT) for each in OF_HUB),
        *((each, number) for each in (OF_HUB[0], OF_HUB[-1]) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else each.name,
)
async def test_a_signal_in_the_middle_is_one_line_and_its_code(
    folder: Path, silent: tuple[dict[str, str], Silent, Silent], arguments: list[str], number: signal.Signals
) -> None:
    told, nats, agent = silent
    run = Run(folder, arguments, told)
    assert await asyncio.to_thread((agent if arguments[0] in BY_AGENT else nats).reached.wait, PROGRAM_S)
    os.kill(run.pid, number)
    assert one_line(run.ended(), 128 + number) == "tensorhub: interrupted\n"
    assert not (folder / "out.safetensors").exists()


MISSING: Final = (
    (["versions", "nomodel"], 1, "there is no model 'nomodel' in job"),
    (["versions", "nomodel", "--json"], 1, "there is no model 'nomodel' in job"),
    (["pull", "nomodel", "out.safetensors"], 1, "no version that anybody holds"),
    (["pull", "policy", "out.safetensors", "--version", "77"], 1, "no version 77 that anybody holds"),
    (["pull", "policy", "/proc/out.safetensors"], 1, "can't be written"),
    (["publish", "policy", "in.safetensors", "--agent", "agent-77"], 1, "there is no agent 'agent-77'"),
    (["publish", "policy", "in.safetensors", "--version", "0", "--replica", "other"], 1, "not newer than"),
    (["pin", "policy", "77"], 1, "can't be pinned"),
    (["unpin", "nomodel", "1"], 1, "nomodel"),
    (["retain", "policy", "--last", "1", "--timeout", "0"], 1, "not done within 0 s"),
    (["rewind", "nomodel", "--to", "1"], 1, "nomodel"),
    (["drain", "agent-77"], 1, "has not joined"),
    (["delete", "nomodel"], 1, "nomodel"),
    (["delete", "--job", "nojob", "--yes"], 1, "there is no job 'nojob'"),
    (["delete", "--job", "{job}"], 2, "say --yes"),
    (["trace", "deadbeef"], 1, "there is no transfer 'deadbeef'"),
    (["trace", "--version", "77"], 1, "there is no transfer of version 77"),
    (["watch", "policy", "--job", "nojob"], 1, "there is no job 'nojob'"),
    (["versions", "policy", "--job", "nojob"], 1, "there is no job 'nojob'"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def published(
    hub_on_one_host: RunningHub, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """A job with one version, and the environment of its commands."""
    job, folder = new_job(), tmp_path_factory.mktemp("published")
    told = environment(hub_on_one_host, TENSORHUB_JOB=job)
    save_file({"w": torch.arange(8.0)}, folder / "in.safetensors")
    code, _, err = Run(folder, ["publish", "policy", "in.safetensors", "--version", "1"], told).ended()
    assert (code, err) == (0, "")
    return job, told


@pytest.mark.parametrize(
    ("arguments", "code", "words"), MISSING, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
async def test_what_is_not_there_is_one_line(
    folder: Path, published: tuple[str, dict[str, str]], arguments: list[str], code: int, words: str
) -> None:
    job, told = published
    run = Run(folder, [each.replace("{job}", job) for each in arguments], told)
    assert words in one_line(run.ended(), code)


PRINTING: Final = (
    ["--help"],
    ["--version"],
    ["status"],
    ["status", "--json"],
    ["status", "--help"],
    ["versions", "policy"],
    ["versions", "policy", "--json"],
    ["watch", "policy"],
    ["trace"],
    ["doctor", "--quick"],
    ["doctor", "--quick", "--json"],
    ["retain", "policy", "--last", "1"],
    ["pin", "policy", "1", "--json"],
    ["quota", "1GiB"],
    ["credentials", "keys"],
)


@pytest.mark.long
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
async def test_what_can_not_be_written_is_one_line_and_who_reads_no_further_is_no_error(
    folder: Path, published: tuple[str, dict[str, str]], arguments: list[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    ended = Run(folder, arguments, published[1], full).ended()
    os.close(full)
    assert one_line(ended, 1) == "tensorhub: what it says can't be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    ended = Run(folder, arguments, published[1], writer).ended()
    os.close(writer)
    assert ended == (0, "", "")


async def test_status_and_doctor_name_who_is_stopped(
    hub: RunningHub, folder: Path, published: tuple[str, dict[str, str]]
) -> None:
    """And wake up with it: what was silent is not told any more."""
    _, told = published
    pids = hub.file.pids
    for process in ("planner-0", "agent-1"):
        stop(pids[process])
        try:
            asked = (["status"], ["status", "--json"], ["doctor", "--quick", "--json"])
            text, status, doctor = [run.ended() for run in [Run(folder, each, told) for each in asked]]
            code, out, err = text
            assert (code, err) == (0, "")
            assert f"! {process} does not answer: process {pids[process]} is stopped" in out
            found = json.loads(status[1])
            assert [each["process"] for each in found["processes"] if not each["answers"]] == [process]
            code, out, err = doctor
            assert (code, err) == (1, "")
            wrong = [json.loads(each) for each in out.splitlines()]
            stopped = next(each for each in wrong if each["check"] == "processes")
            assert stopped["found"] == f"{process} (process {pids[process]}) is stopped"
            assert f"kill -CONT {pids[process]}" in stopped["advice"]
            assert any(each["found"] == f"{process} does not answer" for each in wrong)
        finally:
            os.kill(pids[process], signal.SIGCONT)
    async with asyncio.timeout(PROGRAM_S):
        while "does not answer" in (Run(folder, ["status"], told).ended())[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_pull_that_is_broken_off_leaves_no_replica(
    hub: RunningHub, folder: Path, published: tuple[str, dict[str, str]]
) -> None:
    """The planner is stopped, so that it is in the middle until Ctrl-C."""
    job, told = published
    stop(hub.file.planner.pid)
    try:
        run = Run(folder, ["pull", "policy", "out.safetensors"], told)
        async with hub.connected(job, agents=1) as (here,), asyncio.timeout(PROGRAM_S):
            while not any(each.replica.startswith("pull-") for each in await here.replicas("policy")):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            os.kill(run.pid, signal.SIGINT)
            assert one_line(await asyncio.to_thread(run.ended), 130) == "tensorhub: interrupted\n"
            while any(each.replica.startswith("pull-") for each in await here.replicas("policy")):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        os.kill(hub.file.planner.pid, signal.SIGCONT)
    assert not (folder / "out.safetensors").exists()


async def test_a_variable_that_is_no_setting_is_told_by_commands(
    folder: Path, published: tuple[str, dict[str, str]]
) -> None:
    _, told = published
    code, out, err = Run(folder, ["versions", "policy"], told | {"TENSORHUB_BEATS": "1"}).ended()
    assert (code, out.splitlines()[0].split()[0]) == (0, "VERSION")
    assert err == "tensorhub: TENSORHUB_BEATS is set, which is no setting of TensorHub: is TENSORHUB_BEAT_S meant?\n"
