"""The largest magnitudes of blocks that no source of a read has whole: gathered, folded, and used.

What a source says of its part of each block comes into memory of its own batch, and is folded into the read's table
once that source has said that its lease held. So a source that is lost, or lies late, has changed nothing here: its
memory goes with it, and is never used again for another batch.

Invariant: an entry only grows, and is what the whole block has once the fold is known (`folding` counts that); there
are `NumberedProgram.table_bytes` of entries, and of each source one batch that is not folded yet.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tensorhub_agent.casting.fp8 import fill_scales
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.primitives.forms import packed_strides
from tensorhub_agent.primitives.memory_region import MemoryRegion, host
from tensorhub_common.layout.casts import FP8_SCHEMES
from tensorhub_common.programs.amax_cells import AmaxEntries
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.regions import StridedCopies, StridedForm
from tensorhub_common.protocol.ranges import Range

Floats = npt.NDArray[np.float32]


class NumpyAmaxTable:
    """The entries of one read by a program. Its methods belong to the event loop's thread."""

    def __init__(self, program: NumberedProgram) -> None:
        """Begin with zeros."""
        self._program, self.partials = program, program.partials
        self._table = np.zeros(program.table_bytes // 4, np.float32)
        self._came: dict[tuple[int, int], Floats] = {}
        """What a source has said of a partial, by both their numbers."""

    def batch_buffer(self, layout: str, partials: Sequence[Range]) -> tuple[memoryview, StridedCopies]:
        """Return memory for a batch of partials of a source of this layout, and how they are brought into it."""
        regions = self._program.regions(layout, partials)
        packed: dict[int, StridedForm] = {}
        to, form, end = [], [], 0
        for each in regions.form:
            own = packed.get(id(each))
            if own is None:
                strides = packed_strides(each.shape, each.to_itemsize)
                own = packed[id(each)] = StridedForm(
                    each.shape, strides, each.origin_strides, each.itemsize, each.to_itemsize, each.cast, each.blocks
                )
            to.append(end)
            form.append(own)
            end += own.nbytes
        return memoryview(bytearray(end)), StridedCopies(to, regions.origin, form)

    def batch_arrived(self, source: int, partials: Sequence[Range], memory: MemoryRegion) -> None:
        """Take a batch that has come whole; it is not to be counted yet."""
        found, at = np.frombuffer(host(memory), np.float32), 0
        for unit, entries in zip(_units(partials), self._program.entries(partials), strict=True):
            count = entries.form.elements
            self._came[source, unit] = found[at : at + count].reshape(entries.counts)
            at += count

    def fold(self, source: int, partials: Sequence[Range]) -> None:
        """Count what a source has said of these."""
        for unit, entries in zip(_units(partials), self._program.entries(partials), strict=True):
            here = self._entries(entries)
            # A NaN is larger than any number, as it is within a block.
            np.maximum(here, self._came.pop((source, unit)), out=here)

    def forget(self, source: int) -> None:
        """Drop what a source has said that was not folded: it is closed."""
        for key in [key for key in self._came if key[0] == source]:
            del self._came[key]

    def write_scales(self, scales: Sequence[Range], destination: MemoryRegion) -> None:
        """Compute scales of folds that are known, into the destination."""
        for entries in self._program.entries(scales):
            form, scheme, known = entries.form, FP8_SCHEMES[entries.scheme], self._entries(entries)
            if isinstance(destination, DeviceRegion):
                packed = np.empty(form.shape, np.float32)
                fill_scales(known, scheme, packed)
                lay_out(packed, form, destination, entries.to)
            else:
                here: Floats = np.ndarray(form.shape, np.float32, host(destination), entries.to, form.to_strides)
                fill_scales(known, scheme, here)

    def amax(self, layout: str, units: Sequence[Range]) -> Sequence[bytes]:
        """Return by what a source of this layout computes each of these units; nothing where it computes none so."""
        program = self._program
        of_folds = [(first, min(count, program.values - first)) for first, count in units if first < program.values]
        wanted = {unit for first, count in program.by_amax(layout) for unit in _common(of_folds, first, count)}
        if not wanted:
            return ()
        return [
            self._entries(next(program.entries([(unit, 1)]))).tobytes() if unit in wanted else b""
            for unit in _units(units)
        ]

    def _entries(self, entries: AmaxEntries) -> Floats:
        view: Floats = np.ndarray(entries.counts, np.float32, self._table, entries.at, entries.strides)
        return view


def lay_out(packed: Floats, form: StridedForm, destination: DeviceRegion, at: int) -> None:
    """Bring some scales, which are few, into the memory of a GPU."""
    device, strides = destination.device, packed_strides(form.shape, form.to_itemsize)
    engine, room = engine_of(device), device.allocate(packed.nbytes)
    try:
        engine.copy([room.address], [int(packed.ctypes.data)], [packed.nbytes])
        own = StridedForm(form.shape, form.to_strides, strides, form.to_itemsize, form.to_itemsize)
        engine.copy_boxes([DeviceBox(destination.address + at, room.address, own)])
    finally:
        room.close()


def _units(ranges: Iterable[Range]) -> Iterable[int]:
    return (unit for first, count in ranges for unit in range(first, first + count))


def _common(ranges: Iterable[Range], first: int, count: int) -> Iterable[int]:
    return (unit for a, some in ranges for unit in range(max(a, first), min(a + some, first + count)))
