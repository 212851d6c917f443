"""How long work on a GPU takes: medians of several rounds, each behind a warm-up."""

import statistics
import time
from collections.abc import Callable
from typing import Final

from tensorhub_common.devices.cuda import CudaDevice, CudaStream

ROUNDS: Final = 9


def device_s(device: CudaDevice, stream: CudaStream, work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median seconds that the stream takes for work, by events of its own."""
    work()
    taken, driver = [], device.driver
    with device.current():
        begin, end = driver("cuEventCreate", 0), driver("cuEventCreate", 0)
        for _ in range(rounds):
            driver("cuEventRecord", begin, stream.handle)
            work()
            driver("cuEventRecord", end, stream.handle)
            driver("cuEventSynchronize", end)
            taken.append(float(driver("cuEventElapsedTime", begin, end)) / 1000)
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
