"""Compression of a piece, for links that are slower than the work.

The values are stored by plane, and each plane goes through zstd (`devices.planes`). 31 % of the bytes of
bfloat16 weights go; zstd on the piece as it is finds 22 %. A part of the piece is tried first, so that a piece that
does not shrink costs little.

Measured over a line of 200 Mbit/s with 256 MiB of new bfloat16 values: 9.0 s, where the bytes as they are need 10.7 s
(docs/design/encodings.md, "Over a real line"). Packing takes 0.03 of a memcpy's rate, so it loses above 1 Gbit/s;
`LineEstimate.prefers_compressed` decides for each batch.

Invariant: `unpack` writes nothing outside its piece, and nothing at all before everything has been read.
"""

from typing import Final

from tensorhub_agent.devices.planes import planes_of, units_in, values_of
from tensorhub_agent.encodings.columns import Damaged, read, stored

WORTH: Final = 0.9
"""A piece that is longer than this part of itself when it is packed goes as it is."""

SAMPLE_BYTES: Final = 64 * 1024
"""So much in the middle of a piece is tried first."""


def pack(piece: memoryview, unit: int) -> bytes:
    """Return a piece packed; empty when that is not worth it. Its length is a multiple of `unit`."""
    if len(piece) > 2 * SAMPLE_BYTES:
        middle = len(piece) // 2 // unit * unit
        sample = piece[middle : middle + SAMPLE_BYTES]
        if len(stored(planes_of(units_in(sample, unit), unit))) > WORTH * len(sample):
            return b""
    packed = stored(planes_of(units_in(piece, unit), unit))
    return packed if len(packed) <= WORTH * len(piece) else b""


def unpack(packed: bytes | memoryview, piece: memoryview, unit: int) -> None:
    """Write what was packed into a piece of the same length. Raises `Damaged`, and then nothing is written."""
    units = len(piece) // unit
    planes, rest = read(memoryview(packed), [(units, units)] * unit)
    if rest:
        raise Damaged(f"{len(rest)} bytes follow a packed piece")
    units_in(piece, unit)[:] = values_of(planes)
