"""Which sources a read leaves out, and for how long. Pure.

A source that refused, went away or sent wrong bytes has failed, and is not used again. One that only stood still or was
slow is a suspect: it is left out while anybody else can serve, and forgiven when nobody can.
"""

from collections import Counter
from typing import Final

from tensorhub_common.wire.transfer import SourceId

FORGIVEN_MAX: Final = 8
"""One source is forgiven so often in one read; then it has failed."""


class Trust:
    """What one read has found out about its sources."""

    def __init__(self) -> None:
        """Begin with trust in everybody."""
        self._failed: dict[SourceId, None] = {}
        self._suspects: dict[SourceId, None] = {}
        self._forgiven: Counter[SourceId] = Counter()

    def fail(self, source: SourceId) -> None:
        """Use it no more."""
        self._suspects.pop(source, None)
        self._failed[source] = None

    def suspect(self, source: SourceId) -> None:
        """Leave it out while there are others."""
        if self._forgiven[source] >= FORGIVEN_MAX:
            self.fail(source)
        elif source not in self._failed:
            self._suspects[source] = None

    def forgive(self) -> bool:
        """Let all suspects come back; says whether there were any."""
        some = bool(self._suspects)
        self._forgiven.update(self._suspects.keys())
        self._suspects.clear()
        return some

    def has_forgiven(self, source: SourceId) -> bool:
        """Tell whether it was a suspect, and is used again."""
        return source in self._forgiven

    def has_failed(self, source: SourceId) -> bool:
        """Tell whether it is never to be used again."""
        return source in self._failed

    def left_out(self) -> tuple[SourceId, ...]:
        """Return whom the planner is to leave out now."""
        return (*self._failed, *self._suspects)
