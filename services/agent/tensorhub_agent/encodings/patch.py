"""A patch: what to overwrite in one piece of a version to make it that piece of a later one. Pure.

A patch is positions and values, nothing else, so applying it twice is harmless, and applying several in a row makes
what the last one ends in. Only bytes are compared: -0.0 is not 0.0, and a NaN is the NaN that it was.

Elements are compared in *units* of 8, 4, 2 or 1 bytes, whichever divides the dtype's size. Positions are gaps of one
byte each (255 steps over 255 units that stay), or a bitmap where that is smaller. Values are stored by byte plane,
because the planes of floating-point numbers with sign and exponent compress, and those of mantissas don't. Each column
goes through zstd, and stays as it is where that saves nothing.

    form, unit, 2 bytes of zeros, changed units      8 bytes, little endian
    bytes of the positions, then of each plane       4 bytes each; the highest bit says that it is compressed
    positions, planes

Invariant: `apply` writes nothing outside its piece, and nothing at all before the whole patch has been read. What is
no patch of such a piece is `Damaged`.

Comparing takes about as long as reading both from memory, applying almost nothing: benchmarks/kernels/encodings.py.
"""

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorhub_agent.encodings.byte_planes import Bytes, Damaged, Units, planes_of, read, stored, units_in, values_of

GAPS: Final = 1
BITMAP: Final = 2

STEP: Final = 255
"""A gap byte of this value steps over as many units, and none of them changes."""

WORTH: Final = 0.9
"""A patch that is longer than this part of its piece is no good: the piece itself costs no work."""

CHAIN_TIMES_MAX: Final = 4
"""Patches in a row change at most this many times the units of a piece, all together: what is read of them is
in memory at once, and a few bytes that compress well may claim anything."""

DENSE: Final = 8
"""With more than one changed unit in this many, a bitmap is shorter than a byte for each gap."""

_HEAD: Final = struct.Struct("<BBHI")

_Positions = npt.NDArray[np.intp]


def make(old: memoryview, new: memoryview, unit: int) -> bytes | None:
    """Return the patch from `old` to `new`: empty when they are equal, None when one is not worth its bytes.

    Both have the same length, a multiple of `unit`.
    """
    before, after = units_in(old, unit), units_in(new, unit)
    differs = before != after
    changed = int(np.count_nonzero(differs))
    if not changed:
        return b""
    if changed * unit > WORTH * len(new):
        return None
    # By positions, because numpy takes ten times as long to select by a mask.
    where = np.flatnonzero(differs)
    form, positions = (BITMAP, np.packbits(differs)) if changed * DENSE > len(after) else (GAPS, _gaps(where))
    patch = _HEAD.pack(form, unit, 0, changed) + stored([positions, *planes_of(after[where], unit)])
    return patch if len(patch) <= WORTH * len(new) else None


def apply(patches: bytes | memoryview, piece: memoryview, unit: int) -> None:
    """Overwrite in `piece` what one patch, or several one after another, say; none changes nothing.

    Raises `Damaged`, and then nothing is written.
    """
    target = units_in(piece, unit)
    for where, values in list(_read(memoryview(patches), unit, len(target))):
        target[where] = values


def _gaps(where: _Positions) -> Bytes:
    """Return how many units stay before each that changes, in bytes; `STEP` says that the gap goes on."""
    gaps = np.diff(where, prepend=-1) - 1
    steps = gaps // STEP
    column = np.full(len(where) + int(steps.sum()), STEP, dtype=np.uint8)
    column[np.arange(len(where)) + np.cumsum(steps)] = gaps - steps * STEP
    return column


# Reading.


def _read(data: memoryview, unit: int, units: int) -> Iterator[tuple[_Positions, Units]]:
    """Yield positions and values of each patch, all of them checked."""
    most = CHAIN_TIMES_MAX * units
    while len(data):
        if len(data) < _HEAD.size:
            raise Damaged("a patch ends within its head")
        form, own, zeros, changed = _HEAD.unpack_from(data)
        if form not in (GAPS, BITMAP) or own != unit or zeros or not 0 < changed <= units:
            raise Damaged(
                f"a patch of form {form}, of {changed} values of {own} bytes, can't be one of {units} of {unit} bytes"
            )
        most -= changed
        if most < 0:
            raise Damaged(
                f"patches in a row change more than {CHAIN_TIMES_MAX} times what a piece of {units} units has"
            )
        bitmap = -(-units // 8)
        positions = (bitmap, bitmap) if form == BITMAP else (changed, changed + units // STEP)
        (column, *planes), data = read(data[_HEAD.size :], [positions, *[(changed, changed)] * unit])
        yield _positions(form, column, changed, units), values_of(planes)


def _positions(form: int, column: Bytes, changed: int, units: int) -> _Positions:
    if form == BITMAP:
        # As bool, of which numpy finds those that are set ten times as fast.
        where = np.flatnonzero(np.unpackbits(column).view(np.bool_))
    else:
        lands = column != STEP
        # A step of 255 passes as many units; what lands takes one more, the unit that it lands on.
        where = (np.cumsum(column.astype(np.intp) + lands) - 1)[lands]
    if len(where) != changed or where[-1] >= units:
        raise Damaged(f"the positions of a patch are not {changed} of {units}")
    return where
