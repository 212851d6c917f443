"""The kernels beside a copy of the same bytes."""

from typing import Any

import numpy as np

from benchmarks.gpu.timing import device_s, wall_s
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_common.devices.cuda import CudaDevice

PIECE = 4 << 20


def measure(cupy: Any, device: CudaDevice) -> list[tuple[str, float, float]]:  # noqa: ANN401 (cupy has no types)
    """Return what was measured, its bytes a second, and its share of a copy of as many bytes."""
    engine, rows = CudaEngine(device), []
    for pieces in (1, 16, 256, 1024):
        nbytes = pieces * PIECE
        a, b = device.allocate(nbytes), device.allocate(nbytes)
        random = cupy.ndarray(
            nbytes // 8, cupy.uint64, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(a.address, nbytes, a), 0)
        )
        random[...] = cupy.arange(nbytes // 8, dtype=cupy.uint64) * cupy.uint64(0x9E3779B97F4A7C15)
        cupy.cuda.Device().synchronize()
        stream = device.stream()
        external = cupy.cuda.ExternalStream(stream.handle)
        copy_s = device_s(cupy, external, lambda: stream.copy(b.address, a.address, nbytes))
        to = (np.arange(pieces) * PIECE + b.address).tolist()
        origin = (np.arange(pieces) * PIECE + a.address).tolist()
        sizes = [PIECE] * pieces
        ways = {
            "copy, driver": lambda: engine.copy([b.address], [a.address], [nbytes]),
            "copy and digest": lambda: engine.copy_and_digest(to, origin, sizes),
            "digest": lambda: engine.copy_and_digest(to, None, sizes),
        }
        rows.append((f"{pieces} pieces: copy, by events", nbytes / copy_s, 1.0))
        for name, work in ways.items():
            took_s = wall_s(work)
            rows.append((f"{pieces} pieces: {name}", nbytes / took_s, copy_s / took_s))
        del random
        a.close()
        b.close()
    return rows
