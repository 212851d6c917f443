"""What is computed on its way in the simulation: casts, fp8 of whole blocks, partials, and values by amax.

The arithmetic is production's, and so is the table that partials are folded into; what comes of both is compared with
what `tensors` says of the whole tensor.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from tensorhub_agent.casting.conversion import by_amax, converter_of
from tensorhub_agent.primitives.amax import AmaxTable
from tensorhub_agent.primitives.forms import packed_strides
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.regions import StridedForm
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.byte_ranges import bytes_folded
from tensorhub_simulator.faultsim.models.segments import Segment


class UnitCompute:
    """What one source of a read by a program computes."""

    def __init__(self, program: NumberedProgram, layout: str, table: AmaxTable | None) -> None:
        """Compute as a source of this layout does."""
        self._program, self._layout, self._table = program, layout, table
        self._amax: dict[int, bytes] = {}
        self._rooms: dict[int, tuple[tuple[Range, ...], bytearray, dict[int, tuple[int, int]]]] = {}
        """By batch of partials: which, their memory, and where in that each has its place."""
        self._room_of: dict[int, int] = {}

    def posted(self, batch: int, units: tuple[Range, ...]) -> None:
        """Take with a batch what it is computed by, and make room for partials."""
        if self._table is None:
            return
        numbers = [unit for first, count in units for unit in range(first, first + count)]
        if numbers[0] >= self._program.partials:
            amax = self._table.amax(self._layout, units)
            self._amax.update(zip(numbers, amax, strict=False))
            return
        memory, regions = self._table.batch_buffer(self._layout, units)
        places = {unit: (at, form.nbytes) for unit, at, form in zip(numbers, regions.to, regions.form, strict=True)}
        self._rooms[batch] = units, bytearray(memory.nbytes), places
        self._room_of.update(dict.fromkeys(numbers, batch))

    def is_partial(self, unit: int) -> bool:
        """Tell whether a unit goes into the table."""
        return unit < self._program.partials

    def form(self, unit: int) -> StridedForm:
        """Return the form of a unit."""
        return self._program.regions(self._layout, [(unit, 1)]).form[0]

    def computed(self, unit: int, raw: bytes) -> bytes:
        """Return what becomes of the bytes that a unit is made of."""
        form = self.form(unit)
        strides = packed_strides(form.origin_shape, form.itemsize)
        there = np.ndarray(form.origin_shape, np.dtype(f"u{form.itemsize}"), raw, 0, strides)
        here = np.zeros(form.shape, np.dtype(f"u{form.to_itemsize}"))
        amax = self._amax.get(unit, b"")
        (by_amax(form, amax) if amax else converter_of(form))(here, there)
        return here.tobytes()

    def land(self, unit: int, data: bytes) -> None:
        """Take a partial."""
        _, memory, places = self._rooms[self._room_of[unit]]
        at, nbytes = places[unit]
        memory[at : at + nbytes] = data

    def came(self, source: int, batch: int) -> None:
        """Take note of a batch that has come whole."""
        room = self._rooms.pop(batch, None)
        if room is not None and self._table is not None:
            self._table.batch_arrived(source, room[0], memoryview(room[1]))

    def closed(self, source: int) -> None:
        """Drop what was not folded."""
        self._rooms.clear()
        if self._table is not None:
            self._table.forget(source)


def write_scales(table: AmaxTable, program: NumberedProgram, scales: Sequence[Range], segment: Segment) -> None:
    """Write scales that follow of a fold, which no other batch may be writing."""
    if not scales:
        return
    image = bytearray(segment.data)
    table.write_scales(scales, memoryview(image))
    for unit in _units(scales):
        where = bytes_folded(program, unit)
        if any(at in segment.writers for at in where):
            raise Violation("one writer", f"scales {unit} are folded while a source may write them")
        segment.put(where, bytes(image[at] for at in where))


def _units(ranges: Iterable[Range]) -> Iterable[int]:
    return (unit for first, count in ranges for unit in range(first, first + count))
