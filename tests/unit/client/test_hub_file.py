"""`hub.json`: whole or absent, for its owner alone, with exactly the stated keys."""

import json
import stat
from pathlib import Path

import pytest

from tensorhub._control import hub_file
from tensorhub._control.hub_file import AgentEntry, HubFile, NatsEntry, ProcessEntry, RegistryEntry
from tensorhub_common.errors import RegistryUnavailable

HUB = HubFile(
    nats="nats://tensorhub:secret@127.0.0.1:4222",
    nats_pid=1,
    credentials="/hub/credentials/client.nk",
    registry=ProcessEntry(2),
    planner=ProcessEntry(3),
    agents=[AgentEntry("agent-0", 4, "/tmp/agent-0.sock", "host-0", "site-0")],  # noqa: S108
    registries=[RegistryEntry("registry-0", 2), RegistryEntry("registry-1", 5)],
    nats_nodes=[
        NatsEntry("nats://tensorhub:secret@127.0.0.1:4222", 1),
        NatsEntry("nats://tensorhub:secret@127.0.0.1:4223", 6),
    ],
)


def changed(folder: Path, **keys: object) -> None:
    """Write the hub's file with other keys; None leaves one out."""
    hub_file.write(folder, HUB)
    told = json.loads((folder / "hub.json").read_text()) | keys
    (folder / "hub.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def test_it_reads_as_it_was_written(tmp_path: Path) -> None:
    hub_file.write(tmp_path, HUB)
    assert hub_file.read(tmp_path) == HUB


def test_its_keys_are_as_documented(tmp_path: Path) -> None:
    hub_file.write(tmp_path, HUB)
    assert json.loads((tmp_path / "hub.json").read_text()) == {
        "nats": "nats://tensorhub:secret@127.0.0.1:4222",
        "nats_pid": 1,
        "credentials": "/hub/credentials/client.nk",
        "registry": {"pid": 2},
        "planner": {"pid": 3},
        "agents": [
            {"id": "agent-0", "pid": 4, "socket": "/tmp/agent-0.sock", "host": "host-0", "site": "site-0"}  # noqa: S108
        ],
        "registries": [{"id": "registry-0", "pid": 2}, {"id": "registry-1", "pid": 5}],
        "nats_nodes": [
            {"url": "nats://tensorhub:secret@127.0.0.1:4222", "pid": 1},
            {"url": "nats://tensorhub:secret@127.0.0.1:4223", "pid": 6},
        ],
        "format": 1,
    }


def test_what_a_newer_release_has_added_is_passed_over(tmp_path: Path) -> None:
    changed(tmp_path, later=1, rollout={"pid": 9})
    assert hub_file.read(tmp_path) == HUB


def test_a_newer_form_is_refused_in_words(tmp_path: Path) -> None:
    changed(tmp_path, format=2)
    with pytest.raises(RegistryUnavailable, match=r"of a newer release .*use the programs of the release"):
        hub_file.read(tmp_path)


def test_one_that_was_written_before_there_were_several_nodes_is_read(tmp_path: Path) -> None:
    changed(tmp_path, registries=None, nats_nodes=None)
    hub = hub_file.read(tmp_path)
    assert hub.nats_all == hub.nats
    assert hub.is_at(hub.nats)
    assert hub.pids == {"nats": 1, "registry-0": 2, "planner-0": 3, "agent-0": 4}


def test_its_addresses() -> None:
    first, second = (node.url for node in HUB.nats_nodes)
    assert HUB.nats_all == f"{first},{second}"
    assert HUB.is_at(second)
    assert HUB.is_at(f"{second}, {first}")
    assert not HUB.is_at(f"{first},nats://elsewhere:4222")
    assert HUB.pids == {"nats-0": 1, "nats-1": 6, "registry-0": 2, "registry-1": 5, "planner-0": 3, "agent-0": 4}


def test_only_its_owner_may_read_it_whatever_stood_there_before(tmp_path: Path) -> None:
    (tmp_path / "hub.json").write_text("{}")
    (tmp_path / "hub.json").chmod(0o644)
    hub_file.write(tmp_path, HUB)
    assert stat.S_IMODE((tmp_path / "hub.json").stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["hub.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_file.write(tmp_path, HUB)

    def no_room(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", no_room)
    with pytest.raises(OSError, match="no space"):
        hub_file.write(tmp_path, HUB)
    monkeypatch.undo()
    assert hub_file.read(tmp_path) == HUB
    assert [each.name for each in tmp_path.iterdir()] == ["hub.json"]


def test_removing_twice_is_removing_once(tmp_path: Path) -> None:
    hub_file.write(tmp_path, HUB)
    hub_file.remove(tmp_path)
    hub_file.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_hub_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RegistryUnavailable, match="tensorhub up"):
        hub_file.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"nats": 1}', "\xff"])
def test_what_is_no_hub_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "hub.json").write_text(text, encoding="latin-1")
    with pytest.raises(RegistryUnavailable, match="no hub file"):
        hub_file.read(tmp_path)


def test_a_file_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "hub.json").mkdir()
    with pytest.raises(RegistryUnavailable, match="can't be read"):
        hub_file.read(tmp_path)
