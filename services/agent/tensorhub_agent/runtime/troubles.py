"""What an agent lacks just now, as `tensorhub status` shows it: room, mostly. It costs one call, and no other.

Invariant: of each kind the last trouble is kept, until it is over or `TOLD_S` have passed without another.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from tensorhub_common.protocol.activity import Problem

TOLD_S: Final = 600.0
"""A trouble that came once is told for this long."""


class TroubleKind(StrEnum):
    """What is lacking."""

    MEMORY = "no-memory"
    """Memory for a shard could not be made."""
    MANIFEST = "no-room-for-manifests"
    """A manifest could not be written: a restart may cost a refill."""
    COPY = "no-copy"
    """A copy of a retained version could not be made here."""
    STATE = "no-room-for-state"
    """The agent's incarnation could not be written down."""


class TroubleTracker:
    """Those of one process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin without any."""
        self._clock = clock
        self._noted: dict[TroubleKind, tuple[float, float, str]] = {}
        """By kind: since when, when last, and why."""

    def note(self, kind: TroubleKind, why: object) -> None:
        """Note that something is lacking. It may be called from any thread."""
        now = self._clock()
        since, last, _ = self._noted.get(kind, (now, now, ""))
        self._noted[kind] = now if now - last >= TOLD_S else since, now, str(why)

    def over(self, kind: TroubleKind) -> None:
        """Note that it is there again."""
        self._noted.pop(kind, None)

    def told(self) -> tuple[Problem, ...]:
        """Return what is lacking, the oldest first."""
        now = self._clock()
        noted = sorted(
            (since, kind, why) for kind, (since, last, why) in dict(self._noted).items() if now - last < TOLD_S
        )
        return tuple(Problem(kind=str(kind), why=why, since=since) for since, kind, why in noted)


TROUBLES: Final = TroubleTracker()
"""Those of this process, which is one agent."""
