"""Another part of the hub, as this process finds it: it answers, or it does not.

Always true: one line is logged when it stops answering and one when it answers again, however many questions, jobs and
calls are concerned in between. The second one says how long that was, and how many attempts failed if it was not one.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

_log: Final = logging.getLogger(__name__)


class PeerStatus:
    """A part of the hub that this process asks: `name` is what log lines call it."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        lost: str = "does not answer",
        back: str = "answers again",
    ) -> None:
        """Take it as answering until it is found not to. `lost` and `back` are what its lines say."""
        self.name = name
        self._lost, self._back = lost, back
        self.lost_count = 0
        """How many times it stopped answering."""
        self._clock = clock
        self._silent_since: float | None = None
        self._failed = 0
        """Attempts since then."""

    @property
    def silent_s(self) -> float | None:
        """For how long it has not answered; None while it does."""
        return None if self._silent_since is None else max(self._clock() - self._silent_since, 0.0)

    def answers(self) -> None:
        """Note that it has answered."""
        silent_s = self.silent_s
        if silent_s is not None:
            self._silent_since = None
            attempts = f"; {self._failed} attempts failed" if self._failed > 1 else ""
            _log.warning("%s %s after %.1f s%s", self.name, self._back, silent_s, attempts)
            self._failed = 0

    def is_silent(self, why: str, for_s: float = 0.0) -> None:
        """Note that it has not answered a question, for so long already."""
        self._failed += 1
        if self._silent_since is None:
            self._silent_since = self._clock() - for_s
            self.lost_count += 1
            _log.warning("%s %s: %s", self.name, self._lost, why)
