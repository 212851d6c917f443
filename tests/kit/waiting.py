"""Waits with bounds, and processes that are stopped, woken, killed and looked for."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from inspect import isawaitable
from pathlib import Path
from typing import Final, TypeVar

from tests.bounds import WAIT_S
from tests.stopping import stop

LOOK_S: Final = 0.01
T = TypeVar("T")
Condition = Callable[[], object | Awaitable[object]]


async def until(condition: Condition, what: str = "a condition holds", timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if await found if isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s that {what}"
        await asyncio.sleep(LOOK_S)


async def until_answer(
    ask: Callable[[], Awaitable[T]],
    holds: Callable[[T], object],
    what: str = "the answer is as wanted",
    timeout_s: float = WAIT_S,
) -> T:
    deadline = time.monotonic() + timeout_s
    while not holds(found := await ask()):
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s that {what}: {found}"
        await asyncio.sleep(LOOK_S)
    return found


async def retried(
    call: Callable[[], Awaitable[T]], *errors: type[Exception], timeout_s: float = WAIT_S, pause_s: float = LOOK_S
) -> T:
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(*errors):
                return await call()
            await asyncio.sleep(pause_s)


class Missed(Exception):
    """A blow did not meet what it was to meet, so the attempt shows nothing."""


async def met(attempt: Callable[[int], Awaitable[T]], attempts: int = 20) -> T:
    """Attempt until a blow meets: on a busy machine a read may be over before the test is given the processor."""
    for number in range(attempts):
        with contextlib.suppress(Missed):
            return await attempt(number)
    raise AssertionError(f"of {attempts} blows none met the middle")


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        time.sleep(LOOK_S)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            wake(pid)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found
