"""Host memory of this process that a GPU copies at full speed."""

import mmap
import weakref

import numpy as np

from tensorhub_common.devices.device import Device


class PinnedBuffer:
    """Some bytes, all zero at first. It is kept for the life of what uses it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate whole pages, and pin them."""
        self._memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.view = memoryview(self._memory)[:nbytes]
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        pinned = device.pin(self.address, len(self._memory))
        # Before the mapping goes, whose addresses the next one may get. Each use of it is waited for where it is begun.
        weakref.finalize(self, pinned.close)
