"""Runs many cases side by side, each in a process of this one's.

Always true: a process ends with the one that has started it, however that ends, and Ctrl-C is heard by that one alone:
one line is said, and nothing goes on to compute what nobody waits for.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from tensorhub_simulator.performance.comparison import Case, Pair, gpus_of, pair_of
from tensorhub_simulator.performance.config import ClusterError


def pairs(todo: Sequence[Case], processes: int, done: Callable[[], None]) -> list[Pair]:
    """Run many cases, several at once; `done` hears when one has ended. The order is that of the cases."""
    if processes == 1:
        found = []
        for case in todo:
            found.append(pair_of(case))
            done()
        return found
    with _pool(processes) as pool:
        futures = _submitted(pool, todo)
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


def _submitted(pool: ProcessPoolExecutor, todo: Sequence[Case]) -> dict[int, Future[Pair]]:
    """Hand out the cases, the longest first: a large one that begins last would be waited for alone.

    The processes start here, and keep SIGINT blocked as it is meanwhile: from their first instruction on, when they
    could not handle it yet.
    """
    order = sorted(range(len(todo)), key=lambda number: -gpus_of(todo[number].cluster))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {number: pool.submit(pair_of, todo[number]) for number in order}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _succeeded(ended: Future[Pair]) -> bool:
    return not ended.cancelled() and ended.exception() is None


def _end_with_parent() -> None:
    """Let this process end when the one that has started it is gone: nothing else would tell it."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
