"""A Ray cluster on this machine, of a head and nodes that take a runner each; one of them is killed in mid-job.

`python -m tests.integrations.ray.two_nodes --kills 5` says how long a hub takes to come up, and after a node is killed
how long its responses are without a token and when a runner is back on a new node.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray.cluster_utils import Cluster
from tests.bounds import WAIT_S
from tests.chaos.rollout_exact import CONFIG, GROUP_SIZE, MODEL, SAMPLING, Exactness, made
from tests.kit.tiny_engines import VOCABULARY, fill
from tests.kit.waiting import wait_until

import tensorhub
from tensorhub.integrations.ray import RayHub, start_hub

SLOT: Final = "slot"
"""A resource of which each node but the head has one, and a runner takes one."""
STORE_BYTES: Final = 80 << 20
STARTS_MAX: Final = 3
"""So often a cluster is begun where a busy machine lets a raylet wait too long."""
RESPONSES: Final = 48
EXECUTING_MIN: Final = 4
"""A node is killed while its runner makes the tokens of so many responses."""


class TwoNodes:
    """A head that takes no runner, and two nodes with names of their own, so that bytes between them go by UCX."""

    def __init__(self) -> None:
        sizes = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "head", **sizes})
        self._made = 0
        self.nodes = [self.add_node(), self.add_node()]
        ray.init(address=self.cluster.address, log_to_driver=False)

    def add_node(self) -> Any:
        """Have one more node join, and return it."""
        self._made += 1
        return self.cluster.add_node(
            num_cpus=2, resources={SLOT: 1}, node_name=f"node-{self._made}", object_store_memory=STORE_BYTES
        )

    def kill(self, node: str) -> None:
        """Kill a node's raylet and all of its processes at once, without a warning."""
        victim = next(each for each in self.cluster.worker_nodes if each.node_id == node)
        processes = [psutil.Process(each.process.pid) for each in _started(victim)]
        processes += [child for each in processes for child in each.children(recursive=True)]
        for each in processes:
            each.send_signal(signal.SIGKILL)
        self.cluster.worker_nodes.discard(victim)

    def close(self) -> None:
        """End the driver and all nodes."""
        ray.shutdown()
        self.cluster.shutdown()


def _started(node: Any) -> list[Any]:
    return [info for infos in node.all_processes.values() for info in infos]


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    for attempt in range(STARTS_MAX):
        try:
            cluster = TwoNodes()
            break
        except Exception as why:  # noqa: BLE001 (Ray raises no other where a raylet takes longer than its 30 s)
            print(f"the cluster did not start ({why}), attempt {attempt + 1}")
    else:
        raise AssertionError(f"no Ray cluster came up in {STARTS_MAX} attempts")
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def hub_on(folder: Path, **more: Any) -> Iterator[RayHub]:
    """Have a hub with a runner on each of the two nodes."""
    model = folder / "my-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    given: dict[str, Any] = {"runners": 2, "runner_resources": {"CPU": 1, SLOT: 1}, "timeout_s": WAIT_S, **more}
    with start_hub(model=model, directory=folder / "nodes", **given) as hub:
        yield hub


@dataclass
class Killed:
    """What became of a job of which a node was killed."""

    found: Exactness = field(default_factory=Exactness)
    dead: str = ""
    """The runner of the node that was killed."""
    first_tokens_s: list[float] = field(default_factory=list)
    """From the kill to the next token, of each response that went on elsewhere."""
    back_s: float = 0.0
    """From the arrival of a new node to a runner that serves there."""


def kill_a_node(cluster: TwoNodes, hub: RayHub) -> Killed:
    """Generate while a version comes, kill a node, have another one join, and take all responses."""
    killed = Killed(dead="runner-1")
    with hub.connect() as trainer:
        module = made(1)
        weights = trainer.register(MODEL, module, replica="trainer")
        weights.publish()
        rollouts = trainer.rollouts(MODEL, group_size=GROUP_SIZE, sampling=SAMPLING, staleness=1000, policy="rlboost")
        wait_until(lambda: _serving(rollouts) == {"runner-0", "runner-1"})
        groups = rollouts.submit([_prompt(number) for number in range(RESPONSES // GROUP_SIZE)])
        wait_until(lambda: _executing(rollouts, killed.dead) >= EXECUTING_MIN)
        with weights.overwriting(publish=True):
            fill(module, 2)
        wait_until(lambda: _executing(rollouts, killed.dead) >= EXECUTING_MIN)
        node = hub.runners()[killed.dead]
        assert node is not None
        cluster.kill(node)
        killed.first_tokens_s = _first_tokens(rollouts, groups, killed.dead, time.monotonic())
        cluster.add_node()
        joined = time.monotonic()
        for batch in rollouts.batches(wait_s=WAIT_S):
            killed.found.responses += batch.responses
            batch.done()
        wait_until(lambda: _serving(rollouts) == {"runner-0", "runner-1"} and hub.runners()[killed.dead] != node)
        killed.back_s = time.monotonic() - joined
    killed.found.compare()
    return killed


def _prompt(number: int) -> tensorhub.Prompt:
    return tensorhub.Prompt([4 + (7 * number + at) % (VOCABULARY - 4) for at in range(12)], id=f"p{number}")


def _serving(rollouts: tensorhub.Rollouts) -> set[str]:
    return {each.runner for each in rollouts.status().instances if each.state == "serving"}


def _executing(rollouts: tensorhub.Rollouts, runner: str) -> int:
    return sum(each.executing for each in rollouts.status().instances if each.runner == runner)


def _first_tokens(rollouts: tensorhub.Rollouts, groups: Sequence[str], dead: str, killed_at: float) -> list[float]:
    """Wait until each response that the dead runner had makes tokens elsewhere; return when, from the kill."""

    def looked() -> list[float | None]:
        found: list[float | None] = []
        for group in groups:
            answer = rollouts.why(group)
            now = time.monotonic()
            for request in answer.requests:
                at_dead = [at for at, each in enumerate(request.attempts) if each.instance == dead and each.tokens_to]
                following = request.attempts[at_dead[-1] + 1 :] if at_dead else ()
                made_s = [now - each.placed_s_ago + each.first_token_s for each in following if each.first_token_s]
                if made_s:
                    found.append(made_s[0] - killed_at)
                elif at_dead and request.state != "ended":
                    found.append(None)
        return found

    wait_until(lambda: all(each is not None for each in looked()))
    # What had moved before the kill was made before it.
    return [each for each in looked() if each is not None and each > 0]


def main() -> None:
    """Kill a node of a new cluster again and again, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    ups, firsts, medians, backs, wrong = [], [], [], [], 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as folder, two_nodes() as cluster:
            began = time.monotonic()
            with hub_on(Path(folder)) as hub:
                ups.append(time.monotonic() - began)
                killed = kill_a_node(cluster, hub)
        medians.append(statistics.median(killed.first_tokens_s))
        firsts += killed.first_tokens_s
        backs.append(killed.back_s)
        wrong += len(killed.found.wrongs) + (len(killed.found.responses) != RESPONSES)
        print(f"up in {ups[-1]:.1f} s, next tokens after {medians[-1]:.2f} s, back in {backs[-1]:.1f} s", flush=True)
    print(
        f"{kills} nodes killed, {len(firsts)} responses moved, {wrong} wrong; hub up in "
        f"{statistics.median(ups):.1f} s; "
        f"next token elsewhere after {statistics.median(firsts):.2f} s, at most {max(firsts):.2f} s; "
        f"a runner serves on a new node after {statistics.median(backs):.1f} s (medians)"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
