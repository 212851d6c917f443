"""Bytes that another process owns on the same GPU, copied and digested here by the agent's pool."""

import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.gpu.timing import ROUNDS, wall_s
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.cuda import CudaDevice, cuda_device

PIECE: Final = 4 << 20
WAIT_S: Final = 60


class ProcessRates(NamedTuple):
    """Bytes a second over some GiB that another process owns; every byte is compared by its digest."""

    nbytes: int
    copy_bps: float
    """The driver's copy between two memories of this process, waited for."""
    foreign_copy_bps: float
    """The driver's copy of what the other process owns."""
    pool_bps: float
    """Copied and digested."""
    digest_bps: float
    """Digested where it is."""

    @property
    def share(self) -> float:
        """What the pool has of the driver's copy."""
        return self.pool_bps / self.copy_bps


def _own(path: str, nbytes: int) -> None:
    """Fill memory, hand its descriptor over, and stay until the other side has ended."""
    device = cuda_device(0)
    memory, stream = device.allocate(nbytes), device.stream()
    some = np.random.default_rng(1).integers(0, 256, PIECE, np.uint8)
    for at in range(0, nbytes, PIECE):
        stream.copy(memory.address + at, some.ctypes.data, PIECE)
    stream.record().wait()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(WAIT_S)
        asking.connect(path)
        descriptor = memory.export()
        socket.send_fds(asking, [b"memory"], [descriptor])
        asking.recv(1)
    memory.close()


def measure(device: CudaDevice, nbytes: int) -> ProcessRates:
    """Measure with an owner of its own."""
    with tempfile.TemporaryDirectory(prefix="tensorhub-gpu-") as folder, socket.socket(socket.AF_UNIX) as listening:
        path = str(Path(folder) / "owner")
        listening.settimeout(WAIT_S)
        listening.bind(path)
        listening.listen(1)
        owner = multiprocessing.get_context("spawn").Process(target=_own, args=(path, nbytes))
        owner.start()
        talking, _ = listening.accept()
        with talking:
            talking.settimeout(WAIT_S)
            _, descriptors, _, _ = socket.recv_fds(talking, 16, 1)
            try:
                return asyncio.run(_measured(device, descriptors[0], nbytes))
            finally:
                os.close(descriptors[0])
                talking.close()
                owner.join(WAIT_S)


async def _measured(device: CudaDevice, descriptor: int, nbytes: int) -> ProcessRates:
    theirs = device.import_memory(descriptor, nbytes, readonly=True)
    mine, other, stream = device.allocate(nbytes), device.allocate(nbytes), device.stream()

    def copy(origin: int) -> None:
        stream.copy(mine.address, origin, nbytes)
        stream.record().wait()

    own_s, foreign_s = wall_s(lambda: copy(other.address)), wall_s(lambda: copy(theirs.address))
    at = list(range(0, nbytes, PIECE))
    spans = Spans(at, at, [PIECE] * len(at))
    to, origin = DeviceRegion.of(device, mine), DeviceRegion.of(device, theirs)
    pool, copied, digested = CopyPool(), [], []
    try:
        for _ in range(ROUNDS):
            stream.fill(mine.address, nbytes)
            stream.record().wait()
            began = time.perf_counter()
            found = await pool.copy_and_digest(to, origin, spans).result()
            middle = time.perf_counter()
            again = await pool.digest(to, spans).result()
            digested.append(time.perf_counter() - middle)
            copied.append(middle - began)
            assert found == again == found[:16] * len(at)
    finally:
        pool.close()
        for memory in (theirs, mine, other):
            memory.close()
    return ProcessRates(
        nbytes,
        nbytes / own_s,
        nbytes / foreign_s,
        nbytes / statistics.median(copied),
        nbytes / statistics.median(digested),
    )
