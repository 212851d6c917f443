"""A segment of the host's memory, mapped, that a GPU copies at full speed once it is pinned.

Pinning costs 0.03 to 0.3 s a GiB, and makes copies five times as fast. So it is done with the first copy between the
mapping and a GPU, and kept: the next version goes the same way.
"""

import logging
import mmap
import threading
from typing import Final

import numpy as np

from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.devices.device import Device, DeviceError, PinnedMemory

_log: Final = logging.getLogger(__name__)


class PinnableMapping(mmap.mmap):
    """A mapping that unpins itself before it is unmapped, however that comes about."""

    _pins: dict[Device, PinnedMemory | None]
    _lock: threading.Lock

    def prepare(self) -> "PinnableMapping":
        """Begin without pins; call it once, where the mapping is made: a subclass of `mmap` has no place for that."""
        self._pins, self._lock = {}, threading.Lock()
        return self

    def pin(self, device: Device) -> None:
        """Pin it for copies of a device. Where that fails, copies go on as slowly as before."""
        with self._lock:
            if device in self._pins:
                return
            array = np.frombuffer(self, np.uint8)
            try:
                readonly = not array.flags.writeable
                self._pins[device] = device.pin(int(array.ctypes.data), len(self), readonly=readonly)
            except DeviceError as why:
                _log.warning(
                    "host memory could not be pinned, so copies between it and %s are slow: %s", device.uuid, why
                )
                self._pins[device] = None

    def close(self) -> None:
        """Unpin and unmap. Raises `BufferError` while anything refers to the memory."""
        self._unpin()
        super().close()

    def __del__(self) -> None:
        # Before the memory goes: a finalizer of the module `weakref` would come after that.
        self._unpin()

    def _unpin(self) -> None:
        pins, self._pins = self.__dict__.get("_pins", {}), {}
        for pinned in pins.values():
            if pinned is not None:
                pinned.close()


def pin_for(device: Device, region: MemoryRegion | None) -> None:
    """Pin what a region of the host's memory is mapped by, if it is a mapping that can be."""
    if isinstance(region, memoryview) and isinstance(region.obj, PinnableMapping):
        region.obj.pin(device)
