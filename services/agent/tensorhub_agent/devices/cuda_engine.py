"""What a GPU computes: copies by the driver, digests and fused copies by kernels."""

import threading
from collections.abc import Sequence

from tensorhub_common.devices.device import Device, Stream


class CudaEngine:
    """See `DeviceEngine`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own = threading.local()

    def copy(self, to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> None:
        """See `DeviceEngine.copy`."""
        stream = self._stream()
        for there, here, size in zip(to, origin, nbytes, strict=True):
            stream.copy(there, here, size)
        stream.record().wait()

    def copy_and_digest(self, to: Sequence[int], origin: Sequence[int] | None, nbytes: Sequence[int]) -> bytes:
        """See `DeviceEngine.copy_and_digest`."""
        raise NotImplementedError

    def _stream(self) -> Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._device.stream()
        stream: Stream = self._own.stream
        return stream
