"""Spans: what is to be copied from where to where, by column."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensorhub_agent.devices.columns import Columns
from tensorhub_common.layout.layout import PieceTable


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
    to, nbytes = np.asarray(spans.to, dtype=np.int64), np.asarray(spans.nbytes, dtype=np.int64)
    # Between two ends of one layout both are the same column. To make an array of one takes as long as copying 20 MiB.
    origin = to if spans.origin is spans.to else np.asarray(spans.origin, dtype=np.int64)
    if not len(to) == len(origin) == len(nbytes):
        raise ValueError("the columns of spans have different lengths")
    return to, origin, nbytes


def check_fits(what: str, size: int, at: Columns, nbytes: Columns) -> None:
    """Raise ValueError unless each span lies within a memory of this size."""
    # Compared without adding the two columns, which could overflow.
    if np.any(nbytes < 0) or np.any(at < 0) or np.any(nbytes > size) or np.any(at > size - nbytes):
        raise ValueError(f"a span does not fit into the {what} of {size} bytes")
