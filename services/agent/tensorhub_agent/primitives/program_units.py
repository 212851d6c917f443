"""Between the units of a transfer program and the pieces of a layout, on both sides of a half-filled source. Pure.

Readers of one layout that go by one program tell each other of units, as they are; `UnitSpans` finds which of them lie
in a run of bytes.

Who is filled by a program tells its own readers which *pieces* of its layout stand (`PieceCompletion`); who reads from
a half-filled source of whatever layout hears of that one's pieces, and finds out which of its own units can be had
(`UnitAvailability`). Always true: a piece is said to stand only when every byte of it does, but for padding; a unit can
be had only when all pieces that its box reaches into stand.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Final

from tensorhub_agent.primitives.ranges import merge_ranges, ranges_of_marks, set_marks
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.ranges import Range

FAR_BEHIND: Final = 1 << 62
"""No segment is so long."""


class PieceCompletion:
    """Which pieces of a shard stand while it is filled by a program.

    A box that is contiguous here counts for the pieces that it lies in. Of a strided one only the tensor is known, so
    a tensor that is filled by such boxes stands when all of it does.
    """

    def __init__(self, program: NumberedProgram, table: PieceTable) -> None:
        """Begin with nothing. Raises `LayoutMismatch` for a program whose boxes are not all in the table's tensors."""
        self._program, self._table = program, table
        self.program, self.units = program.digest, len(program)
        self._missing = list(table.nbytes)
        """Of each piece, the bytes that no contiguous box has brought."""
        self._left: dict[int, int] = {}
        """Of each tensor, the bytes that are to come."""
        ends = {tensor: at + nbytes for tensor, at, nbytes in zip(table.tensor, table.at, table.nbytes, strict=True)}
        for place in program.places([(program.partials, len(program) - program.partials)]):
            piece = table.piece_at(place.to)
            if piece < 0 or place.to + place.nbytes > ends[table.tensor[piece]]:
                raise LayoutMismatch("the transfer program has a box that lies in no tensor of the shard")
            tensor = table.tensor[piece]
            self._left[tensor] = self._left.get(tensor, 0) + place.nbytes
        self._stands = bytearray(len(table))

    @cached_property
    def spans(self) -> "UnitSpans":
        """Where the units stand. Only who serves another reader of the same program needs that."""
        return UnitSpans(self._program)

    def units_arrived(self, units: Iterable[Range]) -> list[Range]:
        """Take note of units that stand; return the pieces that are whole by that, and were not before."""
        table, found = self._table, []
        for place in self._program.places(units):
            first = table.piece_at(place.to)
            if place.is_packed:
                found += self._fill(first, place.to, place.to + place.nbytes)
            tensor = table.tensor[first]
            self._left[tensor] -= place.nbytes
            if not self._left[tensor]:
                found.append(self._pieces_of(tensor))
        fresh = [run for first, count in found for run in self._fresh(first, count)]
        return merge_ranges(fresh)

    def _fill(self, piece: int, begin: int, end: int) -> list[Range]:
        table, whole = self._table, []
        while begin < end:
            stop = min(end, table.at[piece] + table.nbytes[piece])
            self._missing[piece] -= stop - begin
            if not self._missing[piece]:
                whole.append((piece, 1))
            begin, piece = stop, piece + 1
        return whole

    def _pieces_of(self, tensor: int) -> Range:
        first = bisect_left(self._table.tensor, tensor)
        return first, bisect_right(self._table.tensor, tensor) - first

    def _fresh(self, first: int, count: int) -> list[Range]:
        standing = ranges_of_marks(self._stands, first, first + count)
        edges = [first, *(edge for at, some in standing for edge in (at, at + some)), first + count]
        fresh = [(a, b - a) for a, b in list(pairwise(edges))[::2] if b > a]
        set_marks(self._stands, fresh)
        return fresh


class UnitSpans:
    """Where the units of a program stand in memory of the layout that it fills, by their bytes."""

    def __init__(self, program: NumberedProgram) -> None:
        """Put them in order."""
        units = program.given_by(program.program.layout)
        here = program.regions(program.program.layout, units)
        numbers = [unit for first, count in units for unit in range(first, first + count)]
        spans = zip(here.to, here.form, numbers, strict=True)
        every = sorted((to, to + form.span_bytes, unit, form.is_packed_here) for to, form, unit in spans)
        packed = [each for each in every if each[3]]
        self._packed = [(to, stop, unit) for to, stop, unit, _ in packed]
        self._strided = [(to, stop, unit) for to, stop, unit, is_packed in every if not is_packed]
        self._longest = max((stop - to for to, stop, _ in self._strided), default=0)

    def lacks(self, stands: bytearray, origin: int, nbytes: int) -> bool:
        """Tell whether any of these bytes belongs to a unit that does not stand, by those marks.

        Of units that lie strided, a run belongs to any in whose span it lies: what is between their rows is other
        units' of the same tensor.
        """
        at, stop = origin, origin + nbytes
        place = bisect_right(self._packed, (at, FAR_BEHIND)) - 1
        while 0 <= place < len(self._packed):
            begin, end, unit = self._packed[place]
            if not begin <= at < end or not stands[unit]:
                break
            if end >= stop:
                return False
            at, place = end, place + 1
        first = bisect_left(self._strided, (stop - self._longest,))
        for begin, end, unit in self._strided[first : bisect_right(self._strided, (origin, FAR_BEHIND))]:
            if begin <= origin and stop <= end and stands[unit]:
                return False
        return True


class UnitAvailability:
    """Which units of a program a half-filled source of some layout can give, by the pieces that stand there.

    A unit waits for one piece at a time, the first that lacks, so that a word of the source costs what it says and not
    how many units there are.
    """

    def __init__(self, program: NumberedProgram, layout: str, table: PieceTable) -> None:
        """Begin with none. `table` is that of the source's layout."""
        self._has = bytearray(len(table))
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        """By the piece that a unit waits for: the unit, and the first piece behind all of its pieces."""
        for first, count in program.given_by(layout):
            regions = program.regions(layout, [(first, count)])
            for unit, origin, form in zip(range(first, first + count), regions.origin, regions.form, strict=True):
                last = origin + form.origin_span_bytes - 1
                self._wait(table.piece_at(origin), unit, table.piece_at(last) + 1)

    def _wait(self, piece: int, unit: int, stop: int) -> None:
        self._waiting.setdefault(piece, []).append((unit, stop))

    def units(self, pieces: Iterable[Range]) -> tuple[Range, ...]:
        """Take note of pieces that stand there; return the units that can be had by that, and could not before."""
        size = len(self._has)
        inside = [(first, count) for first, count in pieces if first >= 0 and 0 < count <= size - first]
        set_marks(self._has, inside)
        there: list[Range] = []
        for first, count in inside:
            for piece in range(first, first + count):
                for unit, stop in self._waiting.pop(piece, ()):
                    lacking = self._has.find(0, piece, stop)
                    if lacking == -1:
                        there.append((unit, 1))
                    else:
                        self._wait(lacking, unit, stop)
        return tuple(merge_ranges(there))
