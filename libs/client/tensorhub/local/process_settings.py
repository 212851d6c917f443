"""What the processes of a hub are told in their environment: where NATS is, their key, their place, and their work."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OF_ANOTHER_NATS: Final = frozenset(
    f"TENSORHUB_{name}"
    for name in ("NATS", "CREDENTIALS", "WORKER_CREDENTIALS", "NATS_CA", "NATS_CERTIFICATE", "NATS_KEY")
)


def without_nats(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what an environment says of a NATS: that is meant for another hub."""
    return {name: text for name, text in environment.items() if name not in OF_ANOTHER_NATS}


def login(nats: str, key: Path) -> dict[str, str]:
    """Say where NATS is, and with which key the process logs in."""
    return {"TENSORHUB_NATS": nats, "TENSORHUB_CREDENTIALS": str(key)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent is. `rack`: empty where it is not known."""

    host: str
    site: str = ""
    rack: str = ""


def of_agent(agent: str, place: Place, socket: Path, state: Path, worker_key: Path) -> dict[str, str]:
    """Say an agent's id, its place, where its workers reach it and with which key they log in, and what outlives it."""
    return {
        "TENSORHUB_WORKER_CREDENTIALS": str(worker_key),
        "TENSORHUB_AGENT_ID": agent,
        "TENSORHUB_HOST": place.host,
        "TENSORHUB_RACK": place.rack,
        "TENSORHUB_SITE": place.site,
        "TENSORHUB_SOCKET": str(socket),
        "TENSORHUB_STATE_DIR": str(state),
    }


def of_runner(runner: str, job: str, host: str, agent: Path, engine: str, model: Path | None) -> dict[str, str]:
    """Say a runner's id, the job, the host and socket of its agent, and what its engine is."""
    return {
        "TENSORHUB_JOB": job,
        "TENSORHUB_AGENT": str(agent),
        "TENSORHUB_HOST": host,
        "TENSORHUB_RUNNER_ID": runner,
        "TENSORHUB_RUNNER_ENGINE": engine,
        "TENSORHUB_RUNNER_MODEL": "" if model is None else str(model.absolute()),
    }
