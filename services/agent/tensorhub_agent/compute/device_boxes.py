"""Copying boxes where an end, or both, is memory of a GPU.

Between two places of a GPU's memory a kernel copies boxes as they lie, and casts their numbers. All else goes in steps:
a box is packed where it stands, crosses to the other memory in one piece, and is laid out there. What the device can't
convert is converted on the host. Either way elements get the same bits as between two memories of the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from tensorhub_agent.compute.batch import PoolBatch, address_of, task_bounds
from tensorhub_agent.compute.device_copy import DEVICE_TASK_BYTES, device_of
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.block_forms import amax_bytes
from tensorhub_agent.primitives.forms import cut_form, normalized, packed_strides
from tensorhub_agent.primitives.memory_region import MemoryRegion, host
from tensorhub_common.devices.device import Device, DeviceMemory
from tensorhub_common.programs.regions import StridedCopies, StridedForm

STEP_BYTES_MAX: Final = 64 * 1024 * 1024
"""A box that goes in steps is cut at this: so much each thread takes for it at a time, on the GPU and on the host."""

OnHost = Callable[[StridedForm, bytes, memoryview, int, memoryview, int], None]
"""Copies a box of a form, with what came for it, to a byte of one view from a byte of another."""


class _Part(NamedTuple):
    """A box or a part of one: from byte `origin` of the source to byte `to` of the destination."""

    to: int
    origin: int
    form: StridedForm
    amax: bytes
    is_direct: bool
    """The device copies it as it is."""


class DeviceBoxBatch(PoolBatch):
    """Boxes under way. `await job.done()`, or `stop()` it; it holds its regions until it has ended."""

    def __init__(
        self, device: Device, destination: MemoryRegion, source: MemoryRegion, regions: StridedCopies, on_host: OnHost
    ) -> None:
        """Prepare; `CopyPool` starts it with `sizes`. The boxes were checked against both regions."""
        super().__init__()
        self._engine, self._on_host = engine_of(device), on_host
        self._regions: tuple[MemoryRegion, MemoryRegion] | None = destination, source
        self.origin_nbytes = sum(form.origin_nbytes for form in regions.form)
        amax = regions.amax or (b"",) * len(regions.form)
        # Kernels of a device reach its own memory alone.
        self._goes_in_steps = device_of(destination) is not device_of(source)
        self._parts = [
            part
            for to, origin, form, largest in zip(regions.to, regions.origin, regions.form, amax, strict=True)
            for part in self._cut(to, origin, form, largest)
        ]

    @property
    def sizes(self) -> Columns:
        """The bytes of each part at the end that has more."""
        return np.asarray([max(each.form.nbytes, each.form.origin_nbytes) for each in self._parts], np.int64)

    def _cut(self, to: int, origin: int, form: StridedForm, largest: bytes) -> list[_Part]:
        if not self._goes_in_steps and self._engine.takes(self._box(to, origin, form, largest)):
            return [_Part(to, origin, form, largest, is_direct=True)]
        found, begin = [], 0
        for part in cut_form(normalized(form), STEP_BYTES_MAX):
            end = begin + amax_bytes(part.form) if largest else begin
            found.append(_Part(to + part.to, origin + part.origin, part.form, largest[begin:end], is_direct=False))
            begin = end
        return found

    def bounds(self, nbytes: Columns, threads: int) -> list[int]:
        """See `PoolBatch.bounds`."""
        if self._goes_in_steps:
            return super().bounds(nbytes, threads)
        return task_bounds(nbytes, threads, DEVICE_TASK_BYTES, DEVICE_TASK_BYTES)

    def _let_go(self) -> None:
        self._regions = None

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (nothing is hashed here)
        assert self._regions is not None
        destination, source = self._regions
        for part in self._parts[first:last]:
            if not part.is_direct:
                self._in_steps(part, destination, source)
        direct = [part for part in self._parts[first:last] if part.is_direct]
        if direct:
            self._engine.copy_boxes([self._box(part.to, part.origin, part.form, part.amax) for part in direct])

    def _box(self, to: int, origin: int, form: StridedForm, amax: bytes) -> DeviceBox:
        assert self._regions is not None
        destination, source = self._regions
        return DeviceBox(address_of(destination) + to, address_of(source) + origin, form, amax)

    def _in_steps(self, part: _Part, destination: MemoryRegion, source: MemoryRegion) -> None:
        """Pack, cross and lay out, as far as each is wanted; convert where the device can, and else on the host."""
        form, view, at = part.form, source, part.origin
        if isinstance(source, DeviceRegion):
            packed = _packed_here(form)
            if not engine_of(source.device).takes(DeviceBox(0, source.address + part.origin, packed)):
                packed = _packed_here(_unconverted(form))
            amax = part.amax if packed.cast else b""
            view, at = _fetched(source.device, DeviceBox(0, source.address + part.origin, packed, amax)), 0
            form = _packed_there(_converted(form) if packed.cast else form)
        if not isinstance(destination, DeviceRegion):
            self._on_host(form, part.amax, host(destination), part.to, host(view), at)
            return
        laid_out, before = _packed_there(form), _packed_here(_unconverted(form))
        if not engine_of(destination.device).takes(DeviceBox(destination.address + part.to, 0, laid_out)):
            laid_out, before = _packed_there(_converted(form)), _packed_here(form)
        landing = memoryview(bytearray(before.nbytes))
        self._on_host(before, part.amax if before.cast else b"", landing, 0, host(view), at)
        amax = part.amax if laid_out.cast else b""
        _lay_out(destination.device, DeviceBox(destination.address + part.to, 0, laid_out, amax), landing)


def _fetched(device: Device, box: DeviceBox) -> memoryview:
    """Return a box of a GPU's memory, packed, in the host's."""
    nbytes, engine = box.form.nbytes, engine_of(device)
    landing = memoryview(bytearray(nbytes))
    with _scratch(device, nbytes) as room:
        engine.copy_boxes([box._replace(to=room.address)])
        engine.copy([address_of(landing)], [room.address], [nbytes])
    return landing


def _lay_out(device: Device, box: DeviceBox, packed: memoryview) -> None:
    """Bring a packed box of the host's memory to where it belongs in a GPU's."""
    nbytes, engine = box.form.origin_nbytes, engine_of(device)
    with _scratch(device, nbytes) as room:
        engine.copy([room.address], [address_of(packed)], [nbytes])
        engine.copy_boxes([box._replace(origin=room.address)])


def _packed_here(form: StridedForm) -> StridedForm:
    """Return a form whose elements follow one another in the destination."""
    return replace(form, to_strides=packed_strides(form.shape, form.to_itemsize))


def _packed_there(form: StridedForm) -> StridedForm:
    """Return a form whose elements follow one another in the source."""
    return replace(form, origin_strides=packed_strides(form.origin_shape, form.itemsize))


def _unconverted(form: StridedForm) -> StridedForm:
    """Return the copy of what a form converts; where its elements go is of no account."""
    return replace(
        form,
        shape=form.origin_shape,
        to_strides=packed_strides(form.origin_shape, form.itemsize),
        to_itemsize=form.itemsize,
        cast="",
        blocks=None,
    )


def _converted(form: StridedForm) -> StridedForm:
    """Return the copy of what a form has made; where it comes from is of no account."""
    strides = packed_strides(form.shape, form.to_itemsize)
    return replace(form, origin_strides=strides, itemsize=form.to_itemsize, cast="", blocks=None)


@contextmanager
def _scratch(device: Device, nbytes: int) -> Iterator[DeviceMemory]:
    """Lend memory of a device for one step; all work on it must have ended by the end of the block."""
    memory = device.allocate(nbytes)
    try:
        yield memory
    finally:
        memory.close()
