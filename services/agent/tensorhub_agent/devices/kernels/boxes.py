"""Copies of strided boxes within a GPU's memory: what `boxes.cu` does, in launches."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tensorhub_agent.devices.boxes import DeviceBox
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
THREADS: Final = 256
UNITS_PER_BLOCK: Final = THREADS * 4

_FORM: Final = np.dtype(
    [
        ("dims", "<u4"),
        ("row_bytes", "<u4"),
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
        unit_bytes = _unit_bytes(box)
        units = box.form.nbytes // unit_bytes
        self.blocks += -(-units // UNITS_PER_BLOCK)
        self.boxes[self.count] = (box.to, box.origin, number, unit_bytes.bit_length() - 1, units, self.blocks)
        self.count += 1
        return True


TABLES_BYTES: Final = BOXES_MAX * _BOX.itemsize + FORMS_MAX * _FORM.itemsize


class BoxCopier:
    """The boxes of one stream, which one thread uses at a time."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Allocate what a launch needs."""
        self._library, self._stream = library, stream
        self._host = PinnedBuffer(device, TABLES_BYTES)
        self._memory = device.allocate(TABLES_BYTES)
        self._tables = BoxTables(self._host.view)

    def copy(self, boxes: Sequence[DeviceBox]) -> None:
        """Copy boxes; return when all are there."""
        tables = self._tables
        tables.clear()
        for box in (part for each in boxes for part in normal_parts(each)):
            if not tables.add(box):
                self._launch()
                tables.clear()
                tables.add(box)
        self._launch()

    def _launch(self) -> None:
        tables, stream, begin = self._tables, self._stream, self._memory.address
        if tables.count:
            stream.copy(begin, self._host.address, TABLES_BYTES)
            arguments = (begin, begin + BOXES_MAX * _BOX.itemsize, tables.count)
            stream.launch(self._library.kernel("boxes", "copy_boxes"), (tables.blocks, 1), THREADS, arguments)
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
    """Return how many dimensions of rows a normal form has, and the bytes of a row."""
    row = run_bytes(form)
    return len(form.shape) - (row > 1), row


def _write_form(into: np.void, form: StridedForm) -> None:
    dims, row = _rows(form)
    into["dims"], into["row_bytes"] = dims, row
    into["shape"][:dims] = form.shape[:dims]
    into["to_strides"][:dims] = form.to_strides[:dims]
    into["origin_strides"][:dims] = form.origin_strides[:dims]


def _unit_bytes(box: DeviceBox) -> int:
    """Return the largest unit to which everything about a box is aligned."""
    dims, row = _rows(box.form)
    strides = box.form.to_strides[:dims] + box.form.origin_strides[:dims]
    return math.gcd(UNIT_BYTES_MAX, box.to, box.origin, row, *strides)
