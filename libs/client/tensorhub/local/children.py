"""Keeps child processes running: starts them, starts dead ones again, and ends them all.

While the set is starting a child that dies is an error, told with the last line of its log. Once it is settled a dead
child is started again, after a wait that doubles from `BACKOFF_FIRST_S` to `BACKOFF_MAX_S` and begins anew when the
child had been up for `STEADY_S`. A child that ends again and again is told with the reason that it gave, and then only
now and then. Always true: a child ends however its parent ends (see `tether`); `stop` returns
within a bound with no child left; what a child writes goes to its own log, which is set aside when it has grown past
`LOG_BYTES_MAX`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tensorhub.local import tether
from tensorhub_common.errors import TensorHubError
from tensorhub_common.runtime.supervision import OnFault, Supervisor

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
STEADY_S: Final = 10.0
STOP_S: Final = 5.0
KILL_S: Final = 5.0
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
TAIL_BYTES: Final = 2000
REASON_CHARS_MAX: Final = 400

LOOP_DEATHS: Final = 3
"""A child that has died so often, and was never up for `STEADY_S` in between, is in a loop."""

LOOP_TOLD_S: Final = 60.0
"""How often a restart loop is logged."""

Result = TypeVar("Result")

_log: Final = logging.getLogger(__name__)


class ChildDied(TensorHubError):
    """A child process ended while the set was starting. The message holds the last line of its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: `environment` is all that the child sees; `is_last` children end after all others have."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    is_last: bool = False


@dataclass(slots=True)
class Child:
    """One child and the process that is its present life."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    log_start: int
    restarts: int = 0
    keeping: asyncio.Task[None] | None = None
    deaths: int = 0
    """How often it has died since it was up for `STEADY_S`."""
    told_at: float = -LOOP_TOLD_S
    """When it was told that it dies again and again."""
    is_wanted: bool = True
    """Whether it is started again when it ends."""

    @property
    def pid(self) -> int:
        """The process id of its present life."""
        return self.process.pid


class Children:
    """The set. Use it in one event loop, in a thread that lives as long as the children shall: best the main thread."""

    def __init__(self, on_restart: Callable[[Child], None] | None = None, on_fault: OnFault | None = None) -> None:
        """`on_restart` is called at each restart of a child; `on_fault`, with an error that ends its restarts."""
        self._on_restart = on_restart
        self._work = Supervisor("the hub's processes", on_fault)
        self._children: list[Child] = []
        self._is_settled = False
        self._stopping = asyncio.Event()
        self._fallen: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child and keep it."""
        child = Child(spec, *await self._spawn(spec))
        self._children.append(child)
        child.keeping = self._work.start(self._keep(child), f"keeping {spec.name}")
        return child

    async def while_starting(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do some work that needs the children. Raises `ChildDied` as soon as one of them ends meanwhile."""
        task = self._work.start(work, "waiting for the processes", awaited=True)
        waited: set[asyncio.Future[Any]] = {task, self._fallen}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if self._fallen.done():
            raise self._death(self._fallen.result())
        return task.result()

    def settle(self) -> None:
        """Say that all have started: from now on a dead child is started again. Raises `ChildDied` if one is dead."""
        if self._fallen.done():
            raise self._death(self._fallen.result())
        self._is_settled = True

    async def stop(self) -> None:
        """End all children: first those that need the others, with SIGTERM and after `STOP_S` with SIGKILL."""
        self._stopping.set()
        for is_last in (False, True):
            await self._stop([child for child in self._children if child.spec.is_last == is_last])
        await self._work.close()

    async def end(self, child: Child) -> None:
        """End one child, as `stop` does, and keep it no more."""
        child.is_wanted = False
        await self._stop([child])
        if child in self._children:
            self._children.remove(child)

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a child, if it runs."""
        _signal(child.process, number)

    async def _stop(self, children: list[Child]) -> None:
        if not children:
            return
        for child in children:
            _signal(child.process, signal.SIGTERM)
        # The processes, since their keepers may live no more; and these, since one may be starting a process anew.
        ends = {
            self._work.start(child.process.wait(), f"the end of {child.spec.name}", awaited=True) for child in children
        }
        keeping = {child.keeping for child in children if child.keeping is not None}
        _, late = await asyncio.wait({*ends, *keeping}, timeout=STOP_S)
        if late:
            for child in children:
                if child.process.returncode is None:
                    _log.warning("%s (%d) did not end within %g s: killed", child.spec.name, child.pid, STOP_S)
                    # With all that it has started itself.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
            await asyncio.wait(late, timeout=KILL_S)

    async def _keep(self, child: Child) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            began = time.monotonic()
            code = await child.process.wait()
            if self._stopping.is_set() or not child.is_wanted:
                return
            if not self._is_settled:
                if not self._fallen.done():
                    self._fallen.set_result(child)
                return
            if time.monotonic() - began > STEADY_S:
                backoff_s, child.deaths = BACKOFF_FIRST_S, 0
            child.deaths += 1
            _tell_death(child, code)
            if await self._is_stopped_within(backoff_s) or not child.is_wanted:
                return
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            await self._restart(child)

    async def _restart(self, child: Child) -> None:
        try:
            child.process, child.log_start = await self._spawn(child.spec)
        except OSError as error:
            # No memory, no process numbers: the dead process stays, and `_keep` comes back after a longer wait.
            _log.warning("%s can't be started again yet: %s", child.spec.name, error)
            return
        child.restarts += 1
        if self._stopping.is_set() or not child.is_wanted:
            _signal(child.process, signal.SIGTERM)
        elif self._on_restart is not None:
            self._on_restart(child)

    async def _is_stopped_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _spawn(self, spec: ChildSpec) -> tuple[asyncio.subprocess.Process, int]:
        _set_aside(spec.log)
        with spec.log.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(Path(tether.__file__)),
                str(os.getpid()),
                *spec.command,
                env=dict(spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # In a session of its own: Ctrl-C reaches us alone, and we end the children in their order.
                start_new_session=True,
            )
        return process, log_start

    def _death(self, child: Child) -> ChildDied:
        return ChildDied(
            f"{child.spec.name} ended {_manner(child.process.returncode)} while it was starting: "
            f"{reason(child.spec.log, child.log_start)} (all that it said is in {child.spec.log})"
        )


def _tell_death(child: Child, code: int | None) -> None:
    name, manner = child.spec.name, _manner(code)
    if child.deaths < LOOP_DEATHS:
        _log.warning("%s (%d) ended %s; it is started again", name, child.pid, manner)
        return
    now = time.monotonic()
    if now - child.told_at < LOOP_TOLD_S:
        return
    child.told_at = now
    why = reason(child.spec.log, child.log_start)
    _log.error(
        "%s has ended %d times in a row, the last time %s: %s. It is started again every %g s; see %s",
        *(name, child.deaths, manner, why, BACKOFF_MAX_S, child.spec.log),
    )


def reason(log: Path, start: int = 0) -> str:
    """Return the last line of a log, of what follows byte `start`: there a process says why it ends."""
    return tail(log, start).splitlines()[-1].strip()[:REASON_CHARS_MAX]


def tail(log: Path, start: int = 0) -> str:
    """Return the end of a log, of what follows byte `start`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").strip() or "(it is empty)"
    except OSError as error:
        return f"(it can't be read: {error})"


def _set_aside(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".old.log"))


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _manner(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"by {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"
    return f"with exit code {code}"
