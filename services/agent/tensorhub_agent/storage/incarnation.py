"""An agent's incarnation: a number that is higher at each start, and each time the log took the agent for lost.

It is the wall clock in milliseconds, or one more than the last one used, whichever is higher; so a lost state
directory, a full disk or a clock that went back costs at most one refused join.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Final

from tensorhub_agent.runtime.troubles import TROUBLES, TroubleKind

FILE: Final = "incarnation"
_log: Final = logging.getLogger(__name__)

STEP_MAX: Final = 1 << 40
"""A refused join doubles the step up to this, which passes any clock that was ever wrong by less than 30 years."""


class IncarnationCounter:
    """The present number, kept in the agent's state directory."""

    def __init__(self, state_dir: Path) -> None:
        """Read what an earlier process has used; `next` gives the first number of this one."""
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = state_dir / FILE
        self._step = 1
        self.number = 0
        try:
            self.number = int(self._path.read_text())
        except (OSError, ValueError):
            # The clock alone is high enough in all but odd cases, and the log refuses what is not.
            self.number = 0

    def next(self) -> int:
        """Return a higher number than any before, kept on disk before it is used if the disk takes it."""
        self.number = max(self.number + self._step, int(time.time() * 1000))
        self._step = min(self._step * 2, STEP_MAX)
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(str(self.number))
            temporary.rename(self._path)
            TROUBLES.over(TroubleKind.STATE)
        except OSError as why:
            # The next process goes by its clock then.
            TROUBLES.note(
                TroubleKind.STATE, f"the agent's incarnation can't be kept in {self._path} ({why}): make room there"
            )
            _log.error("incarnation %d can't be kept in %s: %s", self.number, self._path, why)
            with contextlib.suppress(OSError):
                temporary.unlink()
        return self.number

    def accepted(self) -> None:
        """The log took the number."""
        self._step = 1
