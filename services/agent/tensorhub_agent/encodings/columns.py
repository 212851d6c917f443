"""Columns of bytes, each compressed where that makes it shorter: what encodings consist of. Pure.

Invariant: what is read takes no more memory than the reader expects, whatever sizes it claims.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard

from tensorhub_agent.devices.planes import Bytes
from tensorhub_common.errors import TensorHubError

LEVEL: Final = 1
"""Of zstd. What higher ones find in values that look random is not worth the time."""

_LENGTH: Final = struct.Struct("<I")
_PACKED: Final = 1 << 31
"""Set in the length of a column that is compressed."""


class Damaged(TensorHubError):
    """What came as an encoding is none, or none for what was expected."""


def unit_of(itemsize: int) -> int:
    """Return in how many bytes at a time values of this size are taken: 8, 4, 2 or 1, whichever divides it."""
    return next(unit for unit in (8, 4, 2, 1) if not itemsize % unit)


def stored(columns: Sequence[Bytes]) -> bytes:
    """Return columns as bytes: their lengths, 4 bytes each, and then the columns."""
    heads, bodies = [], []
    for column in columns:
        plain = column.tobytes()
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(plain)
        is_shorter = len(packed) < len(plain)
        heads.append(_LENGTH.pack(len(packed) | _PACKED if is_shorter else len(plain)))
        bodies.append(packed if is_shorter else plain)
    return b"".join((*heads, *bodies))


def read(data: memoryview, bounds: Sequence[tuple[int, int]]) -> tuple[list[Bytes], memoryview]:
    """Read columns of these sizes, at least and at most; return them and what follows. Raises `Damaged`."""
    at = len(bounds) * _LENGTH.size
    if len(data) < at:
        raise Damaged("an encoding ends within its head")
    columns = []
    for number, (least, most) in enumerate(bounds):
        length = _LENGTH.unpack_from(data, number * _LENGTH.size)[0]
        end = at + (length & ~_PACKED)
        if end > len(data):
            raise Damaged("an encoding ends before its columns do")
        columns.append(_column(data[at:end], least, most, is_packed=bool(length & _PACKED)))
        at = end
    return columns, data[at:]


def _column(body: memoryview, least: int, most: int, *, is_packed: bool) -> Bytes:
    """Return a column that has from `least` to `most` bytes when it is unpacked."""
    if not is_packed:
        column = np.frombuffer(body, dtype=np.uint8)
    else:
        try:
            # Asked first, because the frame's own word decides how much memory is taken for it.
            nbytes = zstandard.frame_content_size(body)
            if not least <= nbytes <= most:
                raise Damaged(f"a column has {nbytes} bytes, and {least} to {most} are possible")
            column = np.frombuffer(zstandard.ZstdDecompressor().decompress(body), dtype=np.uint8)
        except zstandard.ZstdError as why:
            raise Damaged(f"a column can't be unpacked: {why}") from None
    if not least <= len(column) <= most:
        raise Damaged(f"a column has {len(column)} bytes, and {least} to {most} are possible")
    return column
