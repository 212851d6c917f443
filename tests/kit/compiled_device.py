"""A GPU for the code that gives it work: host memory, and kernels that were compiled for the CPU.

Work is done when somebody waits for an event behind it, and not before.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping

import numpy as np

Kernels = Mapping[str, Callable[..., None]]
"""What runs a kernel, by its name: it takes the number of groups, and the kernel's arguments."""


class CompiledMemory:
    """Memory that is there until it is closed; its bytes are none that anybody expects."""

    def __init__(self, nbytes: int) -> None:
        self._room = np.full(nbytes + 256, 0xEE, np.uint8)
        self.nbytes = nbytes
        self.address = (self._room.ctypes.data + 255) // 256 * 256

    def close(self) -> None:
        self._room.fill(0xDD)


class CompiledStream:
    """Work in its order; it is its own event."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._names = list(kernels)
        self._open: list[Callable[[], object]] = []
        self.launches: list[str] = []

    def copy(self, to: int, origin: int, nbytes: int) -> None:
        self._open.append(functools.partial(ctypes.memmove, to, origin, nbytes))

    def launch(self, kernel: int, grid: tuple[int, int], threads: int, arguments: tuple[int, ...]) -> None:
        name = self._names[kernel]
        assert (threads, grid[1]) == (256, 1)
        self.launches.append(name)
        self._open.append(lambda: self._kernels[name](grid[0], *arguments))

    def record(self) -> "CompiledStream":
        return self

    def wait(self) -> None:
        while self._open:
            self._open.pop(0)()


class CompiledDevice:
    """What `CudaDevice` and `KernelLibrary` are to the code that uses them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.streams: list[CompiledStream] = []
        self.allocated: list[int] = []

    def stream(self) -> CompiledStream:
        self.streams.append(CompiledStream(self._kernels))
        return self.streams[-1]

    def allocate(self, nbytes: int) -> CompiledMemory:
        self.allocated.append(nbytes)
        return CompiledMemory(nbytes)

    def kernel(self, source: str, name: str) -> int:
        assert source == "deltas"
        return list(self._kernels).index(name)
