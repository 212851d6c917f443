"""Arguments come before the environment, the environment before hub.json; where nothing is, it says what to do."""

from pathlib import Path

import pytest

from tensorhub._control import hub_file
from tensorhub._control.discovery import find_agent, find_nats, read_hub_file
from tensorhub._control.hub_file import AgentEntry, HubFile, NatsEntry, ProcessEntry
from tensorhub_common.config import settings
from tensorhub_common.errors import AgentUnavailable, InvalidName, RegistryUnavailable


def entry(index: int, host: str) -> AgentEntry:
    return AgentEntry(f"agent-{index}", 100 + index, f"/run/agent-{index}.sock", host, "site-0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    agents = [entry(0, "host-0"), entry(1, "host-1"), entry(2, "host-0")]
    hub = HubFile("nats://127.0.0.1:4222", 1, "/hub/client.nk", ProcessEntry(2), ProcessEntry(3), agents)
    hub_file.write(tmp_path, hub)
    return tmp_path


def found(directory: Path, agent: str | Path | None = None, **environ: str) -> str:
    environ = {f"TENSORHUB_{name}": value for name, value in environ.items()} | {"TENSORHUB_DIR": str(directory)}
    return str(find_agent(agent, settings.load(environ), environ))


def test_an_agent_by_argument(directory: Path) -> None:
    assert found(directory, "agent-1", AGENT="agent-2") == "/run/agent-1.sock"
    assert found(directory, "/tmp/a.sock") == "/tmp/a.sock"  # noqa: S108
    assert found(directory, Path("a.sock")) == str(Path.cwd() / "a.sock")


def test_an_agent_by_the_environment(directory: Path) -> None:
    assert found(directory, AGENT="agent-2") == "/run/agent-2.sock"
    assert found(directory, AGENT="./a.sock") == str(Path.cwd() / "a.sock")
    assert found(directory, SOCKET="/run/other.sock") == "/run/other.sock"


def test_the_first_agent_of_this_host(directory: Path) -> None:
    assert found(directory) == "/run/agent-0.sock"
    assert found(directory, HOST="host-1") == "/run/agent-1.sock"
    with pytest.raises(AgentUnavailable, match="its hosts are host-0, host-1"):
        found(directory, HOST="host-7")


def test_an_agent_that_is_not_there(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match="its agents are agent-0, agent-1, agent-2"):
        found(directory, "agent-7")
    with pytest.raises(InvalidName):
        found(directory, "agent 7")
    with pytest.raises(AgentUnavailable, match="tensorhub up"):
        found(tmp_path / "empty")
    with pytest.raises(AgentUnavailable, match="tensorhub up"):
        found(tmp_path / "empty", "agent-0")


def test_an_agent_without_a_hub_file(tmp_path: Path) -> None:
    """Started by hand with the settings' defaults, it stands where they say."""
    socket = tmp_path / "node-0.sock"
    socket.touch()
    assert found(tmp_path, HOST="node") == str(socket)
    assert found(tmp_path, "node-0") == str(socket)


def nats_of(directory: Path, nats: str | None = None, **environ: str) -> tuple[str, Path | None]:
    environ = {f"TENSORHUB_{name}": value for name, value in environ.items()} | {"TENSORHUB_DIR": str(directory)}
    address = find_nats(nats, settings.load(environ))
    return address.url, address.credentials


def test_nats(directory: Path, tmp_path: Path) -> None:
    assert nats_of(directory) == ("nats://127.0.0.1:4222", Path("/hub/client.nk"))
    assert nats_of(directory, CREDENTIALS="/c") == ("nats://127.0.0.1:4222", Path("/c"))
    assert nats_of(directory, NATS="nats://127.0.0.1:4222") == ("nats://127.0.0.1:4222", Path("/hub/client.nk"))
    assert nats_of(directory, NATS="nats://a:1") == ("nats://a:1", None)
    assert nats_of(directory, "nats://b:1", NATS="nats://a:1", CREDENTIALS="/c") == ("nats://b:1", Path("/c"))
    with pytest.raises(RegistryUnavailable, match="tensorhub up"):
        nats_of(tmp_path / "empty")


def test_a_cluster(tmp_path: Path) -> None:
    """All its nodes are named, and each of them is known to be the hub's, which decides over its key."""
    one, two = "nats://127.0.0.1:4222", "nats://127.0.0.1:4223"
    nodes = [NatsEntry(one, 1), NatsEntry(two, 4)]
    hub = HubFile(one, 1, "/hub/client.nk", ProcessEntry(2), ProcessEntry(3), [], nats_nodes=nodes)
    hub_file.write(tmp_path, hub)
    assert nats_of(tmp_path) == (f"{one},{two}", Path("/hub/client.nk"))
    assert nats_of(tmp_path, two) == (two, Path("/hub/client.nk"))
    assert nats_of(tmp_path, NATS=f"{two},{one}") == (f"{two},{one}", Path("/hub/client.nk"))
    assert nats_of(tmp_path, NATS=f"{one},nats://a:1") == (f"{one},nats://a:1", None)


def test_a_hub_file_that_is_none(tmp_path: Path) -> None:
    assert read_hub_file(tmp_path) is None
    (tmp_path / "hub.json").write_text("{")
    with pytest.raises(RegistryUnavailable, match="no hub file"):
        read_hub_file(tmp_path)
