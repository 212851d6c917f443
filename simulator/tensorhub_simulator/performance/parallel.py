"""Many cases run side by side, each in a child process of this one, and their progress on stderr.

`Bar` shows how far the runs are: a bar on a terminal, a line now and then elsewhere.

Invariants:
- A process ends with the one that has started it, however that one ends.
- Only the process that started the others receives Ctrl-C. It prints one line, and no process goes on to compute a
  result that is not awaited.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from types import TracebackType
from typing import Final, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tensorhub_simulator.performance.comparison import BaselineComparison, Case, gpus_of, pair_of
from tensorhub_simulator.performance.config import ClusterError

T = TypeVar("T")
R = TypeVar("R")


def pairs(todo: Sequence[Case], processes: int, done: Callable[[], None]) -> list[BaselineComparison]:
    """Run many cases with their baselines, as `side_by_side` does."""
    return side_by_side(pair_of, todo, lambda case: gpus_of(case.cluster), processes, done)


def side_by_side(
    run: Callable[[T], R], todo: Sequence[T], size_of: Callable[[T], float], processes: int, done: Callable[[], None]
) -> list[R]:
    """Run many cases, several at once; `done` hears when one has ended. The order is that of the cases.

    `run` is a function of a module. Raises `ClusterError` where a process dies.
    """
    if processes == 1:
        found = []
        for case in todo:
            found.append(run(case))
            done()
        return found
    with _pool(processes) as pool:
        futures = _submitted(pool, run, todo, size_of)
        for future in futures.values():
            future.add_done_callback(lambda ended: done() if _succeeded(ended) else None)
        try:
            return [futures[number].result() for number in range(len(todo))]
        except BrokenProcessPool:
            raise ClusterError(
                "a process of the simulation has died, perhaps for lack of memory: try fewer at once (--processes 1)"
            ) from None


@contextmanager
def _pool(processes: int) -> Generator[ProcessPoolExecutor]:
    """Make a pool whose processes are ended when the block fails, instead of waited for."""
    before = active_children()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                if child not in before:
                    child.kill()
            raise


def _submitted(
    pool: ProcessPoolExecutor, run: Callable[[T], R], todo: Sequence[T], size_of: Callable[[T], float]
) -> dict[int, Future[R]]:
    """Hand out the cases, the longest first: a large one that begins last would be waited for alone.

    The processes start here, and keep SIGINT blocked as it is meanwhile: from their first instruction on, when they
    could not handle it yet.
    """
    order = sorted(range(len(todo)), key=lambda number: -size_of(todo[number]))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {number: pool.submit(run, todo[number]) for number in order}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _succeeded(ended: Future[R]) -> bool:
    return not ended.cancelled() and ended.exception() is None


def _end_with_parent() -> None:
    """Let this process end when the one that has started it is gone: nothing else would tell it."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


LINE_EVERY_S: Final = 10.0


class Bar:
    """Progress of many runs. `done` may be called from any thread."""

    def __init__(self, what: str, total: int) -> None:
        """Begin with none done."""
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._said_at = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(what, total=total)

    def done(self) -> None:
        """One more has ended."""
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress.update(self._task, completed=self._done)
            elif time.monotonic() - self._said_at >= LINE_EVERY_S:
                self._said_at = time.monotonic()
                sys.stderr.write(f"{self._what}: {self._done} of {self._total}\n")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
