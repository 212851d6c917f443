"""The runners of a hub, each with an agent of its own in one placement group.

A group is packed strictly, so agent and runner are on one node, and Ray chooses which. One that finds no resources
waits, and Ray's autoscaler sees what it waits for. Where a node is lost Ray places the group anew and starts both
actors there.

Always true: actors and groups outlive the actor that made them, which finds them again by their names.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tensorhub.integrations.ray.node_process import actor_class
from tensorhub.integrations.ray.plan import NAMESPACE, HubPlan, agent_of, resource_options, runner_of

STOP_S_MAX: Final = 15.0
"""So long an actor may take to end its process; then it is killed, and the process with it."""
ASK_S: Final = 2.0
"""So long it is asked where it is; one that has no node yet doesn't answer."""
ALWAYS: Final = -1
"""Ray starts an actor again as often as it dies."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unit:
    """One placement group with its two actors."""

    group: Any
    agent: Any
    runner: Any


class Units:
    """The runners of one hub, as `tensorhub.local.launcher` starts and ends them. Used in one event loop."""

    def __init__(self, plan: HubPlan) -> None:
        self._plan = plan
        self._units: dict[str, Unit] = {}

    @property
    def runners(self) -> tuple[str, ...]:
        """Those that are there, or wait for a node."""
        return tuple(self._units)

    def find(self, runners: tuple[str, ...]) -> None:
        """Take up those of an actor before this one."""
        for runner in runners:
            with contextlib.suppress(ValueError):
                agent, actor = (ray.get_actor(self._plan.actor(each), NAMESPACE) for each in (agent_of(runner), runner))
                self._units[runner] = Unit(get_placement_group(self._plan.actor(runner)), agent, actor)

    async def start_runner(self, runner: str) -> None:
        """Ask Ray for a place for a runner and its agent; they start once there is one."""
        try:
            self._units[runner] = await asyncio.to_thread(self._make, runner)
        except ray.exceptions.RayError as why:
            raise OSError(f"Ray has no answer: {why}") from None

    def _make(self, runner: str) -> Unit:
        plan = self._plan
        group = placement_group(plan.bundles, strategy="STRICT_PACK", name=plan.actor(runner), lifetime="detached")
        agent, actor = (
            actor_class()
            .options(
                name=plan.actor(process),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=ALWAYS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                **resource_options(resources),
            )
            .remote(process, plan)
            for index, (process, resources) in enumerate(
                ((agent_of(runner), plan.agent_resources), (runner, plan.runner_resources))
            )
        )
        return Unit(group, agent, actor)

    def notify_runner(self, runner: str) -> None:
        """Tell a runner that its machine goes away soon."""
        self._units[runner].runner.notify.remote()

    async def end_runner(self, runner: str) -> None:
        """End a runner, then its agent, and give their place back."""
        unit = self._units.pop(runner)
        for actor in (unit.runner, unit.agent):
            await stop_actor(actor)
        await asyncio.to_thread(remove_placement_group, unit.group)

    async def end_all(self) -> None:
        """End all of them side by side."""
        await asyncio.gather(*(self.end_runner(runner) for runner in self.runners))

    async def places(self) -> dict[str, str | None]:
        """Return the Ray node of each runner, or None where it waits for one."""
        # Runners come and go while they are asked.
        actors = {name: unit.runner for name, unit in self._units.items()}
        found = await asyncio.gather(*(node_of(actor) for actor in actors.values()))
        return dict(zip(actors, found, strict=True))

    async def reason(self, process: str) -> str:
        """Return why an agent or a runner is not ready: what it waits for, or what it has written last."""
        unit = self._units[runner_of(process)]
        actor = unit.runner if process in self._units else unit.agent
        if await node_of(actor) is None:
            return f"no node has {' and '.join(map(str, self._plan.bundles))} free, which {process} and the other take"
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                return f"{process} said last: {await actor.said.remote()}"
        return f"the actor of {process} is starting"


async def node_of(actor: Any) -> str | None:  # noqa: ANN401 (Ray has no type for it)
    """Return the Ray node that an actor is on, or None where it has none now."""
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            node, _ = await actor.place.remote()
            return str(node)
    return None


async def stop_actor(actor: Any) -> None:  # noqa: ANN401
    """Have an actor end its process in good order, and end the actor."""
    if await node_of(actor) is not None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(STOP_S_MAX):
                await actor.stop.remote()
    # Without a node it has no process, and waits for nothing more after this.
    await asyncio.to_thread(ray.kill, actor, no_restart=True)
