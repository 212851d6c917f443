"""What the GPU and its bus can do: the figures that all others are shares of."""

import ctypes
import mmap
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu.timing import device_s, wall_s
from tensorhub_common.devices.cuda import CudaDevice

GIB = 1 << 30


class Ceilings(NamedTuple):
    """Bytes that arrive in a second."""

    copy_bps: float
    """From one place of the GPU's memory to another: each byte is read once and written once."""
    to_gpu_bps: float
    """Out of pinned memory of the host."""
    from_gpu_bps: float
    unpinned_to_gpu_bps: float
    unpinned_from_gpu_bps: float
    pin_s_per_gib: float


def measure(device: CudaDevice, nbytes: int = 4 * GIB) -> Ceilings:
    """Measure with the driver's own copies, in one process and one stream."""
    a, b, stream = device.allocate(nbytes), device.allocate(nbytes), device.stream()
    copy_s = device_s(device, stream, lambda: stream.copy(b.address, a.address, nbytes))
    half = nbytes // 2
    memory = mmap.mmap(-1, half)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, half)

    def across(to: int, origin: int) -> Callable[[], None]:
        def work() -> None:
            stream.copy(to, origin, half)
            stream.record().wait()

        return work

    to_gpu, from_gpu = across(a.address, address), across(address, a.address)
    slow_to, slow_from = wall_s(to_gpu, rounds=3), wall_s(from_gpu, rounds=3)
    began = time.perf_counter()
    pinned = device.pin(address, half)
    pin_s = time.perf_counter() - began
    fast_to, fast_from = wall_s(to_gpu, rounds=5), wall_s(from_gpu, rounds=5)
    pinned.close()
    a.close()
    b.close()
    return Ceilings(
        nbytes / copy_s, half / fast_to, half / fast_from, half / slow_to, half / slow_from, pin_s * GIB / half
    )
