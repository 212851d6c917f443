"""Spans: what is to be copied from where to where, by column, and how spans are checked, joined and cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorhub_common.layout.layout import PieceTable

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Pieces by column: `nbytes[i]` bytes go from byte `origin[i]` of the source to byte `to[i]` of the destination."""

    to: Sequence[int]
    origin: Sequence[int]
    nbytes: Sequence[int]

    @classmethod
    def of(cls, table: PieceTable, ranges: Sequence[tuple[int, int]] | None = None) -> "Spans":
        """Return canonical pieces of a layout that both ends have; `ranges` of (first, count), None means all."""
        if ranges is None:
            return cls(table.at, table.at, table.nbytes)
        at = [start for first, count in ranges for start in table.at[first : first + count]]
        nbytes = [size for first, count in ranges for size in table.nbytes[first : first + count]]
        return cls(at, at, nbytes)


def columns(spans: Spans) -> tuple[Columns, Columns, Columns]:
    """Return the columns of spans. Raises ValueError when they have different lengths."""
    to, origin, nbytes = (np.asarray(column, dtype=np.int64) for column in (spans.to, spans.origin, spans.nbytes))
    if not len(to) == len(origin) == len(nbytes):
        raise ValueError("the columns of spans have different lengths")
    return to, origin, nbytes


def check_fits(what: str, size: int, at: Columns, nbytes: Columns) -> None:
    """Raise ValueError unless each span lies within a memory of this size."""
    # Compared without adding the two columns, which could overflow.
    if np.any(nbytes < 0) or np.any(at < 0) or np.any(nbytes > size) or np.any(at > size - nbytes):
        raise ValueError(f"a span does not fit into the {what} of {size} bytes")


def join_adjacent(to: Columns, origin: Columns, nbytes: Columns) -> tuple[Columns, Columns, Columns]:
    """Join spans that follow one another at both ends: long copies are faster, and need less of the GIL."""
    if not len(nbytes):
        return to, origin, nbytes
    apart = (to[1:] != to[:-1] + nbytes[:-1]) | (origin[1:] != origin[:-1] + nbytes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return to[first], origin[first], np.add.reduceat(nbytes, first)


def cut_to_chunks(to: Columns, origin: Columns, nbytes: Columns, nbytes_max: int) -> tuple[Columns, Columns, Columns]:
    """Cut spans into parts of at most `nbytes_max`."""
    parts = np.maximum(1, -(-nbytes // nbytes_max))
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = number * nbytes_max
    size = np.minimum(nbytes_max, np.repeat(nbytes, parts) - offset)
    return np.repeat(to, parts) + offset, np.repeat(origin, parts) + offset, size
