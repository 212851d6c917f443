"""What a fake device computes: the host's own copies and digests, in the order of a stream."""

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from tensorhub_agent.casting.conversion import by_amax, converter_of
from tensorhub_agent.devices.boxes import DeviceBox, is_possible
from tensorhub_agent.devices.changes import UNCHANGED, Changes, changes_between, positions_in, values_in
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.planes import Units, units_in
from tensorhub_common.devices.fake import FakeDevice, FakeStream, Span
from tensorhub_common.programs.regions import Sizes

Elements = np.ndarray[Any, np.dtype[np.void]]
Numbers = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


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

    def digest(self, at: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.digest`."""
        return self._digested(at, at, nbytes)

    def copy_and_digest(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.copy_and_digest`."""
        return self._digested(to, origin, nbytes)

    def receive(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.receive`."""
        stream = self._stream()
        for there, here, size in zip(to.tolist(), origin.tolist(), nbytes.tolist(), strict=True):
            stream.copy(there, here, size)
        return self._digested(to, to, nbytes)

    def send(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.send`."""
        stream, ends = self._stream(), np.cumsum(nbytes)
        staging = self._device.allocate(int(nbytes.sum()))
        room = ends - nbytes + staging.address
        found = self._digested(room, origin, nbytes)
        for there, here, size in zip(to.tolist(), room.tolist(), nbytes.tolist(), strict=True):
            stream.copy(there, here, size)
        stream.record().wait()
        staging.close()
        return found

    def _digested(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        stream, found = self._stream(), [b""] * len(nbytes)
        for number, (there, here, size) in enumerate(zip(to.tolist(), origin.tolist(), nbytes.tolist(), strict=True)):
            spans = (Span(there, there + size, writes=there != here), Span(here, here + size, writes=False))
            stream.run("a digest", functools.partial(_digest, found, number, there, here, size), spans)
        stream.record().wait()
        return b"".join(found)

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """See `DeviceEngine.copy_boxes`."""
        stream = self._stream()
        for box in boxes:
            form = box.form
            spans = (
                _span(box.to, form.shape, form.to_strides, form.span_bytes, writes=True),
                _span(box.origin, form.origin_shape, form.origin_strides, form.origin_span_bytes, writes=False),
            )
            stream.run("a copy of a box", functools.partial(_copy_box, box), spans)
        stream.record().wait()

    def changes(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> Sequence[Changes | None]:
        """See `DeviceEngine.changes`. What a call that does not wait would return is that nothing changed."""
        stream, ends = self._stream(), np.cumsum(nbytes)
        staging = self._device.allocate(int(nbytes.sum()))
        found: list[Changes | None] = [UNCHANGED] * len(nbytes)
        columns = (ends - nbytes + staging.address, old, new, nbytes, units)
        for number, (room, before, at, size, unit) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            stream.copy(room, before, size)
            spans = (Span(room, room + size, writes=False), Span(at, at + size, writes=False))
            stream.run("a comparison", functools.partial(_compare, found, number, room, at, size, unit), spans)
        stream.record().wait()
        staging.close()
        return found

    def overwrite(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]]
    ) -> tuple[bytes, Sequence[bool]]:
        """See `DeviceEngine.overwrite`."""
        stream, right = self._stream(), [False] * len(nbytes)
        columns = (at, nbytes, units)
        for number, (here, size, unit) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            act = functools.partial(_overwrite, right, number, _units(here, size, unit), patches[number])
            stream.run("an overwrite", act, (Span(here, here + size, writes=True),))
        return self._digested(at, at, nbytes), right

    def takes(self, box: DeviceBox) -> bool:
        """See `DeviceEngine.takes`."""
        return is_possible(box)

    def _stream(self) -> FakeStream:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._device.stream()
        stream: FakeStream = self._own.stream
        return stream


def _span(begin: int, shape: Sizes, strides: Sizes, span_bytes: int, *, writes: bool) -> Span:
    """Return what a box touches, as rows of its first dimension: others' boxes may lie between them."""
    end = begin + span_bytes
    if len(shape) > 1 and shape[0] > 1:
        width = span_bytes - (shape[0] - 1) * strides[0]
        if 0 < width <= strides[0]:
            return Span(begin, end, writes, strides[0], width)
    return Span(begin, end, writes)


def _digest(found: list[bytes], number: int, to: int, origin: int, nbytes: int) -> None:
    data = ctypes.string_at(origin, nbytes)
    found[number] = xxhash.xxh3_128_digest(data)
    if to != origin:
        ctypes.memmove(to, data, nbytes)


def _units(at: int, nbytes: int, unit: int) -> Units:
    return units_in(memoryview((ctypes.c_ubyte * nbytes).from_address(at)), unit)


def _compare(found: list[Changes | None], number: int, old: int, new: int, nbytes: int, unit: int) -> None:
    found[number] = changes_between(_units(old, nbytes, unit), _units(new, nbytes, unit))


def _overwrite(right: list[bool], number: int, piece: Units, patches: Sequence[Changes]) -> None:
    where = [positions_in(changes, len(piece)) for changes in patches]
    right[number] = all(each is not None for each in where)
    for each, changes in zip(where, patches, strict=True):
        if right[number]:
            piece[each] = values_in(changes)


def _copy_box(box: DeviceBox) -> None:
    form = box.form
    to = memoryview((ctypes.c_ubyte * form.span_bytes).from_address(box.to))
    origin = memoryview((ctypes.c_ubyte * form.origin_span_bytes).from_address(box.origin))
    if form.cast:
        convert = by_amax(form, box.amax) if box.amax else converter_of(form)
        source: Numbers = np.ndarray(form.origin_shape, f"u{form.itemsize}", origin, 0, form.origin_strides)
        convert(np.ndarray(form.shape, f"u{form.to_itemsize}", to, 0, form.to_strides), source)
        return
    dtype = np.dtype((np.void, form.itemsize))
    elements: Elements = np.ndarray(form.shape, dtype, origin, 0, form.origin_strides)
    here: Elements = np.ndarray(form.shape, dtype, to, 0, form.to_strides)
    here[...] = elements
