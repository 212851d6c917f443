"""Copies of strided boxes within a GPU's memory, with or without a cast: launches of `boxes.cu` and `casts.cu`."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.kernels.casts import CastTables, kernel_name
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.devices.pinned_buffer import PinnedBuffer
from tensorhub_agent.primitives.forms import cut_form, normalized, run_bytes
from tensorhub_common.devices.cuda import CudaDevice, CudaStream
from tensorhub_common.programs.regions import DIMS_MAX, StridedForm

BOXES_MAX: Final = 4096
FORMS_MAX: Final = 256
"""The limits of one launch."""

BOX_BYTES_MAX: Final = 1024 * 1024 * 1024
"""A box is cut at this, so that its units can be counted in 32 bits whatever its alignment."""

UNIT_BYTES_MAX: Final = 16
"""The most bytes of one access. A unit of a copy is as long at most."""

CAST_ELEMENTS: Final = 8
"""The elements of a unit where a box that is cast is aligned to as many, by one or several accesses."""

THREADS: Final = 256
UNITS_PER_BLOCK: Final = THREADS * 4

_FORM: Final = np.dtype(
    [
        ("dims", "<u4"),
        ("row", "<u4"),
        ("shape", "<u4", DIMS_MAX),
        ("to_strides", "<u8", DIMS_MAX),
        ("origin_strides", "<u8", DIMS_MAX),
    ]
)
_BOX: Final = np.dtype(
    [("to", "<u8"), ("origin", "<u8"), ("form", "<u4"), ("unit", "<u4"), ("units", "<u4"), ("ends", "<u4")]
)


class BoxTables:
    """The tables of one launch, in memory that the caller gives."""

    def __init__(self, view: memoryview) -> None:
        """Take `TABLES_BYTES`, from an address that is aligned to 8."""
        self.boxes = np.frombuffer(view, _BOX, BOXES_MAX)
        self.forms = np.frombuffer(view, _FORM, FORMS_MAX, BOXES_MAX * _BOX.itemsize)
        self.count = self.blocks = 0
        self._known: dict[StridedForm, int] = {}

    def clear(self) -> None:
        """Begin a launch."""
        self.count = self.blocks = 0
        self._known.clear()

    def add(self, box: DeviceBox) -> bool:
        """Take a box of a normal form, or tell that there is no room for it."""
        number = self._known.get(box.form)
        if self.count == BOXES_MAX or (number is None and len(self._known) == FORMS_MAX):
            return False
        if number is None:
            number = self._known[box.form] = len(self._known)
            _write_form(self.forms[number], box.form)
        unit = _cast_unit(box) if box.form.cast else _copy_unit(box)
        units = (box.form.elements if box.form.cast else box.form.nbytes) // unit
        self.blocks += -(-units // UNITS_PER_BLOCK)
        self.boxes[self.count] = (box.to, box.origin, number, unit.bit_length() - 1, units, self.blocks)
        self.count += 1
        return True


TABLES_BYTES: Final = BOXES_MAX * _BOX.itemsize + FORMS_MAX * _FORM.itemsize


class BoxCopier:
    """The boxes of one stream, which one thread uses at a time."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, casts: CastTables, stream: CudaStream) -> None:
        """Allocate what a launch needs."""
        self._library, self._casts, self._stream = library, casts, stream
        self._host = PinnedBuffer(device, TABLES_BYTES)
        self._memory = device.allocate(TABLES_BYTES)
        self._tables = BoxTables(self._host.view)

    def copy(self, boxes: Sequence[DeviceBox]) -> None:
        """Copy boxes; return when all are there."""
        # One launch has one kernel.
        for cast in dict.fromkeys(box.form.cast for box in boxes):
            self._tables.clear()
            for box in (part for each in boxes if each.form.cast == cast for part in normal_parts(each)):
                if not self._tables.add(box):
                    self._launch(cast)
                    self._tables.clear()
                    self._tables.add(box)
            self._launch(cast)

    def _launch(self, cast: str) -> None:
        tables, stream, begin = self._tables, self._stream, self._memory.address
        if tables.count:
            stream.copy(begin, self._host.address, TABLES_BYTES)
            arguments: tuple[int, ...] = (begin, begin + BOXES_MAX * _BOX.itemsize, tables.count)
            if cast:
                kernel = self._library.kernel("casts", kernel_name(cast))
                # What is computed looks at no table, and an address has to be one.
                arguments = *arguments, self._casts.address(cast, stream) or begin
            else:
                kernel = self._library.kernel("boxes", "copy_boxes")
            stream.launch(kernel, (tables.blocks, 1), THREADS, arguments)
            # The tables are written anew for the next launch.
            stream.record().wait()


def normal_parts(box: DeviceBox) -> Iterator[DeviceBox]:
    """Yield a box in parts of normal forms that are not too large."""
    form = normalized(box.form)
    if form.nbytes <= BOX_BYTES_MAX:
        yield DeviceBox(box.to, box.origin, form)
        return
    for part in cut_form(form, BOX_BYTES_MAX):
        yield DeviceBox(box.to + part.to, box.origin + part.origin, normalized(part.form))


def _rows(form: StridedForm) -> tuple[int, int]:
    """Return how many dimensions of rows a normal form has, and how long a row is: bytes, or elements to be cast."""
    if form.cast:
        is_together = form.to_strides[-1:] == (form.to_itemsize,) and form.origin_strides[-1:] == (form.itemsize,)
        return (len(form.shape) - 1, form.shape[-1]) if is_together else (len(form.shape), 1)
    row = run_bytes(form)
    return len(form.shape) - (row > 1), row


def _write_form(into: np.void, form: StridedForm) -> None:
    dims, row = _rows(form)
    into["dims"], into["row"] = dims, row
    into["shape"][:dims] = form.shape[:dims]
    into["to_strides"][:dims] = form.to_strides[:dims]
    into["origin_strides"][:dims] = form.origin_strides[:dims]


def _cast_unit(box: DeviceBox) -> int:
    """Return how many elements a unit has."""
    form = box.form
    dims, row = _rows(form)
    ends = (
        (form.to_itemsize, (box.to, *form.to_strides[:dims])),
        (form.itemsize, (box.origin, *form.origin_strides[:dims])),
    )
    is_aligned = row % CAST_ELEMENTS == 0 and all(
        at % min(UNIT_BYTES_MAX, CAST_ELEMENTS * itemsize) == 0 for itemsize, places in ends for at in places
    )
    return CAST_ELEMENTS if is_aligned else 1


def _copy_unit(box: DeviceBox) -> int:
    """Return how many bytes the largest unit has to which everything about a box is aligned."""
    dims, row = _rows(box.form)
    strides = box.form.to_strides[:dims] + box.form.origin_strides[:dims]
    return math.gcd(UNIT_BYTES_MAX, box.to, box.origin, row, *strides)
