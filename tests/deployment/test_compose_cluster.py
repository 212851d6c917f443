"""docker-compose.cluster.yml in a Docker engine: any node of NATS and either registry is lost, nothing is missed."""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from tests.deployment.composed import HUB, MARKS, Compose, running

NODES = ["nats", "nats-1", "nats-2"]
REGISTRIES = ["registry", "registry-1"]
ELECTED_S_MAX = 60.0
"""The other two elect leaders for what the lost node led, on a machine that does all at once."""

UNANSWERED = "no registry answered about job"
T = TypeVar("T")
pytestmark = MARKS


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with running("docker-compose.cluster.yml", services=sorted({*HUB, *NODES, *REGISTRIES})) as project:
        yield project


@pytest.fixture(scope="module")
def job(compose: Compose) -> str:
    return trained(compose)


def trained(compose: Compose) -> str:
    told = compose.demo()
    assert (told[-1]["kind"], told[-1]["faults"], told[-1]["differences"]) == ("summary", [], 0)
    assert all(replica["equal_at_end"] for replica in told[-1]["replicas"])
    return str(next(each["job"] for each in told if each["kind"] == "up"))


def versions(compose: Compose, job: str) -> list[dict[str, Any]]:
    return answered(lambda: compose.hub("versions", "policy", "--job", job))


def answered(ask: Callable[[], T], otherwise: str = "") -> T:
    """Ask until the hub answers: a command ends within 5 s in an error while leaders are elected.

    Only what fails with the words `otherwise` is asked again.
    """
    deadline = time.monotonic() + ELECTED_S_MAX
    while True:
        try:
            return ask()
        except AssertionError as why:
            if time.monotonic() > deadline or otherwise not in str(why):
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
        # The old job's log has its leader again, and a new job's may have to wait for that of all.
        assert versions(compose, answered(lambda: trained(compose), UNANSWERED))
    finally:
        compose("up", "--detach", "--wait", *compose.services)
    assert versions(compose, job) == before
