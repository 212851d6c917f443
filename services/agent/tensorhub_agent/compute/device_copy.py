"""Copies and digests where an end, or both, is memory of a GPU."""

from typing import Final

import xxhash

from tensorhub_agent.compute.batch import PoolBatch, address_of, task_bounds
from tensorhub_agent.devices.columns import Columns, join_adjacent
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.pinnable_mapping import pin_for
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.devices.device import Device

DEVICE_TASK_BYTES: Final = 16 * 1024 * 1024 * 1024
"""A task within a device is some launches and one wait, of some milliseconds. A GPU copies 64 MiB in the time that it
takes to give it the work, and several threads would only wait for each other.
"""

CROSSING_TASK_BYTES: Final = 256 * 1024 * 1024
"""A task between the host and a GPU, of some milliseconds. Two threads at a time keep the bus busy."""


def device_of(*regions: MemoryRegion | None) -> Device | None:
    """Return the device that works on these regions: that of the first which is device memory; None: all are host."""
    return next((each.device for each in regions if isinstance(each, DeviceRegion)), None)


class DeviceCopyBatch(PoolBatch):
    """Pieces of which an end, or both, is device memory. A thread gives the work and sleeps until it is done."""

    def __init__(
        self,
        device: Device,
        destination: MemoryRegion,
        source: MemoryRegion | None,
        places: tuple[Columns, Columns, Columns],
        *,
        digests: bool,
    ) -> None:
        """Prepare; `CopyPool` starts it. `places` are the columns of spans. Without `source` there is only hashing."""
        super().__init__()
        self._engine, self._device = engine_of(device), device
        self._regions: tuple[MemoryRegion, MemoryRegion | None] | None = destination, source
        self._crosses = source is not None and device_of(destination) is not device_of(source)
        to, origin, self._nbytes = places
        self._to = to + address_of(destination)
        self._from = None if source is None else origin + address_of(source)
        self._digests = bytearray(len(self._nbytes) * PIECE_DIGEST_BYTES if digests else 0)

    async def result(self) -> bytes:
        """See `CopyBatch.result`."""
        await self.done()
        return bytes(self._digests)

    def bounds(self, nbytes: Columns, threads: int) -> list[int]:
        """See `PoolBatch.bounds`."""
        if self._crosses:
            return task_bounds(nbytes, threads, CROSSING_TASK_BYTES, CROSSING_TASK_BYTES)
        return task_bounds(nbytes, threads, DEVICE_TASK_BYTES, DEVICE_TASK_BYTES)

    def _let_go(self) -> None:
        self._regions = None

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (the device hashes)
        assert self._regions is not None
        if self._crosses:
            for region in self._regions:
                pin_for(self._device, region)
        to, nbytes = self._to[first:last], self._nbytes[first:last]
        origin = None if self._from is None else self._from[first:last]
        if not self._digests:
            assert origin is not None
            self._engine.copy(*(each.tolist() for each in join_adjacent(to, origin, nbytes)))
            return
        self._digests[first * PIECE_DIGEST_BYTES : last * PIECE_DIGEST_BYTES] = self._digested(to, origin, nbytes)

    def _digested(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        assert self._regions is not None
        destination, source = self._regions
        if origin is None:
            return self._engine.digest(to, nbytes)
        if not isinstance(destination, DeviceRegion):
            return self._engine.send(to, origin, nbytes)
        is_one_device = isinstance(source, DeviceRegion) and source.device is destination.device
        return (self._engine.copy_and_digest if is_one_device else self._engine.receive)(to, origin, nbytes)
