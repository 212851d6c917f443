"""One timer that may be set earlier, and is never put off: setting one costs more than waking up for nothing.

Invariant: at most one timer runs, and after `set(when)` the work is called at `when` or before.
"""

import asyncio
from collections.abc import Callable

from tensorhub_common.runtime.supervision import Supervisor


class CoalescingTimer:
    """Calls `work` at the earliest moment that was asked for since it was called last."""

    def __init__(self, owner: Supervisor, work: Callable[[], None]) -> None:
        """Begin unset. An error of the work is the owner's."""
        self._owner, self._work = owner, work
        self._handle: asyncio.Handle | None = None
        # Kept here, since uvloop's handle of a moment that has come already can't tell when that was.
        self._when = 0.0

    def set(self, when: float | None) -> None:
        """Ask to be called at a moment of the loop's clock; None asks for nothing."""
        if when is None or (self._handle is not None and self._when <= when):
            return
        self.cancel()
        self._when, self._handle = when, self._owner.call_at(when, self._ring, what="a deadline")

    def cancel(self) -> None:
        """Ask for nothing any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._work()
