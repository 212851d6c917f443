"""Which sources a read leaves out, and for how long. Pure.

A source that was silent or slow is a suspect. It is left out while another source can serve, and readmitted when none
can. A source that refused or went away has failed. It is readmitted only where the log still counts a holder and no
other source is left, with growing pauses. A source that sent wrong bytes, or that can't serve this reader at all, is
never used again in the read.
"""

from collections import Counter
from typing import Final

from tensorhub_common.protocol.plans import SourceId

FORGIVEN_MAX: Final = 8
"""One read readmits a suspect this many times; then the source has failed."""


class Exclusions:
    """What one read has found out about its sources."""

    def __init__(self) -> None:
        """Begin with no source left out."""
        self._failed: dict[SourceId, None] = {}
        self._wrong: dict[SourceId, None] = {}
        self._suspects: dict[SourceId, None] = {}
        self._forgiven: Counter[SourceId] = Counter()

    def fail(self, source: SourceId) -> None:
        """Leave it out, unless no other source is left."""
        self._suspects.pop(source, None)
        self._failed[source] = None

    def exclude_for_good(self, source: SourceId) -> None:
        """Never use it again in this read: its bytes were wrong, or it can't serve this reader."""
        self.fail(source)
        self._wrong[source] = None

    def exclude_for_now(self, source: SourceId) -> None:
        """Leave it out while there are others."""
        if self._forgiven[source] >= FORGIVEN_MAX:
            self.fail(source)
        elif source not in self._failed:
            self._suspects[source] = None

    def readmit_suspects(self) -> bool:
        """Let all suspects come back; says whether there were any."""
        some = bool(self._suspects)
        self._forgiven.update(self._suspects.keys())
        self._suspects.clear()
        return some

    def readmit_failed(self) -> bool:
        """Let all come back but those left out for good; says whether there may be any to read from then."""
        others = len(self._failed) > len(self._wrong)
        self._failed = dict(self._wrong)
        return others or not self._wrong

    def has_forgiven(self, source: SourceId) -> bool:
        """Tell whether it was a suspect, and is used again."""
        return source in self._forgiven

    def has_failed(self, source: SourceId) -> bool:
        """Tell whether it is never to be used again."""
        return source in self._failed

    def left_out(self) -> tuple[SourceId, ...]:
        """Return the sources that the planner is to leave out now."""
        return (*self._failed, *self._suspects)
