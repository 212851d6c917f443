"""What a driver and its workers call: start a hub on the cluster of Ray, and connect to it from any node."""

import contextlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import ray

import tensorhub
from tensorhub.integrations.ray.control import Control
from tensorhub.integrations.ray.plan import (
    CONTROL,
    NAMESPACE,
    HubPlan,
    config_of,
    default_directory,
    resource_options,
)
from tensorhub.integrations.ray.units import ALWAYS
from tensorhub.local.directory import HubDirectory
from tensorhub_common.errors import AgentUnavailable, RegistryUnavailable

READY_S: Final = 180.0
"""By default a hub may take so long to come up, with its first runners."""
CONNECT_S: Final = 60.0
"""By default an agent may take so long to come up on the node of a worker."""
STOP_S: Final = 90.0
"""A hub may take so long to end; each of its processes has a bound of its own below that."""
ANSWER_S: Final = 10.0

_HEAD: Final = {"node:__internal_head__": 0.001}
_ONE_CPU: Final = {"CPU": 1.0}
_OF_AGENT: Final = {"CPU": 0.5}
"""It has nothing to do between two versions."""


class RayHub:
    """A hub on a Ray cluster. It goes on when its driver ends, until `stop`; as a context manager it stops itself."""

    def __init__(self, plan: HubPlan, control: Any) -> None:  # noqa: ANN401 (Ray has no type for it)
        self._plan, self._control = plan, control

    @property
    def name(self) -> str:
        """What it is called."""
        return self._plan.name

    @property
    def control_directory(self) -> Path:
        """On the head node, what `TENSORHUB_DIR` has to be for the commands of `tensorhub`."""
        return self._plan.folder(CONTROL)

    def runners(self) -> dict[str, str | None]:
        """Return the id of each runner's Ray node; None: it waits for one that has the resources."""
        found: dict[str, str | None] = ray.get(self._control.runners.remote(), timeout=ANSWER_S)
        return found

    def connect(self, job: str | None = None, *, timeout_s: float = CONNECT_S) -> tensorhub.Hub:
        """Connect to the hub; see `connect`."""
        return connect(job, hub=self.name, timeout_s=timeout_s)

    def stop(self) -> None:
        """End all processes of the hub, on all nodes. Its logs stay on the head node, for the next one of its name."""
        try:
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(self._control.stop.remote(), timeout=STOP_S)
        finally:
            ray.kill(self._control, no_restart=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_hub(
    name: str = "hub",
    *,
    job: str = "default",
    runners: int = 1,
    runners_max: int | None = None,
    engine: str = "torch",
    model: str | PathLike[str] | None = None,
    agent_resources: Mapping[str, float] = _OF_AGENT,
    runner_resources: Mapping[str, float] = _ONE_CPU,
    environment: Mapping[str, str] | None = None,
    directory: str | PathLike[str] | None = None,
    timeout_s: float = READY_S,
) -> RayHub:
    """Bring up a hub on the Ray cluster that this driver is connected to, or find the one that runs under this name.

    Examples:
        >>> hub = start_hub(runners=2, model="my-model", runner_resources={"CPU": 4, "GPU": 1})

    Args:
        name: What the hub is called on the cluster.
        job: The job whose rollouts its runners generate for, and to which `connect` connects by default.
        runners: How many runners there are at least, each with an agent beside it.
        runners_max: Up to how many there may be while the rollout manager wishes for them; None: no more.
        engine: The runners' engine: torch, or your own as module:function.
        model: The folder of the model's config.json. That of torch is read here and goes to each node; with another
            engine it is a path that each node has.
        agent_resources: What each runner's agent takes of a node.
        runner_resources: What a runner takes: GPUs, or what else Ray knows.
        environment: Settings of all processes (`TENSORHUB_*`), such as those of runners.
        directory: Where the processes keep their files on each node; by default a folder in the temporary one.
        timeout_s: The bound in seconds, after which what has been started is ended.

    Raises:
        RegistryUnavailable: The hub is not ready within the bound; the message says what it waits for.
        ValueError: An argument can't be.
    """
    plan = HubPlan(
        name=name,
        job=job,
        runners=runners,
        runners_max=runners if runners_max is None else runners_max,
        engine=engine,
        config=config_of(Path(model)) if engine == "torch" and model is not None else None,
        model=None if engine == "torch" or model is None else str(model),
        agent_resources=dict(agent_resources),
        runner_resources=dict(runner_resources),
        environment=dict(environment or {}),
        directory=str(directory or default_directory()),
    )
    if _control_of(name) is not None:
        return find_hub(name)
    control = (
        ray.remote(Control)
        .options(
            name=plan.actor(CONTROL),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=ALWAYS,
            # All that it is asked may be asked again, and whoever asks meanwhile waits for its next life.
            max_task_retries=ALWAYS,
            **resource_options(_HEAD),
        )
        .remote(plan)
    )
    hub = RayHub(plan, control)
    try:
        ray.get(control.ready.remote(timeout_s))
    except BaseException:
        hub.stop()
        raise
    return hub


def find_hub(name: str = "hub") -> RayHub:
    """Return the hub that runs under a name on this cluster. Raises `RegistryUnavailable` where none answers."""
    control = _control_of(name)
    if control is None:
        raise RegistryUnavailable(
            f"no hub called {name!r} runs on this Ray cluster: start it with tensorhub.integrations.ray.start_hub()"
        )
    try:
        return RayHub(ray.get(control.describe.remote(), timeout=ANSWER_S), control)
    except ray.exceptions.GetTimeoutError:
        raise RegistryUnavailable(
            f"the hub {name!r} does not answer within {ANSWER_S:g} s: it is being started again on the head node"
        ) from None


def _control_of(name: str) -> Any:  # noqa: ANN401 (Ray has no type for it)
    try:
        return ray.get_actor(f"{name}/{CONTROL}", NAMESPACE)
    except ValueError:
        return None


def connect(job: str | None = None, *, hub: str = "hub", timeout_s: float = CONNECT_S) -> tensorhub.Hub:
    """Connect a worker, in a driver, task or actor on any node, to the agent of its node; it is started if need be.

    Examples:
        >>> with connect() as hub:
        ...     policy = hub.register("policy", model, replica="trainer")

    Args:
        job: An isolated namespace; by default that of the hub's runners.
        hub: What the hub is called on the cluster.
        timeout_s: The bound in seconds.

    Raises:
        RegistryUnavailable: No hub of this name runs here.
        AgentUnavailable: No agent came up on this node within the bound.
    """
    found = find_hub(hub)
    return tensorhub.connect(job or found._plan.job, agent=agent_here(hub, timeout_s=timeout_s))  # noqa: SLF001


def agent_here(hub: str = "hub", *, timeout_s: float = CONNECT_S) -> Path:
    """Return the socket of this node's agent, as `tensorhub.connect_async(agent=…)` takes it; see `connect`."""
    found = find_hub(hub)
    node = ray.get_runtime_context().get_node_id()
    try:
        agent: str = ray.get(found._control.agent_on.remote(node), timeout=timeout_s)  # noqa: SLF001
    except ray.exceptions.GetTimeoutError:
        raise AgentUnavailable(f"no agent of the hub {hub!r} came up on Ray node {node} in {timeout_s:g} s") from None
    return HubDirectory(found._plan.folder(agent)).socket_path(agent)  # noqa: SLF001
