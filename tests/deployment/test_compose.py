"""docker-compose.yml in a Docker engine: built, up, a training run, down and up again with the catalog intact.

`make compose` runs these. `COMPOSE_FILE` may add files of the caller's own, for a build that needs a proxy or an index.
Jaeger is left out where its image can't be had: nothing else depends on it.
"""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HUB = ["nats", "registry", "planner", "agent-0", "agent-1"]
JAEGER = "jaeger"
COMMAND_S_MAX = 1200.0
SHORT = ("--seconds", "20")
HEAVY = ("torch", "numpy", "cupy", "ucxx", "libucx")


def missing() -> str | None:
    """Return why there is nothing to run this with, or None."""
    if shutil.which("docker") is None:
        return "docker is not installed here"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return f"'{' '.join(command)}' fails here"
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


class Compose:
    """The project of this test, beside one that may run already."""

    def __init__(self) -> None:
        self._environ = dict(os.environ) | {
            "COMPOSE_PROJECT_NAME": f"tensorhub-test-{os.getpid()}",
            "TENSORHUB_NATS_PORT": str(free_port()),
            "TENSORHUB_JAEGER_PORT": str(free_port()),
        }
        image = json.loads(self("config", "--format", "json"))["services"][JAEGER]["image"]
        known = subprocess.run(["docker", "image", "inspect", image], check=False, capture_output=True).returncode == 0
        pulled = known or subprocess.run(["docker", "pull", image], check=False, capture_output=True).returncode == 0
        self.services = [*HUB, JAEGER] if pulled else HUB
        if not pulled:
            print(f"{image} can't be had here: the hub runs without it")
            self._environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = ""

    def __call__(self, *arguments: str) -> str:
        """Run a command of compose and return what it wrote on stdout."""
        done = subprocess.run(
            ["docker", "compose", *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self._environ,
            timeout=COMMAND_S_MAX,
        )
        assert done.returncode == 0, (
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def hub(self, *arguments: str) -> list[dict[str, Any]]:
        """Run a command of the hub as a client, whose key the processes of the hub don't have; return its objects."""
        out = self("--profile", "demo", "run", "--rm", "--no-deps", "-T", "demo", "tensorhub", *arguments, "--json")
        return [json.loads(line) for line in out.splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    project = Compose()
    project("--profile", "demo", "build")
    try:
        project("up", "--detach", "--wait", *project.services)
        yield project
    finally:
        project("--profile", "demo", "down", "--volumes", "--timeout", "20")


def test_a_control_image_has_nothing_heavy(compose: Compose) -> None:
    asked = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    assert compose("exec", "-T", "registry", "python3", "-c", asked).strip() == "[]"


@pytest.mark.parametrize("service", HUB)
def test_nothing_runs_as_root(compose: Compose, service: str) -> None:
    assert compose("exec", "-T", service, "id", "--user").strip() == "10001"


def test_the_demo_comes_to_its_summary_and_the_catalog_stays(compose: Compose) -> None:
    arguments = json.loads(compose("--profile", "demo", "config", "--format", "json"))["services"]["demo"]["command"]
    out = compose("--profile", "demo", "run", "--rm", "--no-deps", "-T", "demo", *arguments, *SHORT, "--json")
    told = [json.loads(line) for line in out.splitlines()]
    summary = told[-1]
    assert (summary["kind"], summary["faults"], summary["differences"]) == ("summary", [], 0)
    assert all(replica["equal_at_end"] for replica in summary["replicas"])
    transports = {
        source["transport"] for each in told if each["kind"] in {"held", "joined-late"} for source in each["sources"]
    }
    print(f"{summary['compared']} copies compared, {summary['nbytes_compared'] / 1e9:.1f} GB; by {sorted(transports)}")
    # The agents pretend different hosts: what went between them went by UCXX.
    assert transports == {"local", "ucxx"}

    job = next(each["job"] for each in told if each["kind"] == "up")
    before = compose.hub("versions", "policy", "--job", job)
    assert len(before) == summary["versions"]
    compose("down", "--timeout", "20")
    compose("up", "--detach", "--wait", *compose.services)
    assert compose.hub("versions", "policy", "--job", job) == before


def test_a_killed_agent_is_back_and_the_hub_is_healthy(compose: Compose) -> None:
    compose("kill", "--signal", "SIGKILL", "agent-1")
    compose("up", "--detach", "--wait", *compose.services)
    for process in ("registry-0", "planner-0", "agent-0", "agent-1"):
        compose("exec", "-T", "registry", "python3", "-m", "tensorhub_common.bus.pings", process)
