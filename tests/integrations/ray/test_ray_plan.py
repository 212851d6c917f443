"""What a hub on Ray may be, and what is removed of nodes that are no more."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.leftovers import memory_of

from tensorhub.integrations.ray import start_hub
from tensorhub.integrations.ray.node_process import NODE_FILE, free_lost_nodes
from tensorhub.integrations.ray.plan import CONFIG_BYTES_MAX, agent_of, resource_options, runner_of
from tensorhub.local.directory import HubDirectory
from tensorhub_common.config import settings
from tensorhub_common.config.segment_names import segment_beginning
from tensorhub_common.errors import InvalidName


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runners": 2, "runners_max": 1}, "2 to 1 runners are not possible"),
        ({"runners": 257, "engine": "my_engine:load"}, "257 to 257 runners are not possible"),
        ({"runners": 1}, "runners of torch need a model"),
        ({"runners": 0, "model": "nowhere"}, "nowhere/config.json can't be read"),
        ({"runners": 0, "runner_resources": {}}, "runner_resources={} is nothing that a placement group holds"),
        ({"runners": 0, "agent_resources": {"CPU": 0}}, "agent_resources={'CPU': 0} is nothing"),
    ],
)
def test_what_can_not_be_is_said_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        start_hub(**given)


def test_a_name_that_can_not_be_one_is_refused() -> None:
    with pytest.raises(InvalidName):
        start_hub("no name", runners=0)


def test_a_file_that_is_no_configuration_goes_to_no_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (CONFIG_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        start_hub(runners=1, model=tmp_path)


def test_resources_are_told_to_ray_as_it_takes_them() -> None:
    assert resource_options({"CPU": 2, "GPU": 0.5, "memory": 8, "slot": 1}) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 8,
        "resources": {"slot": 1},
    }
    assert resource_options({}) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    assert (agent_of("runner-7"), runner_of("agent-7"), runner_of("runner-7")) == ("agent-7", "runner-7", "runner-7")


def test_what_lost_nodes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Of nodes that live, and of processes that still run, nothing is touched; nor is the folder of NATS."""
    shm = settings.load(os.environ).shm_dir
    nodes = {"agent-0": "lost", "agent-1": "alive", "agent-2": "lost", "control": None}
    for name, node in nodes.items():
        folder = tmp_path / name
        folder.mkdir()
        if node is not None:
            (folder / NODE_FILE).write_text(node)
        (shm / f"{segment_beginning(folder)}{name}-1.seg").write_bytes(b"weights")
    running = HubDirectory(tmp_path / "agent-2")
    running.open()
    free_lost_nodes(tmp_path, {"alive"}, shm)
    left = {name for name in nodes if (tmp_path / name).exists()}
    assert left == {"agent-1", "agent-2", "control"}
    assert {name for name in nodes if memory_of(tmp_path / name)} == left
    running.close()
    free_lost_nodes(tmp_path, set(), shm)
    assert {name for name in nodes if (tmp_path / name).exists()} == {"control"}
    for path in memory_of(tmp_path / "control"):
        path.unlink()
