"""What a hub on a Ray cluster is to be, and where its processes keep their files on a node."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tensorhub.local.hub import RUNNERS_MAX
from tensorhub_common.protocol.subjects import check_name

NAMESPACE: Final = "tensorhub"
"""The namespace of Ray in which all actors of hubs are."""
CONFIG_BYTES_MAX: Final = 1 << 20
"""Limit of a model's config.json, which goes to each node."""
NODE_ID_CHARS: Final = 12
"""So much of a Ray node's id is in the name of an agent that serves the workers there."""
CONTROL: Final = "control"
"""The actor, and the folder, of the processes of the head node."""

_AS_ARGUMENTS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True, slots=True)
class HubPlan:
    """A hub on a Ray cluster: its runners, what each takes of a node, and what its processes are told."""

    name: str
    job: str
    runners: int
    runners_max: int
    engine: str
    config: bytes | None = field(repr=False)
    """The content of the model's config.json, where nodes need no more of it."""
    model: str | None
    """The folder of the model as each node has it, where there is no `config`."""
    agent_resources: Mapping[str, float]
    runner_resources: Mapping[str, float]
    environment: Mapping[str, str] = field(repr=False)
    directory: str

    def __post_init__(self) -> None:
        """Check names and counts."""
        check_name("hub", self.name)
        if not 0 <= self.runners <= self.runners_max <= RUNNERS_MAX:
            raise ValueError(
                f"{self.runners} to {self.runners_max} runners are not possible: take 0 to {RUNNERS_MAX}, and "
                "runners_max not below runners"
            )
        if self.runners_max and self.engine == "torch" and self.config is None:
            raise ValueError(
                "runners of torch need a model: name the folder of its config.json, as in model='my-model'"
            )
        for what, resources in (("agent", self.agent_resources), ("runner", self.runner_resources)):
            if not any(amount > 0 for amount in resources.values()):
                raise ValueError(
                    f"{what}_resources={dict(resources)} is nothing that a placement group holds: name what it takes "
                    'of a node, as in {"CPU": 1}'
                )

    def folder(self, process: str) -> Path:
        """Return the directory of one of its processes, on the node where it runs."""
        return Path(self.directory) / self.name / process

    def actor(self, process: str) -> str:
        """Return what the actor of a process is called in Ray."""
        return f"{self.name}/{process}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What an agent and its runner take, as the bundles of one placement group."""
        return [dict(self.agent_resources), dict(self.runner_resources)]


def config_of(model: Path) -> bytes:
    """Read a model's config.json. Raises `ValueError` where there is none, or it is too large."""
    path = model / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as why:
        raise ValueError(f"{path} can't be read ({why.strerror}): name the folder of the model's config.json") from None
    if len(text) > CONFIG_BYTES_MAX:
        raise ValueError(f"{path} has more than {CONFIG_BYTES_MAX} bytes, so it is no model's config.json")
    return text


def default_directory() -> str:
    """Return where the hubs of this user keep their files on each node, unless told otherwise: a short path."""
    return str(Path(tempfile.gettempdir()) / f"tensorhub-ray-{os.getuid()}")


def resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as the options of an actor."""
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    for name, amount in resources.items():
        if name in _AS_ARGUMENTS:
            options[_AS_ARGUMENTS[name]] = amount
        else:
            options["resources"][name] = amount
    return options


def agent_of(runner: str) -> str:
    """Return the agent that a runner is at."""
    return runner.replace("runner", "agent", 1)


def runner_of(process: str) -> str:
    """Return the runner of a unit, of which `process` is the runner or the agent."""
    return process.replace("agent", "runner", 1)


def agent_on(node: str) -> str:
    """Return what the agent is called that serves the workers on a Ray node."""
    return f"agent-{node[:NODE_ID_CHARS]}"
