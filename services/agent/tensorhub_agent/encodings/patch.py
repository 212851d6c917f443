"""A patch: what to overwrite in one piece of a version to make it that piece of a later one. Pure.

A patch is positions and values, nothing else, so applying it twice is harmless, and applying several in a row makes
what the last one ends in. Only bytes are compared: -0.0 is not 0.0, and a NaN is the NaN that it was.

Elements are compared in *units* of 8, 4, 2 or 1 bytes, whichever divides the dtype's size. Positions are gaps of one
byte each (255 steps over 255 units that stay), or a bitmap where that is smaller; values stand by byte plane, because
the planes of floating-point numbers with sign and exponent compress, and those of mantissas don't. Each column goes
through zstd, and stays as it is where that saves nothing.

    form, unit, 2 bytes of zeros, changed units      8 bytes, little endian
    bytes of the positions, then of each plane       4 bytes each; the highest bit says that it is compressed
    positions, planes

Always true: `apply` writes nothing outside its piece, and nothing at all before the whole patch has been read. What is
no patch of such a piece is `PatchDamaged`.

Comparing takes about as long as reading both from memory, applying almost nothing: benchmarks/encodings.py.
"""

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from tensorhub_common.errors import TensorHubError

GAPS: Final = 1
BITMAP: Final = 2

STEP: Final = 255
"""A gap byte of this value steps over as many units, and none of them changes."""

LEVEL: Final = 1
"""Of zstd. What higher ones find in values that look random is not worth the time."""

WORTH: Final = 0.9
"""A patch that is longer than this part of its piece is no good: the piece itself costs nobody any work."""

DENSE: Final = 8
"""With more than one changed unit in so many, a bitmap is shorter than a byte for each gap."""

_HEAD: Final = struct.Struct("<BBHI")
_COLUMN: Final = struct.Struct("<I")
_PACKED: Final = 1 << 31

_Bytes = npt.NDArray[np.uint8]
_Units = npt.NDArray[np.unsignedinteger]
_Positions = npt.NDArray[np.intp]


class PatchDamaged(TensorHubError):
    """What came as a patch is none, or none for a piece of this size."""


def unit_of(itemsize: int) -> int:
    """Return in how many bytes at a time values of this size are compared."""
    return next(unit for unit in (8, 4, 2, 1) if not itemsize % unit)


def make(old: memoryview, new: memoryview, unit: int) -> bytes | None:
    """Return the patch from `old` to `new`: empty when they are equal, None when one is not worth its bytes.

    Both have the same length, a multiple of `unit`.
    """
    before, after = _units(old, unit), _units(new, unit)
    differs = before != after
    changed = int(np.count_nonzero(differs))
    if not changed:
        return b""
    if changed * unit > WORTH * len(new):
        return None
    # By positions, because numpy takes ten times as long to select by a mask.
    where = np.flatnonzero(differs)
    values = after[where]
    form, positions = (BITMAP, np.packbits(differs)) if changed * DENSE > len(after) else (GAPS, _gaps(where))
    planes = values.view(np.uint8).reshape(-1, unit)
    columns = [_stored(positions), *(_stored(np.ascontiguousarray(planes[:, each])) for each in range(unit))]
    patch = b"".join(
        (_HEAD.pack(form, unit, 0, changed), *(head for head, _ in columns), *(body for _, body in columns))
    )
    return patch if len(patch) <= WORTH * len(new) else None


def apply(patches: bytes | memoryview, piece: memoryview, unit: int) -> None:
    """Overwrite in `piece` what one patch, or several one after another, say; none changes nothing.

    Raises `PatchDamaged`, and then nothing is written.
    """
    target = _units(piece, unit)
    for where, values in list(_read(memoryview(patches), unit, len(target))):
        target[where] = values


def _units(view: memoryview, unit: int) -> _Units:
    units: _Units = np.frombuffer(view, dtype=f"<u{unit}")
    return units


def _gaps(where: _Positions) -> _Bytes:
    """Return how many units stay before each that changes, in bytes; `STEP` says that the gap goes on."""
    gaps = np.diff(where, prepend=-1) - 1
    steps = gaps // STEP
    column = np.full(len(where) + int(steps.sum()), STEP, dtype=np.uint8)
    column[np.arange(len(where)) + np.cumsum(steps)] = gaps - steps * STEP
    return column


def _stored(column: _Bytes) -> tuple[bytes, bytes]:
    plain = column.tobytes()
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(plain)
    if len(packed) < len(plain):
        return _COLUMN.pack(len(packed) | _PACKED), packed
    return _COLUMN.pack(len(plain)), plain


# Reading.


def _read(data: memoryview, unit: int, units: int) -> Iterator[tuple[_Positions, _Units]]:
    """Yield positions and values of each patch, all of them checked."""
    while len(data):
        form, own, zeros, changed = _head(data)
        if own != unit or zeros or not 0 < changed <= units:
            raise PatchDamaged(f"a patch of {changed} values of {own} bytes can't be one of {units} of {unit} bytes")
        at = _HEAD.size
        lengths = []
        for _ in range(1 + unit):
            if len(data) < at + _COLUMN.size:
                raise PatchDamaged("a patch ends within its head")
            lengths.append(_COLUMN.unpack_from(data, at)[0])
            at += _COLUMN.size
        bodies = []
        for length in lengths:
            end = at + (length & ~_PACKED)
            if end > len(data):
                raise PatchDamaged("a patch ends before its columns do")
            bodies.append((data[at:end], bool(length & _PACKED)))
            at = end
        where = _positions(form, *bodies[0], changed, units)
        planes = [_column(body, changed, changed, is_packed=packed) for body, packed in bodies[1:]]
        yield where, np.stack(planes, axis=1).reshape(-1).view(f"<u{unit}")
        data = data[at:]


def _head(data: memoryview) -> tuple[int, int, int, int]:
    if len(data) < _HEAD.size:
        raise PatchDamaged("a patch ends within its head")
    form, unit, zeros, changed = _HEAD.unpack_from(data)
    return form, unit, zeros, changed


def _positions(form: int, body: memoryview, is_packed: bool, changed: int, units: int) -> _Positions:  # noqa: FBT001
    if form == BITMAP:
        bits = np.unpackbits(_column(body, -(-units // 8), -(-units // 8), is_packed=is_packed))
        # As bool, of which numpy finds those that are set ten times as fast.
        where = np.flatnonzero(bits.view(np.bool_))
    elif form == GAPS:
        column = _column(body, changed, changed + units // STEP, is_packed=is_packed)
        lands = column != STEP
        # A step of 255 passes as many units; what lands takes one more, the unit that it lands on.
        where = (np.cumsum(column.astype(np.intp) + lands) - 1)[lands]
    else:
        raise PatchDamaged(f"a patch has positions of form {form}, which there is not")
    if len(where) != changed or where[-1] >= units:
        raise PatchDamaged(f"the positions of a patch are not {changed} of {units}")
    return where


def _column(body: memoryview, least: int, most: int, *, is_packed: bool) -> _Bytes:
    """Return a column that has from `least` to `most` bytes when it is unpacked."""
    if not is_packed:
        column = np.frombuffer(body, dtype=np.uint8)
    else:
        try:
            # Asked first, because the frame's own word decides how much memory is taken for it.
            nbytes = zstandard.frame_content_size(body)
            if not least <= nbytes <= most:
                raise PatchDamaged(f"a column of a patch has {nbytes} bytes, and {least} to {most} are possible")
            column = np.frombuffer(zstandard.ZstdDecompressor().decompress(body), dtype=np.uint8)
        except zstandard.ZstdError as why:
            raise PatchDamaged(f"a column of a patch can't be unpacked: {why}") from None
    if not least <= len(column) <= most:
        raise PatchDamaged(f"a column of a patch has {len(column)} bytes, and {least} to {most} are possible")
    return column
