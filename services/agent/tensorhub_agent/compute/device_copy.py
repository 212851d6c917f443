"""Copies and digests where an end, or both, is memory of a GPU."""

from typing import Final

import xxhash

from tensorhub_agent.compute.batch import PoolBatch, address_of, task_bounds
from tensorhub_agent.compute.spans import Columns, Spans, columns, join_adjacent
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.pinnable_mapping import pin_for
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.memory_region import MemoryRegion, host
from tensorhub_common.devices.device import Device

DEVICE_TASK_BYTES_MIN: Final = 2048 * 1024 * 1024
DEVICE_TASK_BYTES_MAX: Final = 4096 * 1024 * 1024
"""A task of a device is one wait for it. A GPU copies 64 MiB in the time that giving it the work takes."""

CROSSING_BYTES: Final = 32 * 1024 * 1024
"""A task between the host and a GPU: while one thread waits for the bus, others hash what has come."""


def device_of(*regions: MemoryRegion | None) -> Device | None:
    """Return the device that works on these regions: that of the first which is device memory; None: all are host."""
    return next((each.device for each in regions if isinstance(each, DeviceRegion)), None)


class DeviceCopyBatch(PoolBatch):
    """A batch of spans of which an end, or both, is device memory. A thread gives the work and sleeps until it is done.

    Digests are the device's; those of a host destination are taken here after the copy.
    """

    def __init__(
        self, device: Device, destination: MemoryRegion, source: MemoryRegion | None, spans: Spans, *, digests: bool
    ) -> None:
        """Prepare; `CopyPool` starts it. Without `source` the destination is only hashed."""
        super().__init__()
        self._engine = engine_of(device)
        self._regions: tuple[MemoryRegion, MemoryRegion | None] | None = destination, source
        self._spans, self._device = spans, device
        self._crosses = isinstance(destination, memoryview) or isinstance(source, memoryview)
        self._to_address = address_of(destination)
        self._from_address = None if source is None else address_of(source)
        self._digests = bytearray(len(spans.nbytes) * PIECE_DIGEST_BYTES if digests else 0)

    async def result(self) -> bytes:
        """See `CopyBatch.result`."""
        await self.done()
        return bytes(self._digests)

    def bounds(self, nbytes: Columns, threads: int) -> list[int]:
        """See `PoolBatch.bounds`."""
        if self._crosses:
            return task_bounds(nbytes, threads, CROSSING_BYTES, CROSSING_BYTES)
        return task_bounds(nbytes, threads, DEVICE_TASK_BYTES_MIN, DEVICE_TASK_BYTES_MAX)

    def _let_go(self) -> None:
        self._regions = None

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (the device hashes)
        assert self._regions is not None
        if self._crosses:
            for region in self._regions:
                pin_for(self._device, region)
        to, origin, nbytes = columns(self._spans)
        to, nbytes = to[first:last] + self._to_address, nbytes[first:last]
        there = None if self._from_address is None else origin[first:last] + self._from_address
        if not self._digests:
            assert there is not None
            self._engine.copy(*(each.tolist() for each in join_adjacent(to, there, nbytes)))
            return
        begin, end = first * PIECE_DIGEST_BYTES, last * PIECE_DIGEST_BYTES
        destination, _ = self._regions
        if isinstance(destination, DeviceRegion):
            origins = None if there is None else there.tolist()
            self._digests[begin:end] = self._engine.copy_and_digest(to.tolist(), origins, nbytes.tolist())
            return
        assert there is not None
        self._engine.copy(*(each.tolist() for each in join_adjacent(to, there, nbytes)))
        view, digest = host(destination), xxhash.xxh3_128_digest
        cuts = zip(self._spans.to[first:last], self._spans.nbytes[first:last], strict=True)
        self._digests[begin:end] = b"".join(digest(view[at : at + size]) for at, size in cuts)
