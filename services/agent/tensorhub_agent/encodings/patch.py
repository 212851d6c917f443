"""A patch: what to overwrite in one piece of a version to make it that piece of a later one. Pure.

A patch is positions and values, nothing else, so applying it twice is harmless, and applying several in a row makes
what the last one ends in. Only bytes are compared: -0.0 is not 0.0, and a NaN is the NaN that it was.

Elements are compared in *units* of 8, 4, 2 or 1 bytes, whichever divides the dtype's size (`devices.changes`). Values
are stored by byte plane, because the planes of floating-point numbers with sign and exponent compress, and those of
mantissas don't. Each column goes through zstd, and stays as it is where that saves nothing.

    form, unit, 2 bytes of zeros, changed units      8 bytes, little endian
    bytes of the positions, then of each plane       4 bytes each; the highest bit says that it is compressed
    positions, planes

Invariant: `apply` writes nothing outside its piece, and nothing at all before the whole patch has been read. What is
no patch of such a piece is `Damaged`.

Comparing takes about as long as reading both from memory, applying almost nothing: benchmarks/kernels/encodings.py.
"""

import struct
from typing import Final

from tensorhub_agent.devices.changes import (
    BITMAP,
    GAPS,
    STEP,
    VALUES_SHARE_MAX,
    Changes,
    changes_between,
    positions_in,
    values_in,
)
from tensorhub_agent.devices.planes import units_in
from tensorhub_agent.encodings.columns import Damaged, read, stored

WORTH: Final = VALUES_SHARE_MAX
"""A patch that is longer than this part of its piece is no good: the piece itself costs no work."""

CHAIN_TIMES_MAX: Final = 4
"""Patches in a row change at most this many times the units of a piece, all together: what is read of them is
in memory at once, and a few bytes that compress well may claim anything."""

_HEAD: Final = struct.Struct("<BBHI")


def make(old: memoryview, new: memoryview, unit: int) -> bytes | None:
    """Return the patch from `old` to `new`: empty when they are equal, None when one is not worth its bytes.

    Both have the same length, a multiple of `unit`.
    """
    return written(changes_between(units_in(old, unit), units_in(new, unit)), unit, len(new))


def written(changes: Changes | None, unit: int, nbytes: int) -> bytes | None:
    """Return the patch that has these changes of a piece; see `make`."""
    if changes is None:
        return None
    if not changes.changed:
        return b""
    patch = _HEAD.pack(changes.form, unit, 0, changes.changed) + stored([changes.positions, *changes.planes])
    return patch if len(patch) <= WORTH * nbytes else None


def apply(patches: bytes | memoryview, piece: memoryview, unit: int) -> None:
    """Overwrite in `piece` what one patch, or several one after another, say; none changes nothing.

    Raises `Damaged`, and then nothing is written.
    """
    target = units_in(piece, unit)
    steps = []
    for changes in changes_in(patches, unit, len(target)):
        where = positions_in(changes, len(target))
        if where is None:
            raise Damaged(f"the positions of a patch are not {changes.changed} of {len(target)}")
        steps.append((where, values_in(changes)))
    for where, values in steps:
        target[where] = values


def changes_in(patches: bytes | memoryview, unit: int, units: int) -> list[Changes]:
    """Return what patches in a row say of a piece, by columns of the right sizes.

    The positions in them are not looked at: `positions_in` does that, or who overwrites. Raises `Damaged`.
    """
    data, most, found = memoryview(patches), CHAIN_TIMES_MAX * units, []
    while data:
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
        found.append(Changes(form, changed, column, planes))
    return found
