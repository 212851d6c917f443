"""The kernels beside a copy of the same bytes."""

import functools
from typing import Final, NamedTuple

import numpy as np

from benchmarks.gpu.timing import device_s, wall_s
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_agent.devices.kernels.digests import PIECES_MAX, Digester
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_common.devices.cuda import CudaDevice
from tensorhub_common.layout.casts import CASTABLE, dtypes_of
from tensorhub_common.programs.regions import Blocks, StridedForm

PIECE: Final = 4 << 20
SHORT_ROW_BYTES: Final = 8
COLUMNS: Final = 8192
CASTS: Final = ("float32>bfloat16", "bfloat16>float32", "float32>float8_e4m3fn", "bfloat16>float8_e4m3fn")


class Row(NamedTuple):
    """One measurement."""

    what: str
    pieces: int
    bps: float
    share: float
    """Of the driver's copy of as many bytes, timed by the GPU's events."""


def measure(device: CudaDevice, counts: tuple[int, ...] = (1, 16, 256, 1024)) -> list[Row]:
    """Measure by batches of pieces of 4 MiB, of random bytes."""
    found = []
    for pieces in counts:
        found += _measured(device, pieces)
    return found


def _measured(device: CudaDevice, pieces: int) -> list[Row]:
    nbytes = pieces * PIECE
    engine, library, stream = CudaEngine(device), KernelLibrary(device), device.stream()
    a, b = device.allocate(nbytes), device.allocate(nbytes)
    random = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8)
    for number in range(pieces):
        stream.copy(a.address + number * PIECE, random.ctypes.data, PIECE)
    stream.record().wait()
    to = np.arange(pieces, dtype=np.int64) * PIECE + b.address
    origin = np.arange(pieces, dtype=np.int64) * PIECE + a.address
    sizes = np.full(pieces, PIECE, np.int64)
    copy_s = device_s(device, stream, lambda: stream.copy(b.address, a.address, nbytes))
    rows = [Row("the driver's copy, by events", pieces, nbytes / copy_s, 1.0)]

    def row(what: str, took_s: float) -> None:
        rows.append(Row(what, pieces, nbytes / took_s, copy_s / took_s))

    row("the driver's copy, waited for", wall_s(lambda: engine.copy([b.address], [a.address], [nbytes])))
    digester = Digester(device, library, stream)
    some = slice(0, PIECES_MAX)
    digester.begin(to[some], origin[some], sizes[some])
    digester.collect()
    share = len(to[some]) / pieces
    for name, work in digester.by_kernel().items():
        took_s = device_s(device, stream, work)
        rows.append(Row(f"kernel {name}", len(to[some]), share * nbytes / took_s, copy_s * share / took_s))
    row("copy and digest, waited for", wall_s(lambda: engine.copy_and_digest(to, origin, sizes)))
    row("digest, waited for", wall_s(lambda: engine.digest(to, sizes)))
    a.close()
    b.close()
    return rows


class BoxRow(NamedTuple):
    """Strided rows packed, or numbers cast."""

    what: str
    bps: float
    """Of a cast: the mean of what is read and what is written."""
    share: float


def boxes(device: CudaDevice, nbytes: int = 1 << 30) -> list[BoxRow]:
    """Measure the packing of every other row of a matrix, by the length of its rows."""
    engine, stream = CudaEngine(device), device.stream()
    a, b = device.allocate(2 * nbytes), device.allocate(nbytes)
    copy_s = device_s(device, stream, lambda: stream.copy(b.address, a.address, nbytes))
    found = []
    for row in (8192, 2048, 512, 64, 16, 2):
        some = nbytes if row > SHORT_ROW_BYTES else nbytes // 8
        box = DeviceBox(b.address, a.address, StridedForm((some // row, row), (row, 1), (2 * row, 1), 1, 1))
        took_s = wall_s(functools.partial(engine.copy_boxes, [box]))
        found.append(BoxRow(f"rows of {row} bytes, packed", some / took_s, copy_s * some / nbytes / took_s))
    for cast in CASTS:
        one, other = (CASTABLE[dtype] for dtype in dtypes_of(cast))
        count = nbytes // max(one, other)
        box = DeviceBox(b.address, a.address, StridedForm((count,), (other,), (one,), one, other, cast))
        took_s, moved = wall_s(functools.partial(engine.copy_boxes, [box])), count * (one + other) / 2
        found.append(BoxRow(cast, moved / took_s, copy_s * moved / nbytes / took_s))
    rows = nbytes // 2 // COLUMNS
    amax = np.ones((rows // 128, COLUMNS // 128), np.float32).tobytes()
    for what, given, blocks in (
        ("with their blocks' largest magnitudes found first", b"", Blocks((rows, COLUMNS), (0, 0))),
        ("by largest magnitudes that came", amax, None),
    ):
        strides = (COLUMNS, 1), (2 * COLUMNS, 2)
        form = StridedForm((rows, COLUMNS), *strides, 2, 1, "bfloat16>fp8-block-128:values", blocks)
        box = DeviceBox(b.address, a.address, form, given)
        took_s, moved = wall_s(functools.partial(engine.copy_boxes, [box])), rows * COLUMNS * 1.5
        found.append(
            BoxRow(f"bfloat16 to fp8 by blocks of 128, {what}", moved / took_s, copy_s * moved / nbytes / took_s)
        )
    a.close()
    b.close()
    return found
