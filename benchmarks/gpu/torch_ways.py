"""What torch itself has for the same: `copy_` in one process, and CUDA IPC through torch.multiprocessing."""

import time
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes

from benchmarks.gpu.timing import wall_s


class TorchRates(NamedTuple):
    """Bytes a second; none of these takes a digest."""

    copy_bps: float
    ipc_first_bps: float
    """With opening the handle."""
    ipc_bps: float


def _reader(given: Any, answer: Any, nbytes: int) -> None:  # noqa: ANN401 (queues of torch.multiprocessing)
    into = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    tensor = given.get()

    def work() -> None:
        into.copy_(tensor)
        torch.cuda.synchronize()

    began = time.perf_counter()
    work()
    first = time.perf_counter() - began
    answer.put((first, wall_s(work)))
    given.get()


def _copy_s(one: torch.Tensor) -> float:
    other = torch.empty_like(one)

    def work() -> None:
        other.copy_(one)
        torch.cuda.synchronize()

    return wall_s(work)


def measure(nbytes: int = 4 << 30) -> TorchRates:
    """Measure both."""
    one = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    copy_s = _copy_s(one)
    torch.cuda.empty_cache()
    context = processes.get_context("spawn")
    given, answer = context.Queue(), context.Queue()
    reader = context.Process(target=_reader, args=(given, answer, nbytes))
    reader.start()
    given.put(one)
    first_s, again_s = answer.get(timeout=60)
    given.put(None)
    reader.join(60)
    return TorchRates(nbytes / copy_s, nbytes / first_s, nbytes / again_s)
