"""Whether to read on when a newer version comes, or to drop what is being read for it. Pure.

An engine stands still while its memory is overwritten. Reading on costs what is left of this read, and then a whole
one for the newer version; dropping costs a whole one now. So it saves what is left, and throws away what has come.
The replica is ready when its last shard is, so the shard that is furthest behind judges for all: one wish to drop is
enough, and the log bounds how often a round may be turned (`SUPERSEDED_MAX`), so that every round ends.
"""

from typing import Final

FINISH_FRACTION: Final = 0.5
"""With so much of it there, what is left costs less than what would be thrown away: it is finished."""

FINISH_S: Final = 0.5
"""What is predicted to end within this is finished: to get leases anew takes about as long."""


def is_better_dropped(done_bytes: int, total_bytes: int, elapsed_s: float) -> bool:
    """Judge a read of which so much has come in `elapsed_s`, with the rest predicted to come at the same rate."""
    if done_bytes >= total_bytes * FINISH_FRACTION:
        return False
    if done_bytes <= 0:
        return True
    return elapsed_s * (total_bytes - done_bytes) / done_bytes > FINISH_S
