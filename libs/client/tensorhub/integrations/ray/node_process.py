"""An agent or a runner on one node: an actor of Ray that keeps the real process running as its child.

The process is `tensorhub-agent` or `tensorhub-runner`, as on any host. It is no part of the actor's process: an engine
that crashes takes nothing else along and is back without Ray, the signals are its own, and it is the same program that
runs without Ray. It ends with its actor, however that ends (see `tensorhub.local.tether`).

Ray starts an actor that died again: on its node, or, where that is lost, on another one that has the resources. On the
same host the process finds the directory that it had, so an agent takes back its memory; elsewhere it begins with
nothing, under the same name and a higher incarnation.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Final

import ray

from tensorhub.integrations.ray.plan import CONTROL, NAMESPACE, HubPlan, agent_of
from tensorhub.local.children import Child, Children, ChildSpec, tail
from tensorhub.local.directory import HubDirectory, HubDirInUse
from tensorhub.local.hub import ServiceCommands
from tensorhub.local.process_settings import Place, login, of_agent, of_runner, without_nats
from tensorhub_common.config import settings
from tensorhub_common.runtime.supervision import Fault, Supervisor

RETRY_S: Final = 0.5
"""After so long an actor tries again to get its keys, or its directory from one that is ending."""
OWN_KEY: Final = "own.nk"
WORKER_KEY: Final = "client.nk"
MODEL: Final = "model"
NODE_FILE: Final = "ray-node"
"""In a process's directory: the id of the Ray node that it is of."""
FAULT_CODE: Final = 70

_log: Final = logging.getLogger(__name__)


class NodeProcess:
    """The actor of one agent or runner, which its name says (`agent-…`, `runner-…`)."""

    async def __init__(self, process: str, plan: HubPlan) -> None:  # type: ignore[misc]  # Ray awaits it in its loop
        self.process, self.plan = process, plan
        self.node: str = ray.get_runtime_context().get_node_id()
        self._is_agent = process.startswith("agent")
        self._directory = HubDirectory(plan.folder(process))
        self._settings = settings.load({**os.environ, **plan.environment})
        self._children = Children(on_fault=end_actor)
        # Whoever needs it asks it over NATS; from its first start on it is kept running.
        self._children.settle()
        self._child: Child | None = None
        self._work = Supervisor(process, end_actor)
        self._work.start(self._begin(), "starting its process")

    async def place(self) -> tuple[str, int | None]:
        """Return the Ray node that it is on, and the id of the process, which is None before its first start."""
        return self.node, None if self._child is None else self._child.pid

    async def said(self) -> str:
        """Return the end of what the process has written."""
        return tail(self._directory.log(self.process))

    async def notify(self) -> None:
        """Tell a runner that its machine goes away soon."""
        if self._child is not None:
            self._children.signal(self._child, signal.SIGUSR1)

    async def stop(self) -> None:
        """End the process, give its memory back, and remove its directory."""
        await self._work.close()
        await self._children.stop()
        if self._directory.is_open:
            self._directory.free_segments(self._settings.shm_dir)
            self._directory.close()
            await asyncio.to_thread(shutil.rmtree, self._directory.path, ignore_errors=True)

    async def _begin(self) -> None:
        while not self._is_opened():  # noqa: ASYNC110 (another process gives it free)
            await asyncio.sleep(RETRY_S)
        folder = self._directory.path
        nodes = await asyncio.to_thread(ray.nodes)
        free_lost_nodes(folder.parent, {each["NodeID"] for each in nodes if each["Alive"]}, self._settings.shm_dir)
        (folder / NODE_FILE).write_text(self.node)
        nats, own_key, worker_key = await self._admitted()
        _write_secret(folder / OWN_KEY, own_key)
        _write_secret(folder / WORKER_KEY, worker_key)
        # Nodes that Ray tells apart on one machine are hosts of their own where they have names of their own.
        host = settings.host_name(next(each["NodeName"] for each in nodes if each["NodeID"] == self.node))
        environment = {
            **without_nats(os.environ),
            **self.plan.environment,
            **login(nats, folder / OWN_KEY),
            **(self._of_agent(host) if self._is_agent else self._of_runner(host)),
            "TENSORHUB_DIR": str(folder),
        }
        if self._is_agent and not environment.get("CUDA_VISIBLE_DEVICES"):
            # Ray hides all GPUs from an actor without any; an agent owns memory on its workers'.
            environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = ServiceCommands().agent if self._is_agent else ServiceCommands().runner
        spec = ChildSpec(self.process, command, environment, self._directory.log(self.process))
        self._child = await self._children.start(spec)

    def _is_opened(self) -> bool:
        try:
            self._directory.open()
        except HubDirInUse:
            # The actor before this one has not ended yet.
            return False
        return True

    async def _admitted(self) -> tuple[str, bytes, bytes]:
        """Ask for the address of NATS, the key of this process, and that of workers."""
        while True:
            try:
                control = await asyncio.to_thread(ray.get_actor, self.plan.actor(CONTROL), NAMESPACE)
                nats, own_key, worker_key = await control.admit.remote(self.process)
            except (ray.exceptions.RayError, ValueError) as why:
                # It is not up yet, or starts again itself.
                _log.debug("%s has no key yet: %s", self.process, why)
                await asyncio.sleep(RETRY_S)
            else:
                return nats, own_key, worker_key

    def _of_agent(self, host: str) -> dict[str, str]:
        folder, state = self._directory.path, self._directory.state(self.process)
        state.mkdir(mode=0o700, exist_ok=True)
        place = Place(host, self._settings.site, self._settings.rack)
        return of_agent(self.process, place, self._directory.socket(self.process), state, folder / WORKER_KEY)

    def _of_runner(self, host: str) -> dict[str, str]:
        agent, plan = agent_of(self.process), self.plan
        socket = HubDirectory(plan.folder(agent)).socket_path(agent)
        model = None if plan.model is None else Path(plan.model)
        if plan.config is not None:
            model = self._directory.path / MODEL
            model.mkdir(exist_ok=True)
            (model / "config.json").write_bytes(plan.config)
        return of_runner(self.process, plan.job, host, socket, plan.engine, model)


def free_lost_nodes(hub: Path, alive: set[str], shm: Path) -> None:
    """Remove what processes of this hub left on this machine whose Ray nodes are no more, with their memory."""
    for folder in hub.iterdir():
        node = folder / NODE_FILE
        if not node.is_file() or node.read_text() in alive:
            continue
        directory = HubDirectory(folder)
        with contextlib.suppress(HubDirInUse):
            directory.open()
            directory.free_segments(shm)
            directory.close()
            shutil.rmtree(folder, ignore_errors=True)


def _write_secret(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def end_actor(fault: Fault) -> None:
    """End the actor's process, and the child with it: Ray starts both again."""
    _log.error("%s", fault)
    os._exit(FAULT_CODE)


def actor_class() -> Any:  # noqa: ANN401 (Ray has no type for it)
    """Return the class as Ray runs it."""
    return ray.remote(NodeProcess)
