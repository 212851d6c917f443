"""What a fake device computes: the host's own copies and digests, in the order of a stream."""

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_common.devices.fake import FakeDevice, FakeStream, Span

Elements = np.ndarray[Any, np.dtype[np.void]]


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

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """See `DeviceEngine.copy_boxes`."""
        stream = self._stream()
        for box in boxes:
            form = box.form
            spans = (
                Span(box.to, box.to + form.span_bytes, writes=True),
                Span(box.origin, box.origin + form.origin_span_bytes, writes=False),
            )
            stream.run("a copy of a box", functools.partial(_copy_box, box), spans)
        stream.record().wait()

    def _stream(self) -> FakeStream:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._device.stream()
        stream: FakeStream = self._own.stream
        return stream


def _copy_box(box: DeviceBox) -> None:
    form, dtype = box.form, np.dtype((np.void, box.form.itemsize))
    to = memoryview((ctypes.c_ubyte * form.span_bytes).from_address(box.to))
    origin = memoryview((ctypes.c_ubyte * form.origin_span_bytes).from_address(box.origin))
    there: Elements = np.ndarray(form.shape, dtype, origin, 0, form.origin_strides)
    here: Elements = np.ndarray(form.shape, dtype, to, 0, form.to_strides)
    here[...] = there
