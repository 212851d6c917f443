"""One job of the copy pool: what all kinds of them have in common. `CopyPool` of `copying.py` runs them.

A job is cut into tasks, which the pool's threads do one after another; what a task does is the kind's.

Always true:
- A job ends only when none of its threads writes any more, also when it was stopped, failed, or its awaiting task was
  cancelled. It holds its views until then, so nothing of them can be unmapped.
- It costs one wake-up of the event loop, however many tasks it has.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import xxhash

from tensorhub_agent.runtime.shield import settled
from tensorhub_common.errors import TensorHubError


class CopyStopped(TensorHubError):
    """The job was stopped before its end: what stands in the destination is undefined."""


class Job(ABC):
    """Work under way. Wait for its result, or `stop()` it; it holds its views until it has ended."""

    def __init__(self, destination: memoryview, source: memoryview | None) -> None:
        """Prepare; `CopyPool` starts it. Without `source` the destination is only looked at."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()
        self._views: tuple[memoryview, memoryview | None] | None = (destination, source)
        self._bounds: list[int] = []
        self._next_task = 0
        self._turns = 0
        self._stopped = False
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Begin no further task. The job ends when the tasks under way have (each takes some milliseconds)."""
        self._stopped = True

    async def ended(self) -> None:
        """Return once no thread touches the views any more.

        A cancelled caller stops the job, and is still kept here until the job has ended: that is the whole point. The
        wait is bounded by the tasks under way, which are some milliseconds of computing.
        """
        await settled(self._over, self.stop)

    async def done(self) -> None:
        """Wait for the end. Raises `CopyStopped` when it was stopped before all was done."""
        await self.ended()
        if self._failure is not None:
            raise self._failure

    def begin(self, bounds: list[int], threads: int) -> int:
        """Take the cut into tasks: task i is the items from bound i to bound i + 1. Return how many threads to use."""
        self._bounds = bounds
        self._turns = min(threads, len(bounds) - 1)
        if not self._turns:
            self._views = None
            self._over.set_result(None)
        return self._turns

    def run_task(self, hasher: xxhash.xxh3_128) -> bool:
        """Do the next task, in a thread of the pool. False: none is left, and the thread is done with the job."""
        with self._lock:
            number = self._next_task
            claimed = number < len(self._bounds) - 1
            if claimed and self._stopped:
                claimed = False
                self._failure = self._failure or CopyStopped("the copy was stopped; ask for its pieces again")
            if claimed:
                self._next_task += 1
            else:
                self._turns -= 1
            ended = not self._turns
        if claimed:
            self._run(self._bounds[number], self._bounds[number + 1], hasher)
        elif ended:
            self._end()
        return claimed

    def add_done_callback(self, callback: Callable[[Self], None]) -> None:
        """Call back in the loop's thread once the job has ended."""
        self._over.add_done_callback(lambda _: callback(self))

    @abstractmethod
    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        """Do the items from `first` to before `last`, in a thread of the pool."""

    def _run(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        try:
            self._do(first, last, hasher)
        except Exception as why:  # noqa: BLE001 (whatever it is, the waiting task must hear it)
            self._failure = self._failure or why
            self._stopped = True

    def _end(self) -> None:
        self._views = None
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            return  # The loop is closed: nobody waits any more.

    def _tell(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
