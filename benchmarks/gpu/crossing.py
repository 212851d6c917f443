"""Bytes between a GPU and pinned memory of the host, copied and digested by the agent's pool."""

import asyncio
import statistics
import time
from typing import Final, NamedTuple

from benchmarks.gpu.timing import ROUNDS
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.pinnable_mapping import PinnableMapping
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.devices.cuda import CudaDevice

PIECE: Final = 4 << 20


class CrossingRates(NamedTuple):
    """Bytes a second."""

    to_host_bps: float
    to_gpu_bps: float


def measure(device: CudaDevice, nbytes: int = 4 << 30) -> CrossingRates:
    """Measure both ways with random bytes."""
    return asyncio.run(_measured(device, nbytes))


async def _measured(device: CudaDevice, nbytes: int) -> CrossingRates:
    host, there = memoryview(PinnableMapping(-1, nbytes).prepare()), device.allocate(nbytes)
    region, pool, at = DeviceRegion.of(device, there), CopyPool(), list(range(0, nbytes, PIECE))
    spans = Spans(at, at, [PIECE] * len(at))
    host[:PIECE] = bytes(range(256)) * (PIECE // 256)

    async def rate(to: MemoryRegion, origin: MemoryRegion) -> float:
        taken, found = [], set()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            found.add(await pool.copy_and_digest(to, origin, spans).result())
            taken.append(time.perf_counter() - began)
        assert len(found) == 1
        return nbytes / statistics.median(taken)

    try:
        to_gpu = await rate(region, host)
        to_host = await rate(host, region)
    finally:
        pool.close()
    return CrossingRates(to_host, to_gpu)
