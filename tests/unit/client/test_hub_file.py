"""`hub.json`, and what is found by it: arguments come before the environment, and the environment before the file."""

import json
import re
import stat
from pathlib import Path

import pytest

from tensorhub._control import hub_file
from tensorhub._control.discovery import find_agent, find_nats, read_hub_file
from tensorhub._control.hub_file import AgentEntry, HubFile, NatsEntry, ProcessEntry, RegistryEntry, RunnerEntry
from tensorhub_common.config import settings
from tensorhub_common.errors import AgentUnavailable, InvalidName, RegistryUnavailable

ONE, TWO = "nats://tensorhub:secret@127.0.0.1:4222", "nats://tensorhub:secret@127.0.0.1:4223"
HUB = HubFile(
    nats=ONE,
    nats_pid=1,
    credentials="/hub/client.nk",
    registry=ProcessEntry(2),
    planner=ProcessEntry(3),
    agents=[
        AgentEntry(f"agent-{n}", 10 + n, f"/run/agent-{n}.sock", host, "site-0")
        for n, host in enumerate(("host-0", "host-1", "host-0"))
    ],
    registries=[RegistryEntry("registry-0", 2), RegistryEntry("registry-1", 5)],
    nats_nodes=[NatsEntry(ONE, 1), NatsEntry(TWO, 6)],
    rollout=ProcessEntry(7),
    rollout_managers=[RegistryEntry("rollout-0", 7)],
    runners=[RunnerEntry("runner-0", 8, "torch", "agent-0", "runner-0")],
)
AGENTS = {"agent-0": 10, "agent-1": 11, "agent-2": 12}
ROLLOUTS = {"rollout-0": 7, "runner-0": 8}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    hub_file.write(tmp_path, HUB)
    return tmp_path


def change(folder: Path, **keys: object) -> None:
    """Write other keys; None leaves one out."""
    told = json.loads((folder / "hub.json").read_text()) | keys
    (folder / "hub.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def test_it_reads_as_it_was_written_with_its_keys_as_documented(directory: Path) -> None:
    assert hub_file.read(directory) == HUB
    told = json.loads((directory / "hub.json").read_text())
    assert told.pop("agents")[1] == {
        "id": "agent-1",
        "pid": 11,
        "socket": "/run/agent-1.sock",
        "host": "host-1",
        "site": "site-0",
    }
    assert told == {
        "nats": ONE,
        "nats_pid": 1,
        "credentials": "/hub/client.nk",
        "registry": {"pid": 2},
        "planner": {"pid": 3},
        "registries": [{"id": "registry-0", "pid": 2}, {"id": "registry-1", "pid": 5}],
        "nats_nodes": [{"url": ONE, "pid": 1}, {"url": TWO, "pid": 6}],
        "rollout": {"pid": 7},
        "rollout_managers": [{"id": "rollout-0", "pid": 7}],
        "runners": [{"id": "runner-0", "pid": 8, "engine": "torch", "agent": "agent-0", "replica": "runner-0"}],
        "format": 1,
    }
    assert HUB.nats_all == f"{ONE},{TWO}"
    assert [HUB.is_at(url) for url in (TWO, f"{TWO}, {ONE}", f"{ONE},nats://elsewhere:4222")] == [True, True, False]
    services = {"nats-0": 1, "nats-1": 6, "registry-0": 2, "registry-1": 5, "planner-0": 3}
    assert HUB.pids == {**services, **AGENTS, **ROLLOUTS}


def test_files_of_other_releases(directory: Path) -> None:
    """What a newer one has added is passed over, its other form is refused; an older one had one node of each."""
    change(directory, later=1, gateway={"pid": 9})
    assert hub_file.read(directory) == HUB
    change(directory, registries=None, nats_nodes=None)
    hub = hub_file.read(directory)
    assert hub.nats_all == hub.nats
    assert hub.is_at(hub.nats)
    assert hub.pids == {"nats": 1, "registry-0": 2, "planner-0": 3, **AGENTS, **ROLLOUTS}
    change(directory, format=2)
    with pytest.raises(RegistryUnavailable, match=r"of a newer release .*use the programs of the release"):
        hub_file.read(directory)


def test_it_is_whole_or_absent_and_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub.json").write_text("{}")
    (tmp_path / "hub.json").chmod(0o644)
    hub_file.write(tmp_path, HUB)
    assert stat.S_IMODE((tmp_path / "hub.json").stat().st_mode) == 0o600

    def no_room(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", no_room)
    with pytest.raises(OSError, match="no space"):
        hub_file.write(tmp_path, HUB)
    monkeypatch.undo()
    assert hub_file.read(tmp_path) == HUB
    assert [each.name for each in tmp_path.iterdir()] == ["hub.json"]
    for _ in range(2):
        hub_file.remove(tmp_path)
        assert list(tmp_path.iterdir()) == []
    assert read_hub_file(tmp_path) is None
    with pytest.raises(RegistryUnavailable, match="tensorhub up"):
        hub_file.read(tmp_path)
    for text in ("", "{", "{}", "[1]", '{"nats": 1}', "\xff"):
        (tmp_path / "hub.json").write_text(text, encoding="latin-1")
        with pytest.raises(RegistryUnavailable, match="no hub file"):
            read_hub_file(tmp_path)
    hub_file.remove(tmp_path)
    (tmp_path / "hub.json").mkdir()
    with pytest.raises(RegistryUnavailable, match="can't be read"):
        hub_file.read(tmp_path)


# ------------------------------------------------------------------------------------------------------- what is found


def loaded(directory: Path, environ: dict[str, str]) -> tuple[settings.Settings, dict[str, str]]:
    environ = {f"TENSORHUB_{name}": value for name, value in environ.items()} | {"TENSORHUB_DIR": str(directory)}
    return settings.load(environ), environ


def found(directory: Path, agent: str | Path | None = None, **environ: str) -> str:
    return str(find_agent(agent, *loaded(directory, environ)))


@pytest.mark.parametrize(
    ("agent", "environ", "path"),
    [
        ("agent-1", {"AGENT": "agent-2"}, "/run/agent-1.sock"),
        ("/a.sock", {}, "/a.sock"),
        (Path("a.sock"), {}, str(Path.cwd() / "a.sock")),
        (None, {"AGENT": "agent-2"}, "/run/agent-2.sock"),
        (None, {"AGENT": "./a.sock"}, str(Path.cwd() / "a.sock")),
        (None, {"SOCKET": "/run/other.sock"}, "/run/other.sock"),
        (None, {}, "/run/agent-0.sock"),
        (None, {"HOST": "host-1"}, "/run/agent-1.sock"),
    ],
)
def test_an_agent(directory: Path, agent: str | Path | None, environ: dict[str, str], path: str) -> None:
    assert found(directory, agent, **environ) == path


def test_an_agent_that_is_not_there_or_was_started_by_hand(directory: Path) -> None:
    empty = directory / "empty"
    for told, place, agent, host in (
        ("its hosts are host-0, host-1", directory, None, "host-7"),
        ("its agents are agent-0, agent-1, agent-2", directory, "agent-7", "host-0"),
        ("tensorhub up", empty, None, "host-0"),
        ("tensorhub up", empty, "agent-0", "host-0"),
    ):
        with pytest.raises(AgentUnavailable, match=told):
            found(place, agent, HOST=host)
    with pytest.raises(InvalidName):
        found(directory, "agent 7")
    empty.mkdir()
    (empty / "node-0.sock").touch()
    assert found(empty, HOST="node") == found(empty, "node-0") == str(empty / "node-0.sock")


@pytest.mark.parametrize(
    ("nats", "environ", "url", "key"),
    [
        (None, {}, f"{ONE},{TWO}", "/hub/client.nk"),
        (None, {"CREDENTIALS": "/c"}, f"{ONE},{TWO}", "/c"),
        (None, {"NATS": ONE}, ONE, "/hub/client.nk"),
        (TWO, {}, TWO, "/hub/client.nk"),
        (None, {"NATS": f"{TWO},{ONE}"}, f"{TWO},{ONE}", "/hub/client.nk"),
        (None, {"NATS": f"{ONE},nats://a:1"}, f"{ONE},nats://a:1", None),
        (None, {"NATS": "nats://a:1"}, "nats://a:1", None),
        ("nats://b:1", {"NATS": "nats://a:1", "CREDENTIALS": "/c"}, "nats://b:1", "/c"),
    ],
)
def test_nats_and_its_key(
    directory: Path, nats: str | None, environ: dict[str, str], url: str, key: str | None
) -> None:
    address = find_nats(nats, loaded(directory, environ)[0])
    assert (address.url, address.credentials) == (url, Path(key) if key else None)
    with pytest.raises(RegistryUnavailable, match=re.escape("tensorhub up")):
        find_nats(None, loaded(directory / "empty", {})[0])
