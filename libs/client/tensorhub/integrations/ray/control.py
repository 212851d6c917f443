"""The control processes of a hub, kept on the head node by one actor: NATS, registry, planner and rollout manager.

It hands each process its key, has an agent run where a worker asks for one, and follows how many runners the rollout
manager wishes for. Always true: an actor that is started again comes back with the same NATS, at the same address and
over the same logs, and finds the agents and runners of the one before.
"""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tensorhub._control.registry_client import NatsAddress
from tensorhub.integrations.ray.node_process import RETRY_S, actor_class, end_actor, free_lost_nodes
from tensorhub.integrations.ray.plan import CONTROL, NAMESPACE, HubPlan, agent_of, agent_on
from tensorhub.integrations.ray.units import ALWAYS, Units, stop_actor
from tensorhub.local.hub import CLIENT, LocalHub, LocalRollouts
from tensorhub.local.launcher import follow, runner_names
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.config import settings
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.ping import ping
from tensorhub_common.runtime.supervision import Supervisor

PORT_FILE: Final = "nats-port"
AGENTS_MAX: Final = 4096
"""Limit of the nodes whose workers have asked for an agent."""
PING_TIMEOUT_S: Final = 0.5

_log: Final = logging.getLogger(__name__)


class Control:
    """The actor."""

    async def __init__(self, plan: HubPlan) -> None:  # type: ignore[misc]  # Ray awaits it in the actor's loop
        self.plan = plan
        self._work = Supervisor(f"hub {plan.name}", end_actor)
        self._units = Units(plan)
        self._agents: dict[str, Any] = {}
        """By Ray node, those that serve the workers there."""
        self._up = asyncio.Event()
        self._why: TensorHubError | None = None
        self._hub: LocalHub | None = None
        self._work.start(self._bring_up(), "bringing up the hub")

    # ------------------------------------------------------------------------------- what is asked of it

    async def describe(self) -> HubPlan:
        """Return what it was started with."""
        return self.plan

    async def ready(self, timeout_s: float) -> None:
        """Return once the control processes and the first runners are ready. Raises `RegistryUnavailable`."""
        missing: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_up()
                missing = [each for runner in runner_names(self.plan.runners) for each in (agent_of(runner), runner)]
                async with await self._connect() as bus:
                    while missing:
                        await _wait_pong(bus, missing[0])
                        del missing[0]
        except TimeoutError:
            if not missing:
                raise RegistryUnavailable(f"the hub was not up within {timeout_s:g} s") from None
            why = await self._units.reason(missing[0])
            raise RegistryUnavailable(
                f"{', '.join(missing)} did not say within {timeout_s:g} s that it is ready: {why}"
            ) from None

    async def admit(self, process: str) -> tuple[str, bytes, bytes]:
        """Return the address of NATS, the key of an agent or a runner, and that of workers."""
        hub = await self._wait_up()
        user = User(Role.AGENT if process.startswith("agent") else Role.RUNNER, process)
        keys = await hub.admit([user, CLIENT])
        return hub.nats, keys[user], keys[CLIENT]

    async def agent_on(self, node: str) -> str:
        """Return the agent for the workers on a Ray node, once it is ready. It is started where there is none yet."""
        await self._wait_up()
        agent = agent_on(node)
        if node not in self._agents:
            await self._drop_lost()
            if len(self._agents) >= AGENTS_MAX:
                raise RegistryUnavailable(f"a hub has agents for the workers of {AGENTS_MAX} nodes, and no more")
            self._agents[node] = await asyncio.to_thread(self._start_agent, agent, node)
        async with await self._connect() as bus:
            await _wait_pong(bus, agent)
        return agent

    async def runners(self) -> dict[str, str | None]:
        """Return the Ray node of each runner, or None where it waits for one."""
        return await self._units.places()

    async def login(self) -> tuple[str, str]:
        """Return the address of NATS and the file of the clients' key, on the node of this actor."""
        hub = await self._wait_up()
        return hub.nats, hub.hub.credentials

    async def stop(self) -> None:
        """End all processes of the hub, on all nodes. The logs stay in its directory on the head node."""
        await self._work.close()
        await self._units.end_all()
        await asyncio.gather(*(stop_actor(agent) for agent in self._agents.values()))
        if self._hub is not None:
            await self._hub.stop()
        # What was lost with nodes on this machine; nothing of the hub runs any more.
        shm = settings.load({**os.environ, **self.plan.environment}).shm_dir
        await asyncio.to_thread(free_lost_nodes, self.plan.folder(CONTROL).parent, set(), shm)

    # -------------------------------------------------------------------------------- what it does by itself

    async def _bring_up(self) -> None:
        folder = self.plan.folder(CONTROL)
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        names = runner_names(self.plan.runners_max)
        if is_again:
            await asyncio.to_thread(self._units.find, names)
            await asyncio.to_thread(self._find_agents)
        while True:
            hub = LocalHub(
                folder,
                agents=0,
                rollouts=LocalRollouts(job=self.plan.job),
                environment={**os.environ, **self.plan.environment},
                listen=ray.util.get_node_ip_address(),
                port=_port(folder, ray.util.get_node_ip_address(), is_kept=is_again),
                on_fault=end_actor,
            )
            try:
                await hub.start()
                break
            except TensorHubError as why:
                if not is_again:
                    self._why = why
                    self._up.set()
                    return
                _log.warning("the hub %s is not up yet: %s", self.plan.name, why)
                await asyncio.sleep(RETRY_S)
        self._hub = hub
        self._up.set()
        for runner in names[: self.plan.runners]:
            if runner not in self._units.runners:
                await self._units.start_runner(runner)
        if self.plan.runners_max > self.plan.runners:
            nats, key = await self.login()
            address = NatsAddress(nats, Path(key))
            await follow(self.plan.job, address, self._units, self.plan.runners, self.plan.runners_max)

    async def _wait_up(self) -> LocalHub:
        await self._up.wait()
        if self._why is not None:
            raise self._why
        assert self._hub is not None, "up without a hub"
        return self._hub

    async def _connect(self) -> Bus:
        nats, key = await self.login()
        return await connect(nats, name=f"tensorhub-{self.plan.name}", credentials=Path(key))

    def _start_agent(self, agent: str, node: str) -> Any:  # noqa: ANN401 (Ray has no type for it)
        return (
            actor_class()
            .options(
                name=self.plan.actor(agent),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=ALWAYS,
                # It takes nothing of the node: a worker that needs it has been given its own place already.
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(agent, self.plan)
        )

    def _find_agents(self) -> None:
        for node in _alive():
            with contextlib.suppress(ValueError):
                self._agents[node] = ray.get_actor(self.plan.actor(agent_on(node)), NAMESPACE)

    async def _drop_lost(self) -> None:
        alive = await asyncio.to_thread(_alive)
        self._agents = {node: agent for node, agent in self._agents.items() if node in alive}


def _alive() -> set[str]:
    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _port(folder: Path, address: str, *, is_kept: bool) -> int:
    """Return the port of NATS: the one of the life before where agents and runners know it, else a free one."""
    file = folder / PORT_FILE
    if is_kept and file.exists():
        return int(file.read_text())
    with socket.create_server((address, 0)) as free:
        port: int = free.getsockname()[1]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(str(port))
    return port


async def _wait_pong(bus: Bus, process: str) -> None:
    while await ping(bus, process, PING_TIMEOUT_S) is None:  # noqa: ASYNC110 (only asking again tells)
        await asyncio.sleep(RETRY_S)
