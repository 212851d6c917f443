"""Supervision: every task, timer, callback and thread of a service runs under a `Supervisor`, which owns its errors.

An owner (a job, a connection, a service) has one supervisor. An error that escapes from something it runs is logged
once with its traceback, counted by owner, and handed to the first of these that can end it in a defined way: the
handler of that one task (a call fails), else the owner's (a job is set aside), else the process's last resort (the
process ends, and is started anew). Nothing is left to asyncio's "exception was never retrieved".

Invariants:
- An escaped error is logged, counted and handed on exactly once, in the thread of the event loop.
- A handler that itself raises goes to the next one: task, owner, process.
- After `close` no timer or callback of the owner runs, and every task has ended, or `CLOSE_S_MAX` has passed.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

CLOSE_S_MAX: Final = 5.0
"""How long `close` waits for cancelled tasks."""

REPEAT_S: Final = 60.0
"""The same fault of the same owner is logged again, with its count, after this time."""

OWNERS_MAX: Final = 256
"""Faults are counted by owner for this many owners; those of further ones are counted together."""

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log: Final = logging.getLogger(__name__)


class Fault(NamedTuple):
    """An error that escaped. `owner` and `work` say from where, in words for a log line."""

    owner: str
    work: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.owner}: {self.work} failed: {self.error!r}"


OnFault = Callable[[Fault], None]


def log_only(_: Fault) -> None:
    """End a fault where it is: the work is given up, and all else goes on. The fault is logged and counted."""


class _Process:
    """What all supervisors of a process share."""

    def __init__(self) -> None:
        self.last_resort: OnFault | None = None
        self.counts: dict[str, int] = {}
        self._logged: dict[tuple[str, str, type[BaseException]], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def report(self, fault: Fault) -> None:
        """Count the fault, and log it unless the same one was logged within `REPEAT_S`."""
        with self._lock:
            owner = fault.owner if fault.owner in self.counts or len(self.counts) < OWNERS_MAX else "others"
            self.counts[owner] = self.counts.get(owner, 0) + 1
            key, now = (owner, fault.work, type(fault.error)), time.monotonic()
            if len(self._logged) >= OWNERS_MAX and key not in self._logged:
                self._logged.clear()
            logged_at, unsaid = self._logged.get(key, (-REPEAT_S, 0))
            due = now - logged_at >= REPEAT_S
            self._logged[key] = (now, 0) if due else (logged_at, unsaid + 1)
        if due:
            again = f" ({unsaid} more since the last such line)" if unsaid else ""
            _log.error("%s%s", fault, again, exc_info=fault.error)


_process: Final = _Process()


def set_last_resort(on_fault: OnFault | None) -> None:
    """Say what ends a fault that no owner handles. Only a program's `main` calls this; without it faults are logged."""
    _process.last_resort = on_fault


def fault_counts() -> Mapping[str, int]:
    """Return how many errors have escaped so far, by owner."""
    return dict(_process.counts)


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Report what reaches the event loop itself, such as an error in a library's own task. Only `main` calls this."""

    def escaped(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context.get("message", "unknown"))
        _process.report(Fault("event loop", str(context.get("message", "a callback")), error))

    loop.set_exception_handler(escaped)


async def result_of(task: asyncio.Task[T]) -> T:
    """Wait for a task that others may wait for too, and return or raise what it has; being cancelled ends the waiting.

    `asyncio.shield` does the same with a future of its own, whose error is lost, and reported by asyncio as such, where
    the one who waits is cancelled in the turn in which the task fails.
    """
    await asyncio.wait((task,))
    return task.result()


class Supervisor:
    """The background work of one owner.

        self._work = Supervisor("job 'run-7'", on_fault=self._set_aside)
        self._work.start(self._follow(), "following the log")
        await self._work.close()

    Everything but `guarded` is called in the thread of the running event loop.
    """

    def __init__(self, owner: str, on_fault: OnFault | None = None) -> None:
        self.owner = owner
        self._on_fault = on_fault
        self._tasks: dict[asyncio.Task[Any], tuple[str, OnFault | None]] = {}
        self._is_closed = False

    # ------------------------------------------------------------------------------------------- tasks

    def start(
        self, work: Coroutine[Any, Any, T], what: str, on_fault: OnFault | None = None, *, awaited: bool = False
    ) -> asyncio.Task[T]:
        """Run a task. `what` names it in logs.

        An error that escapes is a fault, which `on_fault` handles, or the owner's handler where there is none. Where
        others await the task (`awaited`), its error is theirs: it is no fault, whether or not anybody still waits.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"{self.owner}: {what}")
        self._tasks[task] = (what, on_fault)
        task.add_done_callback(self._is_awaited_over if awaited else self._is_over)
        return task

    def group(self) -> "TaskGroup":
        """Return an empty group. Its tasks are this supervisor's, and are counted and awaited together."""
        return TaskGroup(self)

    @property
    def tasks(self) -> int:
        """How many tasks are running."""
        return len(self._tasks)

    def _is_over(self, task: asyncio.Task[Any]) -> None:
        what, on_fault = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault(what, error, on_fault)

    def _is_awaited_over(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # So that asyncio knows it as retrieved.

    # ------------------------------------------------------------------------------------------- callbacks

    def guarded(self, function: Callable[[*Args], object], what: str) -> Callable[[*Args], None]:
        """Return the callback as one that never raises: its error is a fault. After `close` it does nothing."""

        def run(*args: *Args) -> None:
            self._run(function, what, args)

        return run

    def call_soon(self, function: Callable[[*Args], object], *args: *Args, what: str) -> asyncio.Handle:
        """Call the function in the loop's next turn."""
        return asyncio.get_running_loop().call_soon(self._run, function, what, args)

    def call_later(
        self, delay_s: float, function: Callable[[*Args], object], *args: *Args, what: str
    ) -> asyncio.TimerHandle:
        """Call the function after `delay_s`."""
        return asyncio.get_running_loop().call_later(delay_s, self._run, function, what, args)

    def call_at(self, when: float, function: Callable[[*Args], object], *args: *Args, what: str) -> asyncio.TimerHandle:
        """Call the function at the loop's time `when`, in seconds."""
        return asyncio.get_running_loop().call_at(when, self._run, function, what, args)

    def _run(self, function: Callable[[*Args], object], what: str, args: tuple[*Args]) -> None:
        if self._is_closed:
            return
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 (the supervisor is where every escaped error ends)
            self.fault(what, error)

    # ------------------------------------------------------------------------------------------- threads

    def thread(self, function: Callable[[], object], what: str, on_fault: OnFault | None = None) -> threading.Thread:
        """Return a daemon thread, not yet started, whose escaped error is a fault that the loop's thread handles."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 (the supervisor is where every escaped error ends)
                try:
                    loop.call_soon_threadsafe(self.fault, what, error, on_fault)
                except RuntimeError:
                    # The loop has ended, and with it everybody who could handle this.
                    _process.report(Fault(self.owner, what, error))

        return threading.Thread(target=run, name=what, daemon=True)

    # ------------------------------------------------------------------------------------------- faults

    def fault(self, what: str, error: BaseException, on_fault: OnFault | None = None) -> None:
        """Take an escaped error: log it, count it, and hand it to the first handler that takes it."""
        fault = Fault(self.owner, what, error)
        _process.report(fault)
        for handler in (on_fault, self._on_fault, _process.last_resort):
            if handler is None:
                continue
            try:
                handler(fault)
            except Exception as again:  # noqa: BLE001 (a handler that fails hands the fault to the next one)
                _process.report(Fault(self.owner, f"the handler of a fault in {what}", again))
            else:
                return

    async def close(self) -> None:
        """Cancel every task and wait for them, at most `CLOSE_S_MAX`; timers and callbacks do nothing from now on."""
        self._is_closed = True
        ending = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        if ending:
            _, late = await asyncio.wait(ending, timeout=CLOSE_S_MAX)
            for task in late:
                _log.warning("%s did not end within %g s of being cancelled", task.get_name(), CLOSE_S_MAX)


class TaskGroup:
    """Some tasks of one owner: those of one connection, for example. A task leaves the group when it has ended."""

    def __init__(self, work: Supervisor) -> None:
        self._work = work
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], what: str, on_fault: OnFault | None = None) -> asyncio.Task[T]:
        """Run a task of the owner, as `Supervisor.start` does."""
        return self.add(self._work.start(work, what, on_fault))

    def add(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Take in a task that the supervisor has started."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel every task of the group."""
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait until every task that is in the group now has ended. Their errors go where the supervisor's go."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
