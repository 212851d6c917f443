"""How far a read call is. Pure."""

from enum import StrEnum
from typing import Final


class Stage(StrEnum):
    """The stages of a call, in their order; `op_read.py` says what leads from one to the next."""

    JOINING = "joining"
    LEASING = "leasing"
    GRANTED = "granted"
    DRAINING = "draining"
    FILLING = "filling"
    DIGESTING = "digesting"
    KEEPING = "keeping"
    FILLED = "filled"
    ENDING = "ending"


REACHED: Final = frozenset((Stage.DRAINING, Stage.FILLING, Stage.DIGESTING, Stage.KEEPING, Stage.FILLED, Stage.ENDING))
"""From here on memory is being written, or was."""

WRITES: Final = REACHED - {Stage.ENDING}
"""The call takes what the log has given up to be overwritten."""
