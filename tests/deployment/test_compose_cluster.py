"""docker-compose.cluster.yml in a Docker engine: any node of NATS and either registry is lost, and nothing is missed.

`make compose` runs these too.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.deployment.composed import DEMO, HUB, MARKS, Compose

NODES = ["nats", "nats-1", "nats-2"]
REGISTRIES = ["registry", "registry-1"]
ELECTED_S_MAX = 60.0
"""The other two elect leaders for what the lost node led, on a machine that does all at once."""

pytestmark = MARKS


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    project = Compose("docker-compose.cluster.yml")
    project(*DEMO, "build", *HUB, "demo")
    project.services = sorted({*HUB, *NODES, *REGISTRIES})
    try:
        project("up", "--detach", "--wait", *project.services)
        yield project
    finally:
        project(*DEMO, "down", "--volumes", "--timeout", "20")


@pytest.fixture(scope="module")
def job(compose: Compose) -> str:
    """A job with some versions, trained before anything is lost."""
    return trained(compose)


def trained(compose: Compose) -> str:
    told = compose.demo()
    assert (told[-1]["kind"], told[-1]["faults"], told[-1]["differences"]) == ("summary", [], 0)
    assert all(replica["equal_at_end"] for replica in told[-1]["replicas"])
    return str(next(each["job"] for each in told if each["kind"] == "up"))


def versions(compose: Compose, job: str) -> list[dict[str, Any]]:
    """Ask until the hub answers: who asks while leaders are elected is told within 5 s that nobody answers."""
    deadline = time.monotonic() + ELECTED_S_MAX
    while True:
        try:
            return compose.hub("versions", "policy", "--job", job)
        except AssertionError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("lost", [*NODES, *REGISTRIES])
def test_without_any_one_of_them_training_goes_on(compose: Compose, job: str, lost: str) -> None:
    before = versions(compose, job)
    assert before
    compose("kill", "--signal", "SIGKILL", lost)
    began = time.monotonic()
    try:
        assert versions(compose, job) == before
        print(f"without {lost} the hub answered after {time.monotonic() - began:.1f} s")
        assert versions(compose, trained(compose))
    finally:
        compose("up", "--detach", "--wait", *compose.services)
    assert versions(compose, job) == before
