"""What a cell of a transfer program has to do with blocks that no source has whole. Pure.

A *fold* is a box of such blocks; `program` says what comes of it. Entries are float32, one for each block, in a table
that each read has of its own.
"""

import enum
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.layout.casts import FP8_SCHEMES
from tensorhub_common.programs.regions import Sizes, StridedForm

AMAX_ENTRY_BYTES: Final = 4
"""An entry is a float32."""

TABLE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Limit of a reader's table of largest magnitudes of blocks that are cut, 4 bytes each: enough for 10^12 values in
blocks of 128 × 128."""


class UnitKind(enum.IntEnum):
    """What a unit has to do with folds."""

    PARTIAL = 0
    SCALES = 1
    VALUES = 2
    PLAIN = 3
    """Nothing."""


class AmaxReduction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a cell of one unit has to do with a fold, and where the entries of its blocks are in the table."""

    kind: UnitKind
    number: int
    """Of the fold, within the pattern."""
    at: int
    """The first block's entry, in bytes from where the tensor's entries begin."""
    strides: Sizes
    """Bytes from a block's entry to the next one's."""
    grain: Sizes
    """The number of the cell's elements in a block; the cell begins with a block, or lies within one."""
    scheme: str


class AmaxEntries(NamedTuple):
    """Where the entries of a unit's blocks are in the table, and what the unit is made of by them."""

    at: int
    strides: Sizes
    counts: Sizes
    to: int
    form: StridedForm
    """Of what is at `to`: its own elements, in the destination; of a partial they are the entries."""
    scheme: str


def is_valid_reduction(fold: AmaxReduction, shape: Sizes, units: int, owners: int, table_bytes: int) -> bool:
    """Tell whether a fold from outside can be that of such a cell. A tensor has `table_bytes` of the table."""
    rank = len(shape)
    if units != 1 or fold.kind is UnitKind.PLAIN or not len(fold.strides) == len(fold.grain) == rank:
        return False
    if min(fold.grain, default=1) < 1 or min((*fold.strides, fold.at, fold.number)) < 0:
        return False
    if fold.kind is not UnitKind.VALUES and max(fold.grain, default=1) > 1:
        return False
    last = sum((-(-size // step) - 1) * far for size, step, far in zip(shape, fold.grain, fold.strides, strict=True))
    if fold.at + last + AMAX_ENTRY_BYTES > table_bytes:
        return False
    # Scales can be folded by the reader; all else comes from somebody.
    return fold.scheme in FP8_SCHEMES and (owners > 0 or fold.kind is UnitKind.SCALES)
