"""Deltas of pieces in a GPU's memory: what changed of them, and overwriting. What `deltas.cu` does, in launches.

What is compared with may lie in the host's memory: it is brought beside the pieces first, some of it at a time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorhub_agent.devices.changes import BITMAP, GAPS, UNCHANGED, Changes, form_of, is_short
from tensorhub_agent.devices.columns import Columns, join_adjacent
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.devices.planes import Bytes
from tensorhub_common.devices.cuda import CudaDevice, CudaStream
from tensorhub_common.devices.device import DeviceMemory

THREADS: Final = 256
PART_UNITS: Final = THREADS * 128
PART_BYTES: Final = PART_UNITS // 8
"""As in the source."""

COMPARED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Pieces are compared by so much at a time, a piece at least: the room for it is twice this and a bitmap."""

COMPARED_PIECES_MAX: Final = 1024
"""Limit of the pieces that are compared at a time, where they are tiny."""

COLUMNS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Columns are brought to the GPU by so much at a time, those of a piece at least."""

ALIGNMENT: Final = 16

_PAIR: Final = np.dtype(
    [
        *((name, "<u8") for name in ("old", "new", "bits", "starts")),
        *((name, "<u4") for name in ("units", "shift", "ends", "padding")),
    ]
)
_START: Final = np.dtype([(name, "<u4") for name in ("rank", "next", "gaps", "padding")])
_TOTAL: Final = np.dtype([("changed", "<u4"), ("gaps", "<u4")])
_PLACE: Final = np.dtype([("positions", "<u8"), ("planes", "<u8"), ("changed", "<u4"), ("form", "<u4")])
_TARGET: Final = np.dtype([("at", "<u8"), *((name, "<u4") for name in ("units", "shift", "first", "patches"))])
_PATCH: Final = np.dtype(
    [
        *((name, "<u8") for name in ("positions", "planes")),
        *((name, "<u4") for name in ("changed", "nbytes", "form", "padding")),
    ]
)

_Table = npt.NDArray[np.void]


class ComparisonTables:
    """The tables of pieces that are compared in one launch, and what is read off them afterwards."""

    def __init__(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> None:
        """Take where pieces lie, as they were and as they are, and the bytes of a unit of each."""
        self._nbytes, self._units = nbytes, units
        self._counts = nbytes // units
        parts = -(-self._counts // PART_UNITS)
        self.ends = np.cumsum(parts)
        self.parts = int(self.ends[-1])
        self.pairs = np.zeros(len(nbytes), _PAIR)
        self.pairs["old"], self.pairs["new"], self.pairs["ends"] = old, new, self.ends
        self.pairs["units"], self.pairs["shift"] = self._counts, np.log2(units)
        self.pairs["bits"], self.pairs["starts"] = (
            (self.ends - parts) * PART_BYTES,
            (self.ends - parts) * _START.itemsize,
        )
        self.totals = np.zeros(len(nbytes), _TOTAL)
        """What the kernel counts."""
        self.places = np.zeros(len(nbytes), _PLACE)

    @property
    def room_bytes(self) -> int:
        """How much memory the bitmaps and the parts' beginnings take, one after the other."""
        return self.parts * (PART_BYTES + _START.itemsize)

    def place(self, room: int) -> None:
        """Take where that memory is."""
        self.pairs["bits"] += np.uint64(room)
        self.pairs["starts"] += np.uint64(room + self.parts * PART_BYTES)

    def arrange(self) -> int:
        """Lay out the columns of what was counted, from 0 on; return how many bytes they take."""
        end = 0
        for number, (changed, gaps) in enumerate(self.totals.tolist()):
            unit, units = int(self._units[number]), int(self._counts[number])
            if not changed or not is_short(changed, unit, int(self._nbytes[number])):
                continue
            form = form_of(changed, units)
            planes = end + _aligned(-(-units // 8) if form == BITMAP else gaps)
            self.places[number] = (end, planes, changed, form)
            end = planes + _aligned(changed * unit)
        return end

    def put_at(self, columns: int) -> _Table:
        """Return the table of where columns go that begin at this address."""
        places = self.places.copy()
        is_there = places["changed"] > 0
        for name in ("positions", "planes"):
            places[name][is_there] += np.uint64(columns)
        return places

    def changes(self, columns: Bytes) -> list[Changes | None]:
        """Return what changed of each piece, from the columns that were gathered."""
        return [self._changes_of(number, columns) for number in range(len(self.pairs))]

    def _changes_of(self, number: int, columns: Bytes) -> Changes | None:
        positions, planes, changed, form = self.places[number].tolist()
        if not changed:
            return None if self.totals["changed"][number] else UNCHANGED
        gaps = int(self.totals["gaps"][number])
        nbytes = -(-int(self._counts[number]) // 8) if form == BITMAP else gaps
        begins = range(planes, planes + changed * int(self._units[number]), changed)
        values = [columns[begin : begin + changed] for begin in begins]
        return Changes(form, changed, columns[positions : positions + nbytes], values)


class OverwriteTables:
    """The tables of pieces that are overwritten in one launch, and the columns that they are overwritten by."""

    def __init__(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]], columns_bytes: int
    ) -> None:
        """Take patches of each piece, whose columns have the sizes that `columns_bytes` says of all together."""
        self.targets = np.zeros(len(at), _TARGET)
        counts = np.array([len(each) for each in patches], np.int64)
        ends = np.cumsum(counts)
        self.targets["at"], self.targets["units"], self.targets["shift"] = at, nbytes // units, np.log2(units)
        self.targets["first"], self.targets["patches"] = ends - counts, counts
        self.patches = np.zeros(max(1, int(counts.sum())), _PATCH)
        self.columns = np.empty(columns_bytes, np.uint8)
        end = 0
        for number, changes in enumerate(changes for each in patches for changes in each):
            planes = end + _aligned(len(changes.positions))
            self.columns[end : end + len(changes.positions)] = changes.positions
            # Only two forms are known there: what is no bitmap is gaps.
            form = BITMAP if changes.form == BITMAP else GAPS
            self.patches[number] = (end, planes, changes.changed, len(changes.positions), form, 0)
            for plane, column in enumerate(changes.planes):
                begin = planes + plane * changes.changed
                self.columns[begin : begin + changes.changed] = column
            end = planes + _aligned(changes.changed * len(changes.planes))
        self.right = np.zeros(len(at), np.uint32)
        """Which pieces the kernel has overwritten."""

    def place(self, columns: int) -> None:
        """Take where the columns are."""
        for name in ("positions", "planes"):
            self.patches[name] += np.uint64(columns)


class _Room:
    """Memory of a GPU that grows to what the largest call took. What one call puts there is gone with the next."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._memory: DeviceMemory | None = None

    def address(self, nbytes: int) -> int:
        """Return where so much memory is. No work on what was there before may be under way."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self._memory = self._device.allocate(nbytes)
        return self._memory.address


class PieceComparer:
    """Compares pieces of one GPU. One thread at a time does, so that its room is taken once."""

    def __init__(self, device: CudaDevice, library: KernelLibrary) -> None:
        """Take no memory yet."""
        self._library, self._stream = library, device.stream()
        self._old, self._room, self._columns = _Room(device), _Room(device), _Room(device)
        self._lock = threading.Lock()

    def changes(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> list[Changes | None]:
        """See `DeviceEngine.changes`."""
        found: list[Changes | None] = []
        with self._lock:
            for some in cut(nbytes, COMPARED_BYTES_MAX, COMPARED_PIECES_MAX):
                here = self._places_of_old(new[some], nbytes[some])
                tables = ComparisonTables(here, new[some], nbytes[some], units[some])
                # Before any work: memory that is not to be had must not end the call while the bus still reads.
                self._take_room(tables)
                for to, origin, size in zip(*join_adjacent(here, old[some], nbytes[some]), strict=True):
                    self._stream.copy(int(to), int(origin), int(size))
                found += self._compared(tables)
        return found

    def _places_of_old(self, new: Columns, nbytes: Columns) -> Columns:
        """Return where what pieces were is to lie, aligned as what they are."""
        phase = new % ALIGNMENT
        slots = -(-(phase + nbytes) // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(slots)
        here: Columns = ends - slots + phase + self._old.address(int(ends[-1]))
        return here

    def _take_room(self, tables: ComparisonTables) -> tuple[int, int, int, int]:
        """Return where the tables of pieces, the bitmaps, the totals and the places are."""
        count = len(tables.pairs)
        pairs = self._room.address(count * (_PAIR.itemsize + _TOTAL.itemsize + _PLACE.itemsize) + tables.room_bytes)
        bits = pairs + count * _PAIR.itemsize
        totals = bits + tables.room_bytes
        return pairs, bits, totals, totals + count * _TOTAL.itemsize

    def _compared(self, tables: ComparisonTables) -> list[Changes | None]:
        stream, count = self._stream, len(tables.pairs)
        pairs, bits, totals, places = self._take_room(tables)
        tables.place(bits)
        stream.copy(pairs, tables.pairs.ctypes.data, tables.pairs.nbytes)
        self._launch("compare", tables.parts, pairs, count)
        self._launch("number_changes", count, pairs, count, totals)
        stream.copy(tables.totals.ctypes.data, totals, tables.totals.nbytes)
        stream.record().wait()
        nbytes = tables.arrange()
        landing = np.empty(nbytes, np.uint8)
        if nbytes:
            columns = self._columns.address(nbytes)
            where = tables.put_at(columns)
            stream.copy(places, where.ctypes.data, where.nbytes)
            self._launch("gather_changes", tables.parts, pairs, count, places)
            stream.copy(landing.ctypes.data, columns, nbytes)
            stream.record().wait()
        return tables.changes(landing)

    def _launch(self, name: str, groups: int, *arguments: int) -> None:
        self._stream.launch(self._library.kernel("deltas", name), (groups, 1), THREADS, arguments)

    @property
    def stream(self) -> CudaStream:
        """Where its work is done."""
        return self._stream

    def by_kernel(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> dict[str, Callable[[], None]]:
        """Return what runs each kernel again over pieces of the GPU's memory, in one launch, to be measured."""
        tables = ComparisonTables(old, new, nbytes, units)
        self._compared(tables)
        count, (pairs, _, totals, places) = len(nbytes), self._take_room(tables)
        found: dict[str, Callable[[], None]] = {
            "compare": lambda: self._launch("compare", tables.parts, pairs, count),
            "number_changes": lambda: self._launch("number_changes", count, pairs, count, totals),
        }
        if tables.places["changed"].any():
            found["gather_changes"] = lambda: self._launch("gather_changes", tables.parts, pairs, count, places)
        return found


class PieceOverwriter:
    """The overwriting of one stream, which one thread uses at a time."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Take no memory yet."""
        self._library, self._stream = library, stream
        self._room = _Room(device)

    def overwrite(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]]
    ) -> npt.NDArray[np.bool_]:
        """Overwrite pieces as their patches say, in the order of the stream; return which were, once all are."""
        sizes = np.array([sum(map(_columns_bytes, each)) for each in patches], np.int64)
        found = [np.zeros(0, np.bool_)]
        for some in cut(sizes, COLUMNS_BYTES_MAX, len(sizes)):
            tables = OverwriteTables(at[some], nbytes[some], units[some], patches[some], int(sizes[some].sum()))
            found.append(self._overwritten(tables))
        return np.concatenate(found)

    def _overwritten(self, tables: OverwriteTables) -> npt.NDArray[np.bool_]:
        stream = self._stream
        targets, patches, right, columns = self._take_room(tables)
        tables.place(columns)
        for to, table in ((targets, tables.targets), (patches, tables.patches), (columns, tables.columns)):
            if table.nbytes:
                stream.copy(to, table.ctypes.data, table.nbytes)
        self._launch(tables)
        stream.copy(tables.right.ctypes.data, right, tables.right.nbytes)
        stream.record().wait()
        return tables.right > 0

    def _take_room(self, tables: OverwriteTables) -> tuple[int, int, int, int]:
        """Return where the tables of pieces and of patches, the answers and the columns are."""
        sizes = (tables.targets.nbytes, tables.patches.nbytes, _aligned(tables.right.nbytes), tables.columns.nbytes)
        targets = self._room.address(sum(sizes))
        patches = targets + sizes[0]
        right = patches + sizes[1]
        return targets, patches, right, right + sizes[2]

    def _launch(self, tables: OverwriteTables) -> None:
        (targets, patches, right, _), count = self._take_room(tables), len(tables.targets)
        kernel = self._library.kernel("deltas", "overwrite")
        self._stream.launch(kernel, (count, 1), THREADS, (targets, count, patches, right))

    def by_kernel(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]]
    ) -> Callable[[], None]:
        """Return what runs the kernel again over these pieces, in one launch, to be measured."""
        tables = OverwriteTables(
            at, nbytes, units, patches, sum(_columns_bytes(one) for each in patches for one in each)
        )
        self._overwritten(tables)
        return lambda: self._launch(tables)


def cut(nbytes: Columns, bytes_max: int, count_max: int) -> Iterator[slice]:
    """Yield runs of at most so many items and bytes, one item at least each."""
    first = 0
    while first < len(nbytes):
        ends = np.cumsum(nbytes[first : first + count_max])
        last = first + max(1, int(np.searchsorted(ends, bytes_max, "right")))
        yield slice(first, last)
        first = last


def _columns_bytes(changes: Changes) -> int:
    return _aligned(len(changes.positions)) + _aligned(changes.changed * len(changes.planes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
