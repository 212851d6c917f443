"""Work that the pool's threads do: a job, cut into tasks, that ends only when no thread touches its memory any more."""

import asyncio
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Self

import numpy as np
import xxhash

from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.memory_region import MemoryRegion, host
from tensorhub_agent.runtime.shield import wait_shielded
from tensorhub_common.errors import TensorHubError

TASK_BYTES_MAX: Final = 16 * 1024 * 1024
TASK_BYTES_MIN: Final = 1024 * 1024
TASKS_PER_THREAD: Final = 4
"""How many tasks a batch is cut into for each thread, within the two bounds: the last ones end nearly together."""

PIECE_COST_BYTES: Final = 16 * 1024
"""What a piece costs beside its bytes, in bytes: with it tasks of tiny pieces are as long as the others."""

memmove: Final = ctypes.CDLL(None).memmove
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None


class CopyStopped(TensorHubError):
    """The job was stopped before its end: the destination is undefined."""


class PoolBatch(ABC):
    """Work under way. Wait for its result, or `stop()` it; it holds its views until it has ended."""

    def __init__(self) -> None:
        """Prepare; `CopyPool` starts it."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()
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
        await wait_shielded(self._over, self.stop)

    async def done(self) -> None:
        """Wait for the end. Raises `CopyStopped` when it was stopped before all was done."""
        await self.ended()
        if self._failure is not None:
            raise self._failure

    def bounds(self, nbytes: Columns, threads: int) -> list[int]:
        """Cut items, of which item i has `nbytes[i]` bytes, into tasks: see `begin`."""
        return task_bounds(nbytes, threads, TASK_BYTES_MIN, TASK_BYTES_MAX)

    def begin(self, bounds: list[int], threads: int) -> int:
        """Take the cut into tasks: task i is the items from bound i to bound i + 1. Return how many threads to use."""
        self._bounds = bounds
        self._turns = min(threads, len(bounds) - 1)
        if not self._turns:
            self._let_go()
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

    @property
    def failure(self) -> Exception | None:
        """Why it has not done all."""
        return self._failure

    def add_done_callback(self, callback: Callable[[Self], None]) -> None:
        """Call back in the loop's thread once the job has ended."""
        self._over.add_done_callback(lambda _: callback(self))

    @abstractmethod
    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        """Do the items from `first` to before `last`, in a thread of the pool."""

    def _run(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        try:
            self._do(first, last, hasher)
        except Exception as why:  # noqa: BLE001 (whatever it is, the waiting task must be told)
            self._failure = self._failure or why
            self._stopped = True

    @abstractmethod
    def _let_go(self) -> None:
        """Hold the memory no longer: no thread touches it any more."""

    def _end(self) -> None:
        self._let_go()
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            return  # The loop is closed: no task waits.

    def _tell(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


class HostBatch(PoolBatch):
    """Work on host memory, which threads of the pool do themselves."""

    def __init__(self, destination: MemoryRegion, source: MemoryRegion | None) -> None:
        """Prepare. Without `source` the destination is only looked at. Raises `TypeError` for other memory."""
        super().__init__()
        self._views: tuple[memoryview, memoryview | None] | None = (
            host(destination),
            None if source is None else host(source),
        )

    def _let_go(self) -> None:
        self._views = None


def address_of(view: MemoryRegion) -> int:
    """Return where a region begins, in this process's memory or in the device's."""
    if isinstance(view, DeviceRegion):
        return view.address
    # numpy, because ctypes gives no address of a read-only buffer. The job keeps the view, which keeps the memory.
    return int(np.frombuffer(host(view), dtype=np.uint8).ctypes.data) if len(view) else 0


def task_bounds(nbytes: Columns, threads: int, bytes_min: int, bytes_max: int) -> list[int]:
    """Cut pieces into tasks of about equal work; task i is the pieces from bound i to bound i + 1."""
    if not len(nbytes):
        return [0]
    cost = np.cumsum(nbytes + PIECE_COST_BYTES)
    wanted = min(bytes_max, max(bytes_min, int(cost[-1]) // (threads * TASKS_PER_THREAD)))
    task_of_piece = (cost - 1) // wanted
    inner: list[int] = (np.flatnonzero(np.diff(task_of_piece)) + 1).tolist()
    return [0, *inner, len(nbytes)]
