"""What a GPU computes for the agent: copies by the driver, digests and fused copies by kernels.

Each thread of the pool has a stream of its own with what its launches need, so that one thread's scrambles, which keep
few of the GPU's processors busy, are computed while another's copies keep its memory busy.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.kernels.boxes import BoxCopier
from tensorhub_agent.devices.kernels.digests import LONG_BYTES_MIN, Digester, short_digests
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_common.devices.cuda import CudaDevice, CudaStream


@dataclass(slots=True)
class _Own:
    """What one thread has on the device."""

    stream: CudaStream
    digester: Digester
    boxes: BoxCopier


class CudaEngine:
    """See `DeviceEngine`."""

    def __init__(self, device: CudaDevice) -> None:
        """Load what compiles kernels. Raises `DeviceUnavailable`."""
        self._device = device
        self._library = KernelLibrary(device)
        self._threads = threading.local()

    def copy(self, to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> None:
        """See `DeviceEngine.copy`."""
        stream = self._own().stream
        for there, here, size in zip(to, origin, nbytes, strict=True):
            stream.copy(there, here, size)
        stream.record().wait()

    def copy_and_digest(self, to: Sequence[int], origin: Sequence[int] | None, nbytes: Sequence[int]) -> bytes:
        """See `DeviceEngine.copy_and_digest`."""
        own = self._own()
        if origin is not None and not self._reads(origin):
            # Kernels reach the host's memory only where it is registered; the driver's copies reach all.
            self.copy(to, origin, nbytes)
            origin = None
        sizes, places = np.asarray(nbytes, np.int64), np.asarray(to, np.int64)
        origins = None if origin is None else np.asarray(origin, np.int64)
        long = sizes >= LONG_BYTES_MIN
        found = np.empty((len(sizes), PIECE_DIGEST_BYTES), np.uint8)
        if long.any():
            some = own.digester.digest(places[long], None if origins is None else origins[long], sizes[long])
            found[long] = np.frombuffer(some, np.uint8).reshape(-1, PIECE_DIGEST_BYTES)
        if not long.all():
            short = np.flatnonzero(~long)
            if origins is not None:
                self.copy(places[short].tolist(), origins[short].tolist(), sizes[short].tolist())
            for number, digest in zip(short, self._short(places[short], sizes[short]), strict=True):
                found[number] = np.frombuffer(digest, np.uint8)
        return found.tobytes()

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """See `DeviceEngine.copy_boxes`."""
        self._own().boxes.copy(boxes)

    def _short(self, places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[bytes]:
        """Hash pieces that are too short for the kernels, on the host."""
        landing = bytearray(int(sizes.sum()))
        begin = np.frombuffer(landing, np.uint8).ctypes.data
        at = (np.cumsum(sizes) - sizes + begin).tolist()
        self.copy(at, places.tolist(), sizes.tolist())
        return short_digests(memoryview(landing), sizes.tolist())

    def _reads(self, addresses: Sequence[int]) -> bool:
        """Whether kernels may read from here: all of a call's pieces come from one memory."""
        return not addresses or self._device.is_device_memory(addresses[0])

    def _own(self) -> _Own:
        found: _Own | None = getattr(self._threads, "own", None)
        if found is None:
            # A thread of the pool works with this device alone, or with others by blocks of its own.
            self._device.adopt_thread()
            stream = self._device.stream()
            found = self._threads.own = _Own(
                stream,
                Digester(self._device, self._library, stream),
                BoxCopier(self._device, self._library, stream),
            )
        return found
