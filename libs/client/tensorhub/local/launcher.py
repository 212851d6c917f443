"""Follows what a job's rollout manager wishes for: starts runners on this machine, and retires them. I/O but `changes`.

A runner that is to go is told first (SIGUSR1), so that its responses move to others; it ends once it has none.

Always true: there are never more than `most` runners, and those that are to stay are never fewer than `least`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.rollout.questions import InstanceStatus, RolloutStatus

LOOK_S: Final = 1.0
"""How often the manager is asked."""
ASK_S: Final = 5.0
"""So long it is waited for; then it is asked again."""
DRAIN_S_MAX: Final = 60.0
"""So long a runner that is to go may have responses; then it ends at the next look, and they go on elsewhere."""

_log: Final = logging.getLogger(__name__)


class RunnerProcesses(Protocol):
    """The runners of a hub, as processes. They are called runner-0, runner-1, and so on."""

    @property
    def runners(self) -> tuple[str, ...]:
        """Those that are kept running."""
        ...

    async def start_runner(self, runner: str) -> None:
        """Start one."""
        ...

    def notify_runner(self, runner: str) -> None:
        """Tell one that its machine goes away soon."""
        ...

    async def end_runner(self, runner: str) -> None:
        """End one."""
        ...


@dataclass(frozen=True, slots=True)
class Changes:
    """What to do with runners now."""

    start: tuple[str, ...] = ()
    notify: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


@dataclass(slots=True)
class Launcher:
    """Keeps as many runners as a manager wishes for, from `least` to `most`; `run` is its task."""

    processes: RunnerProcesses
    ask: Callable[[float], Awaitable[RolloutStatus]]
    """Return the state of the job's rollouts within a bound in seconds. Raises `RolloutUnavailable`."""
    least: int
    most: int
    leaving: dict[str, float] = field(default_factory=dict)
    """When each runner that is to go was told so, by the loop's time."""

    async def run(self) -> NoReturn:
        """Follow."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await self.ask(ASK_S)
            except TensorHubError as why:
                _log.debug("the rollout manager can't be asked: %s", why)
                continue
            await self._follow(found)

    async def _follow(self, found: RolloutStatus) -> None:
        if not found.has_gathered:
            # Who is missing there may have work all the same.
            return
        now = asyncio.get_running_loop().time()
        wished = self.least if found.wished is None else found.wished
        target = min(max(wished, self.least), self.most)
        names = runner_names(self.most)
        todo = changes(names, self.processes.runners, self.leaving, found.instances, target, now)
        if todo.start or todo.end:
            _log.info("%d runner(s) are wished for, of %d to %d", wished, self.least, self.most)
        for runner in todo.start:
            try:
                await self.processes.start_runner(runner)
            except OSError as why:
                # No memory, no process numbers: it is tried again at the next look.
                _log.warning("%s can't be started: %s", runner, why)
                break
        for runner in todo.notify:
            self.leaving.setdefault(runner, now)
            self.processes.notify_runner(runner)
        for runner in todo.end:
            self.leaving.pop(runner, None)
            await self.processes.end_runner(runner)


async def follow(job: str, address: NatsAddress, processes: RunnerProcesses, least: int, most: int) -> NoReturn:
    """Keep as many runners of a job as its manager wishes for."""
    registry = RegistryClient(job, address)
    manager = ManagerClient(registry)

    async def ask(timeout_s: float) -> RolloutStatus:
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await manager.ask("status", None, RolloutStatus, deadline)

    async with registry:
        await Launcher(processes, ask, least, most).run()
    raise AssertionError("a launcher follows until it is cancelled")


def runner_names(count: int) -> tuple[str, ...]:
    """Return what so many runners are called."""
    return tuple(f"runner-{number}" for number in range(count))


def changes(
    names: tuple[str, ...],
    runners: tuple[str, ...],
    leaving: Mapping[str, float],
    instances: tuple[InstanceStatus, ...],
    target: int,
    now: float,
) -> Changes:
    """Return what to do so that `target` runners stay. Pure.

    `names`: all that there may be. `runners`: those that are there. `leaving`: since when those of them are to go. Of
    those that stay, who has least to do goes first, and who keeps a version for others goes last.
    """
    by_name = {each.runner: each for each in instances}
    staying = [each for each in runners if each not in leaving]
    free = [each for each in names if each not in runners]
    start = free[: max(0, target - len(staying))]

    def worth(runner: str) -> tuple[bool, int, int]:
        at = by_name.get(runner)
        if at is None:
            return False, 0, -names.index(runner)
        return at.version_kept is not None, at.pending + at.executing, -names.index(runner)

    going = sorted(staying, key=worth)[: max(0, len(staying) - target)]
    # One that was told and restarted since, or did not hear it, is told again. One that still starts has nothing.
    notify = [each for each in (*going, *leaving) if each in by_name and by_name[each].state != "leaving"]

    def has_ended(runner: str, since: float) -> bool:
        at = by_name.get(runner)
        has_none = at is None or (at.state == "leaving" and not at.pending + at.executing)
        return has_none or now - since >= DRAIN_S_MAX

    unheard = [each for each in going if each not in by_name]
    end = [*unheard, *(each for each, since in leaving.items() if has_ended(each, since))]
    return Changes(tuple(start), tuple(each for each in notify if each not in end), tuple(end))
