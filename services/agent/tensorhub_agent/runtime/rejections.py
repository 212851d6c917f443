"""What this agent refused to strangers: counted by kind for the metrics, and told in the log at most once a while.

A refused process may try again a thousand times a second, and the log must not grow with that.

Invariant: each refusal is counted; of one kind at most one line is written in `TELL_EVERY_S`, and it says how many
there were since the last.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final

TELL_EVERY_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class RejectionKind(StrEnum):
    """Why somebody was refused."""

    USER = "user"
    """Another user of this host came to a socket."""
    CROWD = "crowd"
    """There are as many connections as are taken."""
    TICKET = "ticket"
    """A ticket was unknown, used, too old, or another reader's."""
    RANGE = "range"
    """A reader asked for bytes that lie beyond what it was granted."""
    FRAME = "frame"
    """What came was no frame, or one that may not come there."""


class RejectionCounter:
    """The refusals of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter({str(kind): 0 for kind in RejectionKind})
        self._clock = clock
        self._told: dict[RejectionKind, tuple[float, int]] = {}

    def note(self, kind: RejectionKind, what: str) -> None:
        """Count one, and tell of it where the last word about its kind is long enough ago."""
        self.counts[kind] += 1
        now, count = self._clock(), self.counts[kind]
        told_at, told_count = self._told.get(kind, (None, 0))
        if told_at is not None and now - told_at < TELL_EVERY_S:
            return
        self._told[kind] = (now, count)
        more = count - told_count - 1
        _log.warning("refused: %s%s", what, f" (and {more} more such since the last line)" if more else "")


REJECTIONS: Final = RejectionCounter()
"""Those of this process, which is one agent."""
