"""A whole hub on one machine, with stubs in the services' places: up, kept up, and gone without a trace."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import children_of, is_alive, wait_until

from tensorhub._control import hub_file
from tensorhub._control.hub_file import HubFile
from tensorhub.local import directory as local_directory
from tensorhub.local.children import ChildDied
from tensorhub.local.directory import HubDirectory, HubDirInUse, HubDirUnusable, OtherNodes
from tensorhub.local.hub import LocalHub, ServiceCommands
from tensorhub_common.auth.keys import make_key
from tensorhub_common.bus.connection import connect
from tensorhub_common.errors import TensorHubError
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.protocol.subjects import command_subject

ELECTION_S_MAX = 15.0
"""The nodes of a cluster take so long, at most, to agree who answers for JetStream."""

BACK_S_MAX = 60.0
STUB = Path(__file__).with_name("stub_service.py")


def stubs(*failing: str) -> ServiceCommands:
    def run(role: str) -> tuple[str, ...]:
        return (sys.executable, str(STUB), role, *failing)

    return ServiceCommands(registry=run("registry"), planner=run("planner"), agent=run("agent"))


def pids_of(hub: HubFile) -> dict[str, int]:
    return hub.pids


async def until_back(directory: Path, before: HubFile, name: str) -> HubFile:
    """Return what hub.json says once it names another process, which answers."""
    async with asyncio.timeout(BACK_S_MAX):
        while pids_of(hub := hub_file.read(directory))[name] == pids_of(before)[name]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        bus = await connect(hub.nats_all, name="test", credentials=hub.credentials, timeout_s=ELECTION_S_MAX)
        async with bus:
            for process in [each for each in pids_of(hub) if not each.startswith("nats")]:
                while (pong := await ping(bus, process)) is None or pong.pid != pids_of(hub)[process]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    return hub


async def test_it_brings_up_what_it_says(tmp_path: Path) -> None:
    hub_json = tmp_path / "hub" / "hub.json"
    hub_json.parent.mkdir()
    hub_json.write_text("of an earlier hub that was killed")
    environment = dict(os.environ) | {"TENSORHUB_CREDENTIALS": "/of/another/hub", "TENSORHUB_BEAT_S": "0.25"}
    up = LocalHub(
        tmp_path / "hub", agents=3, hosts=2, racks=1, site="berlin", commands=stubs(), environment=environment
    )
    async with up as started:
        assert started.hub == hub_file.read(tmp_path / "hub")
        assert stat.S_IMODE(hub_json.stat().st_mode) == 0o600
        hub = started.hub
        assert all(is_alive(pid) for pid in pids_of(hub).values())
        assert [(agent.id, agent.host, agent.rack, agent.site) for agent in hub.agents] == [
            ("agent-0", "host-0", "rack-0", "berlin"),
            ("agent-1", "host-1", "rack-0", "berlin"),
            ("agent-2", "host-0", "rack-0", "berlin"),
        ]
        seen = json.loads((tmp_path / "hub" / "agent-2.env.json").read_text())
        assert seen == {
            "TENSORHUB_NATS": hub.nats,
            "TENSORHUB_CREDENTIALS": str(tmp_path / "hub/credentials/agents/agent-2.nk"),
            "TENSORHUB_WORKER_CREDENTIALS": str(tmp_path / "hub/credentials/client.nk"),
            "TENSORHUB_DIR": str(tmp_path / "hub"),
            "TENSORHUB_SHM_DIR": os.environ["TENSORHUB_SHM_DIR"],
            "TENSORHUB_AGENT_ID": "agent-2",
            "TENSORHUB_HOST": "host-0",
            "TENSORHUB_UCXX": "on",
            "TENSORHUB_RACK": "rack-0",
            "TENSORHUB_SITE": "berlin",
            "TENSORHUB_SOCKET": hub.agents[2].socket,
            "TENSORHUB_STATE_DIR": str(tmp_path / "hub" / "state" / "agent-2"),
            "TENSORHUB_BEAT_S": "0.25",
        }
        async with await connect(hub.nats, name="test", credentials=hub.credentials) as bus:
            pong = await ping(bus, "agent-1")
            assert pong is not None
            assert (pong.id, pong.pid, pong.role) == ("agent-1", hub.agents[1].pid, "agent")
    assert not hub_json.exists()
    assert not any(is_alive(pid) for pid in pids_of(hub).values())


def holds(path: Path, secret: str) -> bool:
    return secret in path.read_text(errors="replace")


def admin(directory: Path) -> Path:
    return directory / "credentials/admin.nk"


@pytest.mark.long
async def test_nobody_without_a_key_gets_in(tmp_path: Path) -> None:
    """Keys are their owner's alone, the server is told none of their secret halves, and they outlive the hub."""
    keys = ("registry.nk", "planner.nk", "client.nk", "admin.nk", "agents/agent-0.nk")
    foreign = tmp_path / "foreign"
    make_key(foreign)
    secrets: list[dict[str, str]] = []
    for _ in range(2):
        async with LocalHub(tmp_path / "hub", commands=stubs()) as up:
            for stranger in (None, foreign):
                with pytest.raises(TensorHubError, match="refuses the credentials"):
                    await connect(up.hub.nats, name="stranger", credentials=stranger)
            secrets.append({key: (tmp_path / "hub/credentials" / key).read_text() for key in keys})
            for key, secret in secrets[-1].items():
                holders = [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and holds(path, secret)]
                assert [str(path.relative_to(tmp_path / "hub/credentials")) for path in holders] == [key]
                assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert secrets[0] == secrets[1]


async def test_whatever_is_killed_comes_back_and_nats_on_its_port_and_store(tmp_path: Path) -> None:
    async with LocalHub(tmp_path, agents=2, commands=stubs()) as up:
        hub = up.hub
        async with await connect(hub.nats, name="test", credentials=admin(tmp_path)) as bus:
            log = await open_job(bus, "job")
            assert await log.append(command_subject("job", "publish"), b"", "m") == 1
        for name in ("agent-1", "registry-0", "planner-0", "nats"):
            os.kill(pids_of(hub)[name], signal.SIGKILL)
            after = await until_back(tmp_path, hub, name)
            changed = {each for each in pids_of(hub) if pids_of(hub)[each] != pids_of(after)[each]}
            assert changed == {name}
            assert after.nats == hub.nats
            hub = after
        async with await connect(hub.nats, name="test", credentials=admin(tmp_path)) as bus:
            log = await open_job(bus, "job")
            assert await log.last_seq() == 1


@pytest.mark.long
async def test_the_log_outlives_the_hub(tmp_path: Path) -> None:
    for seq in (1, 2):
        async with (
            LocalHub(tmp_path, commands=stubs()) as up,
            await connect(up.hub.nats, name="test", credentials=admin(tmp_path)) as bus,
        ):
            log = await open_job(bus, "job")
            assert await log.append(command_subject("job", "publish"), b"", f"m{seq}") == seq


@pytest.mark.slow
async def test_three_nodes_and_two_registries(tmp_path: Path) -> None:
    """Each is started again where it was, and the logs are not handed to another number of nodes."""
    async with LocalHub(tmp_path, registries=2, nats_nodes=3, commands=stubs()) as up:
        hub = up.hub
        assert [entry.id for entry in hub.registries] == ["registry-0", "registry-1"]
        assert (hub.registry.pid, hub.nats, hub.nats_pid) == (
            hub.registries[0].pid,
            hub.nats_nodes[0].url,
            hub.nats_nodes[0].pid,
        )
        for name in ("registry-0", "registry-1", "agent-0"):
            seen = json.loads((tmp_path / f"{name}.env.json").read_text())
            assert seen["TENSORHUB_NATS"] == hub.nats_all
            assert seen.get("TENSORHUB_LOG_REPLICAS") == ("3" if name.startswith("registry") else None)
        async with await connect(hub.nats_all, name="test", credentials=admin(tmp_path)) as bus:
            log = await open_job(bus, "job", 3)
            assert await log.append(command_subject("job", "publish"), b"", "m") == 1
        for name in ("nats-1", "registry-1"):
            os.kill(pids_of(hub)[name], signal.SIGKILL)
            after = await until_back(tmp_path, hub, name)
            assert {each for each in pids_of(hub) if pids_of(hub)[each] != pids_of(after)[each]} == {name}
            assert after.nats_all == hub.nats_all
            hub = after
    with pytest.raises(OtherNodes, match=r"3 NATS node\(s\), and 1 are wanted: start it with --nats-nodes 3"):
        await LocalHub(tmp_path, commands=stubs()).start()
    async with (
        LocalHub(tmp_path, nats_nodes=3, commands=stubs()) as up,
        await connect(up.hub.nats_all, name="test", credentials=admin(tmp_path), timeout_s=ELECTION_S_MAX) as bus,
    ):
        assert await JobLog(bus, "job").last_seq() == 1


@pytest.mark.long
async def test_two_can_not_share_a_directory(tmp_path: Path) -> None:
    """The second is told by whom it is used, and takes nothing from the first."""
    async with LocalHub(tmp_path, commands=stubs()) as first:
        second = LocalHub(tmp_path, commands=stubs())
        with pytest.raises(HubDirInUse, match=rf"process {os.getpid()}\) uses {tmp_path}"):
            await second.start()
        await second.stop()
        assert hub_file.read(tmp_path) == first.hub
        assert all(is_alive(pid) for pid in pids_of(first.hub).values())
    async with LocalHub(tmp_path, commands=stubs()):
        pass


@pytest.mark.long
async def test_a_service_that_dies_at_its_start_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    up = LocalHub(tmp_path, agents=2, commands=stubs("agent-1"))
    with pytest.raises(ChildDied, match=r"(?s)agent-1 ended with exit code 1.*agent-1 has no GPU"):
        await up.start()
    assert not (tmp_path / "hub.json").exists()
    assert children_of(os.getpid()) == before
    async with LocalHub(tmp_path, agents=2, commands=stubs()):
        pass


async def test_nats_that_can_not_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "store").write_text("a file where the store should be")
    with pytest.raises(ChildDied, match=r"(?s)nats ended.*not a directory"):
        await LocalHub(tmp_path, commands=stubs()).start()


async def test_a_folder_may_have_letters_of_any_language(tmp_path: Path) -> None:
    """NATS reads its paths from a file of its own form, which knows fewer escapes than JSON."""
    folder = tmp_path / 'a "höb" 重み 🎉'
    async with (
        LocalHub(folder, commands=stubs()) as up,
        await connect(up.hub.nats, name="test", credentials=admin(folder)),
    ):
        assert (folder / "nats" / "store").is_dir()


async def test_a_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(HubDirUnusable, match=r"can't be kept in .*file: .*take another --dir"):
        await LocalHub(tmp_path / "file", commands=stubs()).start()


async def test_a_service_that_never_says_it_is_ready_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children_of(os.getpid())
    monkeypatch.setattr("tensorhub.local.hub.READY_TIMEOUT_S", 1.0)
    silent = ServiceCommands(stubs().registry, stubs().planner, (sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(TensorHubError, match=r"agent-0 did not say within 1 s "):
        await LocalHub(tmp_path, commands=silent).start()
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize(("agents", "hosts"), [(0, 1), (1, 0), (1, 2), (257, 1)])
def test_numbers_that_make_no_hub_are_refused(tmp_path: Path, agents: int, hosts: int) -> None:
    with pytest.raises(ValueError, match="not possible"):
        LocalHub(tmp_path, agents, hosts)


@pytest.mark.parametrize(("registries", "nats_nodes"), [(0, 1), (17, 1), (1, 0), (1, 2), (1, 4)])
def test_numbers_of_the_control_plane_that_make_no_hub_are_refused(
    tmp_path: Path, registries: int, nats_nodes: int
) -> None:
    with pytest.raises(ValueError, match="not possible"):
        LocalHub(tmp_path, registries=registries, nats_nodes=nats_nodes)


def test_sockets_move_to_a_short_path_where_the_directory_is_too_deep(tmp_path: Path) -> None:
    shallow, deep = HubDirectory(tmp_path), HubDirectory(tmp_path / "/".join(["d" * 40] * 3))
    for directory in (shallow, deep):
        directory.open()
        path = directory.socket("agent-255")
        assert len(os.fsencode(path)) <= local_directory.SOCKET_PATH_BYTES_MAX
        assert path.parent.is_dir()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.is_relative_to(directory.path) == (directory is shallow)
        directory.close()
    assert not path.parent.exists()


PARENT = """
import asyncio, sys
from pathlib import Path
from tensorhub.local.hub import LocalHub, ServiceCommands

def run(role):
    return (sys.executable, sys.argv[2], role, *sys.argv[3:])

up = LocalHub(Path(sys.argv[1]), agents=2, commands=ServiceCommands(run("registry"), run("planner"), run("agent")))
asyncio.run(up.run(lambda hub: print("ready", flush=True)))
print("stopped", flush=True)
"""


@pytest.fixture
def up_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`up` in a process of its own, once it is ready."""
    command = (sys.executable, "-c", PARENT, str(tmp_path), str(STUB))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_stops_all(up_process: subprocess.Popen[str], tmp_path: Path, number: int) -> None:
    hub = hub_file.read(tmp_path)
    up_process.send_signal(number)
    assert up_process.communicate(timeout=120)[0] == "stopped\n"
    assert up_process.returncode == 0
    assert not (tmp_path / "hub.json").exists()
    assert not any(is_alive(pid) for pid in pids_of(hub).values())


@pytest.mark.long
def test_killed_it_leaves_no_process_and_another_can_begin(up_process: subprocess.Popen[str], tmp_path: Path) -> None:
    hub = hub_file.read(tmp_path)
    up_process.kill()
    up_process.wait(60)
    wait_until(lambda: not any(is_alive(pid) for pid in pids_of(hub).values()), 5.0)

    async def again() -> HubFile:
        async with LocalHub(tmp_path, commands=stubs()) as up:
            return up.hub

    assert asyncio.run(again()).nats_pid != hub.nats_pid


def test_a_signal_during_the_start_stops_all(tmp_path: Path) -> None:
    """An agent never gets ready, and Ctrl-C comes while it is waited for."""
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(600)")
    command = (sys.executable, "-c", PARENT, str(tmp_path), str(silent))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(children_of(process.pid)) == 5)
        pids = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[0] == "stopped\n"
    assert not any(is_alive(pid) for pid in pids)
    assert not (tmp_path / "hub.json").exists()
