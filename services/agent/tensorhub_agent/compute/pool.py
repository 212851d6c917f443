"""Copying and hashing of memory on native threads, which is the hot path of the agent.

`CopyPool` runs two kinds of work. A job (`PoolBatch`) is cut into tasks, which the pool's threads do one after another;
the kind of the job decides what a task does. A chore (`BackgroundTask`) is work that is not urgent.

A `CopyBatch` copies a batch of spans from one view to another. It returns the digest of each piece, taken in the
destination *after* the copy. A digest of the source taken before the copy could be of bytes that were never sent, when
the source changes in the middle. A piece is copied part by part, and each part is hashed while it is still in the
core's cache. Hashing from memory would use bandwidth that the copying needs.

Calls through ctypes release the GIL, and so does xxhash on more than 100 KB. Slice assignment between memoryviews does
not. A thread that has released the GIL must get it back, and waits up to `sys.getswitchinterval()` for it while the
event loop computes. For this reason parts are not smaller, and an agent sets a short switch interval.

Invariants:
- A job ends only when none of its threads writes any more, also when it was stopped, failed, or its awaiting task was
  cancelled. Until then no other code may write into its destination.
- A job holds its views until it ends, so none of their memory can be unmapped before.
- A job costs one wake-up of the event loop, however many tasks it has.
- Nothing outside the batch's spans is written. Spans that do not fit are refused before the first byte.
- Jobs take turns, task by task, so hashing 70 GB for one shard does not delay a small read of another.
- A chore begins only when no job has a turn.
- A chore's `over` is done only when no thread does the work any more. From then on, what the work reads may change or
  be freed, and the chore keeps no reference to it.
"""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import xxhash

from tensorhub_agent.compute.batch import TASK_BYTES_MAX, HostBatch, PoolBatch, address_of, memmove
from tensorhub_agent.compute.device_copy import DeviceCopyBatch, device_of
from tensorhub_agent.compute.spans import Spans, check_fits, columns
from tensorhub_agent.devices.columns import Columns, cut_to_chunks, join_adjacent
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.runtime.shield import wait_shielded
from tensorhub_common.devices.device import DeviceLost
from tensorhub_common.errors import TensorHubError
from tensorhub_common.runtime.supervision import Supervisor


class BackgroundTask:
    """One such work. `CopyPool.background` has it done."""

    def __init__(self, work: Callable[[], None], others: Callable[[], bool]) -> None:
        """Prepare; `others` tells whether jobs have turns."""
        self._loop = asyncio.get_running_loop()
        self._work: Callable[[], None] | None = work
        self._others = others
        self._stopped = False
        self._failure: Exception | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()

    def stop(self) -> None:
        """Don't begin any more."""
        self._stopped = True

    def run_task(self, _: object) -> bool:
        """Do the work, in a thread of the pool. True: jobs have turns, so it wants another one behind them."""
        if not self._stopped and self._others():
            return True
        work, self._work = self._work, None
        try:
            if not self._stopped and work is not None:
                work()
        except Exception as why:  # noqa: BLE001 (whatever it is, the waiting task must be told)
            self._failure = why
        del work
        with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits.
            self._loop.call_soon_threadsafe(self._tell)
        return False

    def _tell(self) -> None:
        if self.over.done():
            return
        if self._failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(self._failure)


THREADS_MAX: Final = 4
"""More threads than this don't make memory faster."""

PART_BYTES: Final = 512 * 1024
"""So much is copied, then hashed. Half of a usual L2 cache; above it, glibc may store past the cache."""

JOBS_MAX: Final = 4096
"""The most jobs that a pool has under way; the windows of all reads together stay far below it."""

JOIN_S: Final = 5.0

AnyJob = TypeVar("AnyJob", bound=PoolBatch)


class CopyPoolFull(TensorHubError):
    """More than `JOBS_MAX` jobs are under way."""


class CopyBatch(HostBatch):
    """A batch of spans under way. `await job.result()`, or `stop()` it; it holds its views until it has ended."""

    def __init__(
        self, destination: MemoryRegion, source: MemoryRegion | None, spans: Spans, digests: bytearray
    ) -> None:
        """Prepare; `CopyPool` starts it. Without `source` the destination is only hashed."""
        super().__init__(destination, source)
        self._to_address = address_of(destination)
        self._from_address = None if source is None else address_of(source)
        self._spans = spans
        self._digests = digests

    async def result(self) -> bytes:
        """Wait for the end; return the pieces' digests one after another (empty with digests off).

        Raises `CopyStopped` when it was stopped before all was done.
        """
        await self.done()
        return bytes(self._digests)

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        if self._digests:
            self._copy_and_digest(first, last, hasher)
        else:
            self._copy(first, last)

    def _copy(self, first: int, last: int) -> None:
        spans, to_address, from_address = self._spans, self._to_address, self._from_address
        assert from_address is not None
        for piece in range(first, last):
            memmove(to_address + spans.to[piece], from_address + spans.origin[piece], spans.nbytes[piece])

    def _copy_and_digest(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        views = self._views
        assert views is not None
        nbytes, piece = self._spans.nbytes, first
        while piece < last:
            if nbytes[piece] > PART_BYTES:
                self._one_by_parts(piece, views[0], hasher)
                piece += 1
            else:
                piece = self._several_at_once(piece, last, views[0])

    def _one_by_parts(self, piece: int, view: memoryview, hasher: xxhash.xxh3_128) -> None:
        """Copy and hash a piece that is larger than a part."""
        spans = self._spans
        to, size, end = spans.to[piece], spans.nbytes[piece], spans.to[piece] + spans.nbytes[piece]
        to_address = self._to_address
        offset = None if self._from_address is None else self._from_address + spans.origin[piece] - to
        hasher.reset()
        for at in range(to, to + size, PART_BYTES):
            stop = min(at + PART_BYTES, end)
            if offset is not None:
                memmove(to_address + at, offset + at, stop - at)
            hasher.update(view[at:stop])
        self._digests[piece * PIECE_DIGEST_BYTES : (piece + 1) * PIECE_DIGEST_BYTES] = hasher.digest()

    def _several_at_once(self, piece: int, last: int, view: memoryview) -> int:
        """Copy pieces that follow one another at both ends in one go, a part at most; then hash each."""
        to, origin, nbytes = self._spans.to, self._spans.origin, self._spans.nbytes
        begin, size, after = piece, nbytes[piece], piece + 1
        while (
            after < last
            and to[after] == to[begin] + size
            and origin[after] == origin[begin] + size
            and size + nbytes[after] <= PART_BYTES
        ):
            size += nbytes[after]
            after += 1
        if self._from_address is not None:
            memmove(self._to_address + to[begin], self._from_address + origin[begin], size)
        digest, at = xxhash.xxh3_128_digest, to[begin]
        for number in range(begin, after):
            stop = at + nbytes[number]
            self._digests[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = digest(view[at:stop])
            at = stop
        return after


class CopyPool:
    """Threads that copy and hash. One for an agent; its methods belong to the thread of an event loop.

    The threads start with the first work. A job's error is its own; one that escapes from a thread ends the process,
    and so does a GPU that is lost.
    """

    def __init__(self, threads: int = 0) -> None:
        """Take how many threads; 0 means one for each core that this process may use, `THREADS_MAX` at most."""
        self.threads = threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._turns: SimpleQueue[PoolBatch | BackgroundTask | None] = SimpleQueue()
        self._chores = asyncio.Lock()
        """One chore at a time has a turn, so everything else in the queue is a job."""
        self._chore: BackgroundTask | None = None
        self._jobs: set[PoolBatch] = set()
        self._work = Supervisor("copying")
        self._workers: list[threading.Thread] = []

    def copy_and_digest(
        self, destination: MemoryRegion, source: MemoryRegion, spans: Spans, *, digests: bool = True
    ) -> "CopyBatch | DeviceCopyBatch":
        """Copy the spans; with `digests` the result is the digest of each piece, taken in the destination.

        Raises ValueError, and copies nothing, when a span does not fit into one of the views.
        """
        to, origin, nbytes = columns(spans)
        check_fits("source", len(source), origin, nbytes)
        check_fits("destination", len(destination), to, nbytes)
        if destination.readonly:
            raise ValueError("the destination can't be written")
        if (device := device_of(destination, source)) is not None:
            return self.start(
                DeviceCopyBatch(device, destination, source, (to, origin, nbytes), digests=digests), nbytes
            )
        if digests:
            job = CopyBatch(destination, source, spans, bytearray(len(nbytes) * PIECE_DIGEST_BYTES))
        else:
            to, origin, nbytes = cut_to_chunks(*join_adjacent(to, origin, nbytes), TASK_BYTES_MAX)
            job = CopyBatch(destination, source, Spans(to.tolist(), origin.tolist(), nbytes.tolist()), bytearray())
        return self.start(job, nbytes)

    def digest(self, view: MemoryRegion, spans: Spans) -> "CopyBatch | DeviceCopyBatch":
        """Hash the pieces in place: `nbytes[i]` bytes at `to[i]` of the view."""
        to, origin, nbytes = columns(spans)
        check_fits("view", len(view), to, nbytes)
        if (device := device_of(view)) is not None:
            return self.start(DeviceCopyBatch(device, view, None, (to, origin, nbytes), digests=True), nbytes)
        return self.start(CopyBatch(view, None, spans, bytearray(len(nbytes) * PIECE_DIGEST_BYTES)), nbytes)

    async def background(self, work: Callable[[], None]) -> None:
        """Do what takes about as long as a task, as soon as no job has a turn, however long that may be.

        It returns when no thread does the work any more; a cancelled caller is kept until then.
        """
        async with self._chores:
            chore = BackgroundTask(work, lambda: self._turns.qsize() > 0)
            self._begin()
            self._turns.put(chore)
            self._chore = chore
            try:
                await wait_shielded(chore.over, chore.stop)
            except DeviceLost as why:
                self._lost(why)
                raise
            finally:
                self._chore = None

    def _ended(self, job: PoolBatch) -> None:
        self._jobs.discard(job)
        if isinstance(job.failure, DeviceLost):
            self._lost(job.failure)

    def _lost(self, why: DeviceLost) -> None:
        """No work on that GPU can be done in this process. It ends, and its supervisor starts the next one."""
        self._work.fault("work on a GPU", why)

    def close(self) -> None:
        """Stop the jobs under way and let the threads end."""
        for job in self._jobs:
            job.stop()
        if self._chore is not None:
            self._chore.stop()
        for _ in self._workers:
            self._turns.put(None)
        for worker in self._workers:
            worker.join(JOIN_S)

    def _begin(self) -> None:
        for number in range(len(self._workers), self.threads):
            # Daemons, so that an exit never hangs on a copy that is under way.
            worker = self._work.thread(functools.partial(_work, self._turns), f"copy-{number}")
            self._workers.append(worker)
            worker.start()

    def start(self, job: AnyJob, nbytes: Columns) -> AnyJob:
        """Have a job done whose item i has `nbytes[i]` bytes; return it. Raises `CopyPoolFull`."""
        if len(self._jobs) >= JOBS_MAX:
            raise CopyPoolFull(f"{JOBS_MAX} copies are under way already; post less at a time")
        turns = job.begin(job.bounds(nbytes, self.threads), self.threads)
        if turns:
            self._begin()
            self._jobs.add(job)
            job.add_done_callback(self._ended)
        for _ in range(turns):
            self._turns.put(job)
        return job


def _work(turns: "SimpleQueue[PoolBatch | BackgroundTask | None]") -> None:
    hasher = xxhash.xxh3_128()
    while (job := turns.get()) is not None:
        if job.run_task(hasher):
            turns.put(job)
        # A thread that waits must not keep the last job's memory mapped.
        del job
    # The pool closes. A job that was put back behind the None must still end.
    with contextlib.suppress(Empty):
        while True:
            job = turns.get_nowait()
            if job is None:
                turns.put(None)
                return
            while job.run_task(hasher):
                pass
