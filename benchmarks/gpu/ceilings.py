"""What the GPU and its bus can do: the figures that all others are shares of."""

import ctypes
import mmap
import os
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


def measure(cupy: object, device: CudaDevice, nbytes: int = 4 * GIB) -> Ceilings:
    """Measure with the driver's own copies, in one process and one stream."""
    a, b = device.allocate(nbytes), device.allocate(nbytes)
    stream = device.stream()
    external = cupy.cuda.ExternalStream(stream.handle)  # type: ignore[attr-defined]
    copy_s = device_s(cupy, external, lambda: stream.copy(b.address, a.address, nbytes))
    fd = os.memfd_create("tensorhub-bench")
    half = min(nbytes, 2 * GIB)
    os.posix_fallocate(fd, 0, half)
    mapping = mmap.mmap(fd, half)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    ctypes.memset(address, 1, half)

    def across(to: int, origin: int) -> float:
        def work() -> None:
            stream.copy(to, origin, half)
            stream.record().wait()

        return wall_s(work, rounds=5)

    slow_to, slow_from = across(a.address, address), across(address, a.address)
    pins = []

    def pin() -> None:
        pins.append(device.pin(address, half))

    import time

    began = time.perf_counter()
    pin()
    pin_s = time.perf_counter() - began
    fast_to, fast_from = across(a.address, address), across(address, a.address)
    pins[0].close()
    a.close()
    b.close()
    return Ceilings(
        nbytes / copy_s, half / fast_to, half / fast_from, half / slow_to, half / slow_from, pin_s * GIB / half
    )
