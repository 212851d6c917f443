"""How long work on a GPU takes: medians of several rounds, each behind a warm-up."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

ROUNDS: Final = 9


def device_s(cupy: Any, stream: Any, work: Callable[[], object], rounds: int = ROUNDS) -> float:  # noqa: ANN401
    """Return the median seconds that the stream takes for work, by its own events."""
    work()
    taken = []
    for _ in range(rounds):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end) / 1000)
    return statistics.median(taken)


def wall_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median seconds that a call takes which returns when all is done."""
    work()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
