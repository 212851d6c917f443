"""Deltas that are made of a GPU's memory, and applied there, beside a copy of the same pieces."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from benchmarks.gpu.timing import device_s, wall_s
from tensorhub_agent.devices.changes import changes_between
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_agent.devices.kernels.deltas import PieceComparer, PieceOverwriter
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.devices.pinned_buffer import PinnedBuffer
from tensorhub_agent.encodings.patch import written
from tensorhub_common.devices.cuda import CudaDevice

PIECE: Final = 4 << 20
UNIT: Final = 2
PIECES: Final = 256
HOST_PIECES: Final = 64
CHANGED: Final = (0.0, 0.001, 0.01, 0.05, 0.2)


class DeltaRow(NamedTuple):
    """One measurement."""

    what: str
    pieces: int
    changed: float
    """The share of the values."""
    bps: float
    """Bytes of pieces, whatever of them changed."""
    share: float
    """Of the driver's copy of as many bytes, timed by the GPU's events."""


def measure(device: CudaDevice) -> list[DeltaRow]:
    """Measure pieces of random bfloat16 values, of which some changed anywhere."""
    nbytes = PIECES * PIECE
    stream, a, b = device.stream(), device.allocate(nbytes), device.allocate(nbytes)
    copy_s = device_s(device, stream, lambda: stream.copy(b.address, a.address, nbytes))
    old = np.random.default_rng(0).integers(0, 1 << 16, PIECE // UNIT, np.uint16)
    rows = []
    for changed in CHANGED:
        new = old.copy()
        new[np.random.default_rng(1).random(len(new)) < changed] ^= 1
        for number in range(PIECES):
            stream.copy(a.address + number * PIECE, old.ctypes.data, PIECE)
            stream.copy(b.address + number * PIECE, new.ctypes.data, PIECE)
        stream.record().wait()
        at = np.arange(PIECES, dtype=np.int64) * PIECE
        for what, pieces, took_s in _times(device, old, new, at + a.address, at + b.address):
            bps = pieces * PIECE / took_s
            rows.append(DeltaRow(what, pieces, changed, bps, bps * copy_s / nbytes))
    a.close()
    b.close()
    return rows


def _times(
    device: CudaDevice, old: np.ndarray, new: np.ndarray, before: Columns, after: Columns
) -> Iterator[tuple[str, int, float]]:
    """Yield what was measured, of how many pieces, and the seconds that it takes."""
    library, engine = KernelLibrary(device), CudaEngine(device)
    sizes, units = np.full(PIECES, PIECE, np.int64), np.full(PIECES, UNIT, np.int64)
    comparer = PieceComparer(device, library)
    kernels = comparer.by_kernel(before, after, sizes, units)
    for name, work in kernels.items():
        yield f"kernel {name}", PIECES, device_s(device, comparer.stream, work)
    yield (
        "made: all of them",
        PIECES,
        device_s(device, comparer.stream, lambda: [each() for each in kernels.values()]),
    )
    some = slice(0, HOST_PIECES)
    shadow = PinnedBuffer(device, HOST_PIECES * PIECE)
    np.frombuffer(shadow.view, np.uint16).reshape(HOST_PIECES, -1)[:] = old
    here = np.arange(HOST_PIECES, dtype=np.int64) * PIECE + shadow.address
    took_s = wall_s(lambda: engine.changes(here, after[some], sizes[some], units[some]), rounds=3)
    yield "made with a shadow in pinned memory, waited for", HOST_PIECES, took_s
    changes = changes_between(old, new)
    assert changes is not None
    took_s = wall_s(lambda: written(changes, UNIT, PIECE), rounds=3)
    yield "a patch compressed, by one thread of the host", 1, took_s
    if not changes.changed:
        return
    overwriter = PieceOverwriter(device, library, comparer.stream)
    patches = [[changes]] * PIECES
    overwrite = overwriter.by_kernel(before, sizes, units, patches)
    yield "kernel overwrite", PIECES, device_s(device, comparer.stream, overwrite)
    took_s = wall_s(lambda: engine.overwrite(before, sizes, units, patches), rounds=3)
    yield "applied and digested, columns unpacked before, waited for", PIECES, took_s
