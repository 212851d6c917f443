"""A hub on a Ray cluster: who finds which agent, what comes back after a kill, and runners that come and go."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.bounds import BUSY_S, WAIT_S
from tests.chaos.rollout_exact import MODEL, SAMPLING, made
from tests.integrations.ray.two_nodes import TwoNodes, hub_on
from tests.kit.waiting import kill, wait_until

import tensorhub
from tensorhub.integrations.ray import RayHub, find_hub, start_hub
from tensorhub_common.auth.keys import SEED_PREFIX

pytestmark = pytest.mark.timeout(600)


def on(node: str, function: Any, *arguments: Any) -> Any:
    """Run a function in a task on a node."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(ray.remote(function).options(num_cpus=0, scheduling_strategy=where).remote(*arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def hub(cluster: TwoNodes, folder: Path) -> Iterator[RayHub]:
    with hub_on(folder) as running:
        yield running


def processes(hub: RayHub) -> dict[str, psutil.Process]:
    """Return the real processes of a hub, by what they are called, wherever they run on this machine."""
    mine = str(hub.control_directory.parent)
    found = {}
    for each in psutil.process_iter():
        try:
            environment, command = each.environ(), each.cmdline()
        except psutil.Error:
            continue
        if environment.get("TENSORHUB_DIR", "").startswith(mine) and any("tensorhub_" in part for part in command):
            found[environment.get("TENSORHUB_RUNNER_ID") or environment.get("TENSORHUB_AGENT_ID") or command[-1]] = each
    return found


def test_each_node_has_an_agent_and_a_runner_of_its_own(hub: RayHub) -> None:
    found = processes(hub)
    sockets = {found[f"agent-{number}"].environ()["TENSORHUB_SOCKET"] for number in range(2)}
    assert len(sockets) == 2
    for number in range(2):
        agent, runner = found[f"agent-{number}"].environ(), found[f"runner-{number}"].environ()
        assert runner["TENSORHUB_AGENT"] == agent["TENSORHUB_SOCKET"]
        assert runner["TENSORHUB_HOST"] == agent["TENSORHUB_HOST"]
    assert len({found[f"agent-{number}"].environ()["TENSORHUB_HOST"] for number in range(2)}) == 2
    assert len({*hub.runners().values()}) == 2


def test_a_worker_finds_the_agent_of_its_node(hub: RayHub, cluster: TwoNodes) -> None:
    """In tasks on two nodes: each has an agent of its own, which is not that of a runner, so it stays."""

    def agent_of_this_node() -> str:
        from tensorhub.integrations.ray import agent_here  # noqa: PLC0415 (it runs in another process)

        return str(agent_here())

    nodes = [each.node_id for each in cluster.cluster.worker_nodes]
    found = [on(node, agent_of_this_node) for node in nodes]
    assert len({*found}) == len(nodes)
    for node, socket in zip(nodes, found, strict=True):
        assert Path(socket).name == f"agent-{node[:12]}.sock"
    assert [on(node, agent_of_this_node) for node in nodes] == found, "the same the next time"


def test_keys_are_their_owners_alone_and_in_no_name(hub: RayHub, folder: Path) -> None:
    files = [*(folder / "nodes").rglob("*.nk")]
    assert {path.parent.name for path in files} >= {"agent-0", "agent-1", "runner-0", "runner-1"}
    seeds = {path.read_text() for path in files}
    assert all(seed.startswith(SEED_PREFIX) for seed in seeds)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    actors = str(ray.util.list_named_actors(all_namespaces=True))
    logs = "".join(path.read_text(errors="replace") for path in (folder / "nodes").rglob("*.log"))
    for seed in seeds:
        assert seed not in actors + logs
        for process in processes(hub).values():
            assert seed not in str([process.cmdline(), process.environ()])


def test_a_killed_process_is_back_on_its_node(hub: RayHub) -> None:
    """First the child of an actor, then an actor itself, with which its child goes."""
    before, at = processes(hub)["runner-1"], hub.runners()
    kill(before.pid)
    wait_until(lambda: processes(hub).get("runner-1", before) != before)
    child = processes(hub)["agent-1"]
    kill(child.parent().pid)
    wait_until(lambda: not child.is_running())
    wait_until(lambda: "agent-1" in processes(hub))
    assert hub.runners() == at


def test_a_killed_control_actor_comes_back_to_the_same_agents_and_versions(hub: RayHub) -> None:
    with hub.connect() as trainer:
        trainer.register("kept", {"w": made(1).lm_head.weight.detach().clone()}, replica="trainer").publish(7)
        before = processes(hub)
        control = before["tensorhub_registry"].parent()
        control.kill()
        wait_until(lambda: not before["tensorhub_registry"].is_running())
        wait_until(
            lambda: (
                processes(hub).get("tensorhub_registry", before["tensorhub_registry"]).pid
                != before["tensorhub_registry"].pid
            )
        )
        wait_until(lambda: [each.version for each in trainer.versions("kept", timeout_s=WAIT_S)] == [7])
    after = processes(hub)
    assert {name: after[name].pid for name in ("agent-0", "agent-1")} == {
        name: before[name].pid for name in ("agent-0", "agent-1")
    }
    assert {*hub.runners()} == {"runner-0", "runner-1"}


def test_the_same_name_is_the_same_hub(hub: RayHub) -> None:
    again = start_hub(runners=0)
    assert again.runners().keys() == hub.runners().keys()
    with pytest.raises(tensorhub.RegistryUnavailable, match="no hub called 'other' runs on this Ray cluster"):
        find_hub("other")


def test_what_a_hub_waits_for_is_named(cluster: TwoNodes, tmp_path: Path) -> None:
    with (
        pytest.raises(tensorhub.RegistryUnavailable, match=r"no node has .*'GPU': 1.* free"),
        hub_on(tmp_path, name="waits", runners=1, runner_resources={"GPU": 1}, timeout_s=BUSY_S + 10),
    ):
        pass
    assert not [name for name in ray.util.list_named_actors(all_namespaces=True) if "waits" in str(name)]


def test_runners_come_with_work_and_go_when_there_is_none(cluster: TwoNodes, tmp_path: Path) -> None:
    """The rollout manager's wish is followed, up to what there may be; one stays."""
    takes = {"CPU": 0.25}
    settings = {"TENSORHUB_RUNNER_SLOTS": "2", "TENSORHUB_ROLLOUT_SCALE_WINDOW_S": "2"}
    with (
        hub_on(tmp_path, name="scale", runners=1, runners_max=2, runner_resources=takes, environment=settings) as hub,
        hub.connect() as trainer,
    ):
        assert len(hub.runners()) == 1
        trainer.register(MODEL, made(1), replica="trainer").publish()
        rollouts = trainer.rollouts(MODEL, group_size=16, sampling=SAMPLING)
        rollouts.submit([tensorhub.Prompt([5, 6, 7 + number]) for number in range(4)])
        wait_until(lambda: len(hub.runners()) == 2)
        came = sum(len(batch.responses) for batch in _taken(rollouts))
        assert came == 64
        wait_until(lambda: len(hub.runners()) == 1)
        wait_until(lambda: len([name for name in processes(hub) if name.startswith("runner")]) == 1)


def _taken(rollouts: tensorhub.Rollouts) -> Iterator[tensorhub.Batch]:
    for batch in rollouts.batches(wait_s=WAIT_S):
        yield batch
        batch.done()
