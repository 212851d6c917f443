"""What a fake device computes: the host's own copies and digests, in the order of a stream."""

import ctypes
import threading
from collections.abc import Sequence

import xxhash

from tensorhub_common.devices.fake import FakeDevice, FakeStream, Span


class FakeEngine:
    """See `DeviceEngine`."""

    def __init__(self, device: FakeDevice) -> None:
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
        stream, found = self._stream(), [b""] * len(nbytes)
        for there, here, size in zip(to, origin or (), nbytes, strict=origin is not None):
            stream.copy(there, here, size)

        def digest() -> None:
            for number, (there, size) in enumerate(zip(to, nbytes, strict=True)):
                found[number] = xxhash.xxh3_128_digest(ctypes.string_at(there, size))

        spans = tuple(Span(there, there + size, writes=False) for there, size in zip(to, nbytes, strict=True))
        stream.run("a digest", digest, spans)
        stream.record().wait()
        return b"".join(found)

    def _stream(self) -> FakeStream:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._device.stream()
        stream: FakeStream = self._own.stream
        return stream
