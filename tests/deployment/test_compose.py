"""docker-compose.yml in a Docker engine: built, up, a training run, down and up again with the catalog intact."""

from collections.abc import Iterator

import pytest
from tests.deployment.composed import HUB, MARKS, Compose, running

HEAVY = ("torch", "cupy", "ucxx", "libucx")
pytestmark = MARKS


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with running() as project:
        yield project


def test_a_control_image_has_nothing_heavy(compose: Compose) -> None:
    asked = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    assert compose("exec", "-T", "registry", "python3", "-c", asked).strip() == "[]"


@pytest.mark.parametrize("service", HUB)
def test_nothing_runs_as_root(compose: Compose, service: str) -> None:
    assert compose("exec", "-T", service, "id", "--user").strip() == "10001"


def test_the_demo_comes_to_its_summary_and_the_catalog_stays(compose: Compose) -> None:
    told = compose.demo()
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
    for process in ("registry-0", "planner-0", "rollout-0", "agent-0", "agent-1"):
        compose("exec", "-T", "registry", "python3", "-m", "tensorhub_common.introspection.ping", process)
