"""An agent's incarnation: a number that is higher at each start, and each time the log took the agent for lost.

It is the wall clock in milliseconds, or one more than the last one used, whichever is higher; so a lost state
directory or a clock that went back costs at most one refused join.
"""

import time
from pathlib import Path
from typing import Final

FILE: Final = "incarnation"
STEP_MAX: Final = 1 << 40
"""A refused join doubles the step up to this, which passes any clock that was ever wrong by less than 30 years."""


class Incarnation:
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
        """Return a higher number than any before, kept on disk before it is used."""
        self.number = max(self.number + self._step, int(time.time() * 1000))
        self._step = min(self._step * 2, STEP_MAX)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(str(self.number))
        temporary.rename(self._path)
        return self.number

    def accepted(self) -> None:
        """The log took the number."""
        self._step = 1
