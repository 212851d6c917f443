"""A whole hub on one machine, with stubs in place of the services: up, kept up, and gone without a trace."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.kit.waiting import children_of, is_alive, kill, until, wait_until

from tensorhub._control import hub_file
from tensorhub._control.hub_file import HubFile
from tensorhub.local import directory as local_directory
from tensorhub.local.children import ChildDied
from tensorhub.local.directory import HubDirectory, HubDirInUse, HubDirUnusable, OtherNodes
from tensorhub.local.hub import LocalHub, ServiceCommands
from tensorhub.local.nats_server import LISTEN
from tensorhub_common.auth.keys import make_key
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.errors import TensorHubError
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.protocol.subjects import command_subject

STUB = Path(__file__).with_name("stub_service.py")


def stubs(*failing: str) -> ServiceCommands:
    def run(role: str) -> tuple[str, ...]:
        return (sys.executable, str(STUB), role, *failing)

    return ServiceCommands(registry=run("registry"), planner=run("planner"), agent=run("agent"))


def local_hub(directory: Path, agents: int = 1, *failing: str, **options: Any) -> LocalHub:
    return LocalHub(directory, agents, commands=stubs(*failing), **options)


@asynccontextmanager
async def admin_bus(up: LocalHub, directory: Path) -> AsyncIterator[Bus]:
    """Connect as an administrator. The nodes of a cluster take a while to agree who answers for JetStream."""
    key = directory / "credentials/admin.nk"
    async with await connect(up.hub.nats_all, name="test", credentials=key, timeout_s=WAIT_S) as bus:
        yield bus


async def killed(directory: Path, before: HubFile, name: str) -> HubFile:
    kill(before.pids[name])
    await until(lambda: hub_file.read(directory).pids[name] != before.pids[name])
    hub = hub_file.read(directory)
    assert {each for each in hub.pids if hub.pids[each] != before.pids[each]} == {name}
    assert hub.nats_all == before.nats_all
    async with await connect(hub.nats_all, name="test", credentials=hub.credentials, timeout_s=WAIT_S) as bus:

        async def answers(process: str, pid: int) -> bool:
            pong = await ping(bus, process)
            return pong is not None and pong.pid == pid

        for process, pid in hub.pids.items():
            if not process.startswith("nats"):
                await until(lambda process=process, pid=pid: answers(process, pid))  # type: ignore[misc]
    return hub


@pytest.mark.long
async def test_it_brings_up_what_it_says(tmp_path: Path) -> None:
    """Also in a folder with letters of any language: NATS reads its paths from a file that knows fewer escapes."""
    folder = tmp_path / 'a "höb" 重み 🎉'
    hub_json = folder / "hub.json"
    folder.mkdir()
    hub_json.write_text("of an earlier hub that was killed")
    environment = dict(os.environ) | {"TENSORHUB_CREDENTIALS": "/of/another/hub", "TENSORHUB_BEAT_S": "0.25"}
    async with local_hub(folder, 3, hosts=2, racks=1, site="berlin", environment=environment) as started:
        assert (folder / "nats" / "store").is_dir()
        assert started.hub == hub_file.read(folder)
        assert stat.S_IMODE(hub_json.stat().st_mode) == 0o600
        hub = started.hub
        assert all(is_alive(pid) for pid in hub.pids.values())
        assert [(agent.id, agent.host, agent.rack, agent.site) for agent in hub.agents] == [
            (f"agent-{number}", f"host-{number % 2}", "rack-0", "berlin") for number in range(3)
        ]
        assert json.loads((folder / "agent-2.env.json").read_text()) == {
            "TENSORHUB_NATS": hub.nats,
            "TENSORHUB_CREDENTIALS": str(folder / "credentials/agents/agent-2.nk"),
            "TENSORHUB_WORKER_CREDENTIALS": str(folder / "credentials/client.nk"),
            "TENSORHUB_DIR": str(folder),
            "TENSORHUB_SHM_DIR": os.environ["TENSORHUB_SHM_DIR"],
            "TENSORHUB_AGENT_ID": "agent-2",
            "TENSORHUB_HOST": "host-0",
            "TENSORHUB_UCXX": "on",
            "TENSORHUB_RACK": "rack-0",
            "TENSORHUB_SITE": "berlin",
            "TENSORHUB_SOCKET": hub.agents[2].socket,
            "TENSORHUB_STATE_DIR": str(folder / "state" / "agent-2"),
            "TENSORHUB_BEAT_S": "0.25",
        }
        async with await connect(hub.nats, name="test", credentials=hub.credentials) as bus:
            pong = await ping(bus, "agent-1")
            assert pong is not None
            assert (pong.id, pong.pid, pong.role) == ("agent-1", hub.agents[1].pid, "agent")
    assert not hub_json.exists()
    assert not any(is_alive(pid) for pid in hub.pids.values())


@pytest.mark.long
async def test_no_client_without_a_key_gets_in(tmp_path: Path) -> None:
    """Keys are their owner's alone, the server is told none of their secret halves, and they outlive the hub."""
    keys = ("registry.nk", "planner.nk", "rollout.nk", "client.nk", "admin.nk", "agents/agent-0.nk")
    foreign = tmp_path / "foreign"
    make_key(foreign)
    secrets: list[dict[str, str]] = []
    for _ in range(2):
        async with local_hub(tmp_path / "hub") as up:
            for credentials in (None, foreign):
                with pytest.raises(TensorHubError, match="refuses the credentials"):
                    await connect(up.hub.nats, name="other", credentials=credentials)
            secrets.append({key: (tmp_path / "hub/credentials" / key).read_text() for key in keys})
            for key, secret in secrets[-1].items():
                files = [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]
                holders = [path for path in files if secret in path.read_text(errors="replace")]
                assert [str(path.relative_to(tmp_path / "hub/credentials")) for path in holders] == [key]
                assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert secrets[0] == secrets[1]


@pytest.mark.long
async def test_whatever_is_killed_comes_back_and_nats_on_its_port_and_store(tmp_path: Path) -> None:
    async with local_hub(tmp_path, 2) as up:
        async with admin_bus(up, tmp_path) as bus:
            log = await open_job(bus, "job")
            assert await log.append(command_subject("job", "publish"), b"", "m") == 1
        hub = up.hub
        for name in ("agent-1", "registry-0", "planner-0", "nats"):
            hub = await killed(tmp_path, hub, name)
    async with local_hub(tmp_path, 2) as up, admin_bus(up, tmp_path) as bus:
        assert await JobLog(bus, "job").last_seq() == 1, "the log outlives the hub, too"


@pytest.mark.slow
async def test_three_nodes_and_two_registries(tmp_path: Path) -> None:
    async with local_hub(tmp_path, registries=2, nats_nodes=3) as up:
        hub = up.hub
        assert [entry.id for entry in hub.registries] == ["registry-0", "registry-1"]
        first = hub.registries[0].pid, hub.nats_nodes[0].url, hub.nats_nodes[0].pid
        assert (hub.registry.pid, hub.nats, hub.nats_pid) == first
        for name in ("registry-0", "registry-1", "agent-0"):
            seen = json.loads((tmp_path / f"{name}.env.json").read_text())
            assert seen["TENSORHUB_NATS"] == hub.nats_all
            assert seen.get("TENSORHUB_LOG_REPLICAS") == ("3" if name.startswith("registry") else None)
        async with admin_bus(up, tmp_path) as bus:
            log = await open_job(bus, "job", 3)
            assert await log.append(command_subject("job", "publish"), b"", "m") == 1
        for name in ("nats-1", "registry-1"):
            hub = await killed(tmp_path, hub, name)
    with pytest.raises(OtherNodes, match=r"3 NATS node\(s\), and 1 are wanted: start it with --nats-nodes 3"):
        await local_hub(tmp_path).start()
    async with local_hub(tmp_path, nats_nodes=3) as up, admin_bus(up, tmp_path) as bus:
        assert await JobLog(bus, "job").last_seq() == 1


@pytest.mark.long
async def test_two_can_not_share_a_directory(tmp_path: Path) -> None:
    """The second learns which process uses it, and takes nothing from the first."""
    async with local_hub(tmp_path) as first:
        second = local_hub(tmp_path)
        with pytest.raises(HubDirInUse, match=rf"process {os.getpid()}\) uses {tmp_path}"):
            await second.start()
        await second.stop()
        assert hub_file.read(tmp_path) == first.hub
        assert all(is_alive(pid) for pid in first.hub.pids.values())
    async with local_hub(tmp_path):
        pass


@pytest.mark.long
async def test_a_service_that_dies_at_its_start_is_reported_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is one that never says that it is ready."""
    before = children_of(os.getpid())
    with pytest.raises(ChildDied, match=r"(?s)agent-1 ended with exit code 1.*agent-1 has no GPU"):
        await local_hub(tmp_path, 2, "agent-1").start()
    assert not (tmp_path / "hub.json").exists()
    monkeypatch.setattr("tensorhub.local.hub.READY_TIMEOUT_S", 1.0)
    silent = ServiceCommands(stubs().registry, stubs().planner, (sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(TensorHubError, match=r"agent-0 did not say within 1 s "):
        await LocalHub(tmp_path, commands=silent).start()
    assert children_of(os.getpid()) == before
    monkeypatch.undo()
    async with local_hub(tmp_path, 2):
        pass


async def test_nats_that_can_not_start_is_reported(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "store").write_text("a file where the store should be")
    with pytest.raises(ChildDied, match=r"(?s)nats ended.*not a directory"):
        await local_hub(tmp_path).start()


async def test_a_folder_that_can_not_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(HubDirUnusable, match=r"can't be kept in .*file: .*take another --dir"):
        await local_hub(tmp_path / "file").start()


@pytest.mark.parametrize(
    "options",
    [
        *({"agents": agents, "hosts": hosts} for agents, hosts in ((-1, 1), (1, 0), (1, 2), (257, 1))),
        *({"registries": each} for each in (0, 17)),
        *({"nats_nodes": each} for each in (0, 2, 4)),
    ],
    ids=str,
)
def test_numbers_that_make_no_hub_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not possible"):
        LocalHub(tmp_path, **options)  # type: ignore[arg-type]


def test_sockets_move_to_a_short_path_where_the_directory_is_too_deep(tmp_path: Path) -> None:
    # The folder of a test may itself be nearly too deep.
    shallow, deep = HubDirectory(tmp_path.parent / "s"), HubDirectory(tmp_path / "/".join(["d" * 40] * 3))
    for directory in (shallow, deep):
        directory.open()
        path = directory.socket("agent-255")
        assert len(os.fsencode(path)) <= local_directory.SOCKET_PATH_BYTES_MAX
        assert path.parent.is_dir()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.is_relative_to(directory.path) == (directory is shallow)
        directory.close()
    assert not path.parent.exists()


def test_where_an_agent_listens_can_be_told_without_the_directory(tmp_path: Path) -> None:
    """By a process beside it, also before the directory is there."""
    for folder in (tmp_path / "a", tmp_path / "/".join(["d" * 40] * 3)):
        told = HubDirectory(folder).socket_path("agent-0123456789ab")
        assert not told.parent.exists()
        owner = HubDirectory(folder)
        owner.open()
        assert owner.socket("agent-0123456789ab") == told
        owner.close()


@pytest.mark.long
async def test_agents_elsewhere_are_let_in_as_they_come(tmp_path: Path) -> None:
    """Each with a key of its own, and no connection ends for it; another life at the same port lets them in too."""
    agents = [User(Role.AGENT, f"agent-{number}") for number in range(2)]
    with socket.create_server((LISTEN, 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        async with local_hub(tmp_path / "hub", 0, port=port) as up, admin_bus(up, tmp_path / "hub") as bus:
            assert up.hub.agents == []
            assert up.nats == f"nats://{LISTEN}:{port}"
            for agent in agents:
                (key,) = (await up.admit([agent])).values()
                own = tmp_path / "own.nk"
                own.write_bytes(key)
                async with await connect(up.nats, name="test", credentials=own):
                    pass
            assert bus.lost_count == 0
            assert (await up.admit(agents))[agents[1]] == key, "it stays the same"


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
    assert not any(is_alive(pid) for pid in hub.pids.values())


@pytest.mark.long
def test_killed_it_leaves_no_process_and_another_can_begin(up_process: subprocess.Popen[str], tmp_path: Path) -> None:
    hub = hub_file.read(tmp_path)
    up_process.kill()
    up_process.wait(60)
    wait_until(lambda: not any(is_alive(pid) for pid in hub.pids.values()))

    async def again() -> HubFile:
        async with local_hub(tmp_path) as up:
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
