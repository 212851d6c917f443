"""docker-compose.cluster.yml in a Docker engine: any node of NATS and either registry is lost, and nothing is missed.

`make compose` runs these too.
"""

from collections.abc import Iterator

import pytest
from tests.deployment.composed import DEMO, HUB, MARKS, Compose

NODES = ["nats", "nats-1", "nats-2"]
REGISTRIES = ["registry", "registry-1"]

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


@pytest.mark.parametrize("lost", [*NODES, *REGISTRIES])
def test_without_any_one_of_them_training_goes_on(compose: Compose, job: str, lost: str) -> None:
    before = compose.hub("versions", "policy", "--job", job)
    assert before
    compose("kill", "--signal", "SIGKILL", lost)
    try:
        assert compose.hub("versions", "policy", "--job", job) == before
        later = trained(compose)
        assert compose.hub("versions", "policy", "--job", later)
    finally:
        compose("up", "--detach", "--wait", *compose.services)
    assert compose.hub("versions", "policy", "--job", job) == before
