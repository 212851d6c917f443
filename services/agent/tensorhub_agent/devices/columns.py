"""Columns of numbers, one for each piece, as copies of the host and of devices take them: to join and to cut pieces."""

import numpy as np
import numpy.typing as npt

Columns = npt.NDArray[np.int64]


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
