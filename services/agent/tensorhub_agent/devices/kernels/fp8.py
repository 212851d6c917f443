"""Boxes of fp8 values and scales, computed in a GPU's memory: what `fp8.cu` does, in launches.

A box is a list of matrices, of its last two dimensions. Where the largest magnitudes of its blocks don't come with it
they are found first.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.primitives.block_forms import derivation_of
from tensorhub_common.devices.cuda import CudaDevice, CudaStream
from tensorhub_common.devices.device import DeviceMemory
from tensorhub_common.layout.casts import ScaleOrder
from tensorhub_common.layout.quantized import QuantizedKind

THREADS: Final = 256
TILE_ROWS: Final = 32
TILE_COLUMNS: Final = 1024
"""As in the source."""

ALIGNMENT: Final = 16

_MATRIX: Final = np.dtype(
    [
        *((name, "<u8") for name in ("from", "from_row", "to", "to_row", "amax")),
        *((name, "<u4") for name in ("rows", "columns", "first_row", "first_column", "to_rows", "to_columns")),
        *((name, "<u4") for name in ("block_rows", "block_columns", "to_column", "ends")),
    ]
)
_SCHEME: Final = np.dtype(
    [
        ("amax_min", "<f4"),
        ("scale_min", "<f4"),
        *((name, "<u4") for name in ("order", "is_power_of_two", "saturates", "is_amax")),
    ]
)
_ORDERS: Final = {ScaleOrder.MULTIPLY: 0, ScaleOrder.DIVIDE: 1, ScaleOrder.RECIPROCAL: 2}


class _Matrix(NamedTuple):
    """One matrix of a box, as the table has it, but for where its largest magnitudes are."""

    entry: dict[str, int]
    blocks: int


class Tables:
    """The tables of the boxes of one cast: matrices, the scheme, and how many floats their largest magnitudes take."""

    def __init__(self, boxes: Sequence[DeviceBox]) -> None:
        """Take boxes of one cast, which is a derivation."""
        found = derivation_of(boxes[0].form)
        assert found is not None
        self.from_dtype, self.kind = found
        matrices = [matrix for box in boxes for matrix in _matrices(box, self.kind)]
        self.matrices = np.zeros(len(matrices), _MATRIX)
        self.amax_count = tiles = 0
        for row, (entry, blocks) in zip(self.matrices, matrices, strict=True):
            tiles += _tiles(entry)
            for name, value in entry.items():
                row[name] = value
            row["amax"], row["ends"] = 4 * self.amax_count, tiles
            self.amax_count += blocks
        self.tiles = tiles
        self.given = b"".join(box.amax for box in boxes)
        """The largest magnitudes that came with the boxes: those of all of them, or none."""

    def scheme(self) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        """Return the scheme as kernels take it."""
        scheme = self.kind.scheme
        row = (scheme.amax_min, scheme.scale_min, _ORDERS[scheme.order], scheme.power_of_two, scheme.saturate)
        return np.array([(*row, self.kind.is_amax)], _SCHEME)

    def place(self, amax: int) -> None:
        """Take where the largest magnitudes are."""
        self.matrices["amax"] += np.uint64(amax)


class Fp8Computer:
    """The fp8 boxes of one stream, which one thread uses at a time."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Take no memory yet."""
        self._device, self._library, self._stream = device, library, stream
        self._room: DeviceMemory | None = None

    def compute(self, boxes: Sequence[DeviceBox]) -> None:
        """Compute boxes that are derived of numbers; return when all are there."""
        for cast in dict.fromkeys(box.form.cast for box in boxes):
            some = [box for box in boxes if box.form.cast == cast]
            for is_given in (False, True):
                if part := [box for box in some if bool(box.amax) is is_given]:
                    self._compute(Tables(part))

    def _compute(self, tables: Tables) -> None:
        count, scheme = len(tables.matrices), tables.scheme()
        if not count:
            return
        matrices_nbytes = -(-tables.matrices.nbytes // ALIGNMENT) * ALIGNMENT
        scheme_nbytes = -(-scheme.nbytes // ALIGNMENT) * ALIGNMENT
        begin = self._address(matrices_nbytes + scheme_nbytes + 4 * tables.amax_count)
        matrices, scheme_at = begin, begin + matrices_nbytes
        amax = scheme_at + scheme_nbytes
        tables.place(amax)
        stream = self._stream
        stream.copy(matrices, tables.matrices.ctypes.data, tables.matrices.nbytes)
        stream.copy(scheme_at, scheme.ctypes.data, scheme.nbytes)
        given = np.frombuffer(tables.given, np.uint8)
        if len(given):
            stream.copy(amax, given.ctypes.data, len(given))
        else:
            stream.fill(amax, 4 * tables.amax_count)
            self._launch(f"largest_{tables.from_dtype}", tables.tiles, (matrices, count))
        if tables.kind.is_scales:
            self._launch("scales", count, (matrices, count, scheme_at))
        else:
            self._launch(f"values_{tables.from_dtype}", tables.tiles, (matrices, count, scheme_at))
        stream.record().wait()

    def _launch(self, name: str, groups: int, arguments: tuple[int, ...]) -> None:
        self._stream.launch(self._library.kernel("fp8", name), (groups, 1), THREADS, arguments)

    def _address(self, nbytes: int) -> int:
        """Return where so much memory is; it grows to what the largest call took."""
        if self._room is None or self._room.nbytes < nbytes:
            if self._room is not None:
                self._room.close()
            self._room = self._device.allocate(nbytes)
        return self._room.address


def _matrices(box: DeviceBox, kind: QuantizedKind) -> Iterator[_Matrix]:
    """Yield the matrices of a box."""
    form = box.form
    source = form.origin_shape
    skip = (0,) * len(source) if form.blocks is None else form.blocks.skip
    block_rows, block_columns = kind.block(source)[-2:]
    blocks = math.prod(kind.scheme.scales_shape(source)[-2:])
    for batch in itertools.product(*(range(size) for size in source[:-2])):
        # Of values the box has some matrices of the source, of scales all.
        at = tuple(index - lead for index, lead in zip(batch, skip[:-2], strict=True))
        if any(not 0 <= index < size for index, size in zip(at, form.shape[:-2], strict=True)):
            continue
        entry = {
            "from": box.origin + sum(index * stride for index, stride in zip(batch, form.origin_strides, strict=False)),
            "from_row": form.origin_strides[-2],
            "to": box.to + sum(index * stride for index, stride in zip(at, form.to_strides, strict=False)),
            "to_row": form.to_strides[-2],
            "rows": source[-2],
            "columns": source[-1],
            "first_row": skip[-2],
            "first_column": skip[-1],
            "to_rows": form.shape[-2],
            "to_columns": form.shape[-1],
            "block_rows": block_rows,
            "block_columns": block_columns,
            "to_column": form.to_strides[-1],
        }
        yield _Matrix(entry, blocks)


def _tiles(entry: dict[str, int]) -> int:
    in_a_block = -(-entry["block_columns"] // TILE_COLUMNS)
    return -(-entry["rows"] // TILE_ROWS) * -(-entry["columns"] // entry["block_columns"]) * in_a_block
