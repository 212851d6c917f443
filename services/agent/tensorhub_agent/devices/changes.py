"""What changed of a piece, by column: where, and the new values by plane. Pure.

The host computes it for its own memory, and a GPU's kernels compute the same bytes for theirs (`kernels/deltas.cu`).
`encodings.patch` makes a patch of it, and reads one as it.

Positions are gaps of one byte each (a byte of 255 steps over 255 units that stay), or a bitmap where that is smaller.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorhub_agent.devices.planes import Bytes, Units, planes_of, values_of

GAPS: Final = 1
BITMAP: Final = 2

STEP: Final = 255
"""A gap byte of this value steps over as many units, and none of them changes."""

DENSE: Final = 8
"""With more than one changed unit in this many, a bitmap is shorter than a byte for each gap."""

VALUES_SHARE_MAX: Final = 0.9
"""Where the values that changed are more than this part of their piece, nothing is told: the piece costs no work."""

Positions = npt.NDArray[np.intp]


class Changes(NamedTuple):
    """The units of a piece that changed. `form` is that of the positions; none has columns where nothing changed."""

    form: int
    changed: int
    positions: Bytes
    planes: list[Bytes]


UNCHANGED: Final = Changes(GAPS, 0, np.zeros(0, np.uint8), [])


def is_short(changed: int, unit: int, nbytes: int) -> bool:
    """Whether this number of values of a piece of `nbytes` is worth telling by itself."""
    return changed * unit <= VALUES_SHARE_MAX * nbytes


def form_of(changed: int, units: int) -> int:
    """Return the form of positions that is the shorter one."""
    return BITMAP if changed * DENSE > units else GAPS


def changes_between(before: Units, after: Units) -> Changes | None:
    """Compare two pieces of the same length; None where too much changed for `is_short`."""
    unit, differs = after.itemsize, before != after
    changed = int(np.count_nonzero(differs))
    if not changed:
        return UNCHANGED
    if not is_short(changed, unit, after.nbytes):
        return None
    # By positions, because numpy takes ten times as long to select by a mask.
    where, form = np.flatnonzero(differs), form_of(changed, len(after))
    positions = np.packbits(differs) if form == BITMAP else _gaps(where)
    return Changes(form, changed, positions, planes_of(after[where], unit))


def _gaps(where: Positions) -> Bytes:
    """Return how many units stay before each that changes, in bytes; `STEP` says that the gap goes on."""
    gaps = np.diff(where, prepend=-1) - 1
    steps = gaps // STEP
    column = np.full(len(where) + int(steps.sum()), STEP, dtype=np.uint8)
    column[np.arange(len(where)) + np.cumsum(steps)] = gaps - steps * STEP
    return column


def positions_in(changes: Changes, units: int) -> Positions | None:
    """Return where units change; None where the column is not `changed` positions of as many units."""
    column = changes.positions
    if changes.form == BITMAP:
        # As bool, of which numpy finds those that are set ten times as fast.
        where = np.flatnonzero(np.unpackbits(column).view(np.bool_))
    else:
        lands = column != STEP
        # A step of 255 passes as many units; what lands takes one more, the unit that it lands on.
        where = (np.cumsum(column.astype(np.intp) + lands) - 1)[lands]
    return where if len(where) == changes.changed and (not len(where) or where[-1] < units) else None


def values_in(changes: Changes) -> Units:
    """Return the values of the units that changed, of which there is at least one."""
    return values_of(changes.planes)
