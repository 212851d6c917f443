"""A project of docker compose of a test's own, beside one that may run already.

`COMPOSE_FILE` may add files of the caller's own, for a build that needs a proxy or an index. Jaeger is left out where
its image can't be had: nothing else depends on it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.nats import free_ports

ROOT = Path(__file__).parents[2]
HUB = ["nats", "registry", "planner", "rollout", "agent-0", "agent-1"]
JAEGER = "jaeger"
COMMAND_S_MAX = 1200.0
DEMO = ("--profile", "demo")
RUN_DEMO = (*DEMO, "run", "--rm", "--no-deps", "-T", "demo")
SHORT = ("--seconds", "20")


def missing() -> str | None:
    """Return why there is nothing to run this with, or None."""
    if shutil.which("docker") is None:
        return "docker is not installed here"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return f"'{' '.join(command)}' fails here"
    return None


MARKS = [pytest.mark.slow, pytest.mark.timeout(2400), pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@contextmanager
def running(*more: str, services: Sequence[str] = ()) -> Iterator["Compose"]:
    """Build the project and bring it up, some services alone; take it down at the end."""
    project = Compose(*more)
    project.services = list(services) or project.services
    project(*DEMO, "build", *([*HUB, "demo"] if services else ()))
    try:
        project("up", "--detach", "--wait", *project.services)
        yield project
    finally:
        project(*DEMO, "down", "--volumes", "--timeout", "20")


class Compose:
    """One project, of docker-compose.yml and the files that are added to it."""

    def __init__(self, *more: str) -> None:
        nats, jaeger = free_ports(2)
        files = os.environ.get("COMPOSE_FILE", "docker-compose.yml").split(":")
        self._environ = dict(os.environ) | {
            "COMPOSE_FILE": ":".join([files[0], *more, *files[1:]]),
            "COMPOSE_PROJECT_NAME": f"tensorhub-test-{os.getpid()}",
            "TENSORHUB_NATS_PORT": str(nats),
            "TENSORHUB_JAEGER_PORT": str(jaeger),
        }
        image = json.loads(self("config", "--format", "json"))["services"][JAEGER]["image"]
        known = subprocess.run(["docker", "image", "inspect", image], check=False, capture_output=True).returncode == 0
        pulled = known or subprocess.run(["docker", "pull", image], check=False, capture_output=True).returncode == 0
        self.services = [*HUB, JAEGER] if pulled else HUB
        if not pulled:
            print(f"{image} can't be had here: the hub runs without it")
            self._environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = ""

    def __call__(self, *arguments: str) -> str:
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
        out = self(*RUN_DEMO, "tensorhub", *arguments, "--json")
        return [json.loads(line) for line in out.splitlines()]

    def demo(self) -> list[dict[str, Any]]:
        """Run the demo for a short time; return what it told."""
        command = json.loads(self(*DEMO, "config", "--format", "json"))["services"]["demo"]["command"]
        out = self(*RUN_DEMO, *command, *SHORT, "--json")
        return [json.loads(line) for line in out.splitlines()]
