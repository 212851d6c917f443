"""What came over each link in one read, and in how long: the samples of which `measured.py` makes rates. Pure.

A link is what the planner says that a share's bytes come by; several sources of one read may share one. Its time is the
time in which something was under way on it, from whichever source, so what comes in parallel counts as one, and a pause
of the reader itself counts for no link.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.protocol.plans import Share, Transport

SAMPLE_BYTES_MIN: Final = 16 * 1024 * 1024
"""So much makes a sample, however soon it came: the time is that of bytes then, and not of round trips."""

SAMPLE_S_MIN: Final = 0.1
"""So long makes a sample of less: far more than a round trip."""

SAMPLE_BYTES_LEAST: Final = 1024 * 1024
"""Less tells of what thousands of tiny tensors cost, however long that took."""

Link = tuple[str, Transport]
"""A link by the planner's name for it, and the transport that was used over it."""


class Sample(msgspec.Struct, frozen=True):
    """What one read got over one link: bytes, the seconds in which they were under way, and how many links it used."""

    link: Link
    nbytes: int
    seconds: float
    parallel: int


@dataclass(slots=True)
class Meter:
    """One link in one read."""

    nbytes: int = 0
    _busy_s: float = 0.0
    _sources: int = 0
    """So many sources have something under way."""
    _since: float = 0.0

    def begins(self, now: float) -> None:
        """A source that had nothing under way has."""
        if not self._sources:
            self._since = now
        self._sources += 1

    def came(self, nbytes: int) -> None:
        """Count bytes that have come."""
        self.nbytes += nbytes

    def ends(self, now: float) -> None:
        """A source has nothing under way any more."""
        self._sources -= 1
        if not self._sources:
            self._busy_s += now - self._since

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of the reader out."""
        self._since = min(self._since + late_s, now)

    def forget(self, now: float) -> None:
        """Let what was counted so far tell nothing: bytes that came as patches are few, and took work to apply."""
        self.nbytes, self._busy_s, self._since = 0, 0.0, now

    def take(self, now: float) -> tuple[int, float] | None:
        """Return the bytes and seconds since the last time, and begin anew; None: too little to tell."""
        seconds = self._busy_s + (now - self._since if self._sources else 0.0)
        if self.nbytes < SAMPLE_BYTES_LEAST or seconds <= 0:
            return None
        if self.nbytes < SAMPLE_BYTES_MIN and seconds < SAMPLE_S_MIN:
            return None
        taken = self.nbytes, seconds
        self.nbytes, self._busy_s, self._since = 0, 0.0, now
        return taken


@dataclass(slots=True)
class Meters:
    """All links of one read."""

    _links: dict[Link, Meter] = field(default_factory=dict)

    def of(self, share: Share) -> Meter:
        """Return the meter of the link that a share's bytes come by; of one without a name nobody asks."""
        return self._links.setdefault((share.link, share.transport), Meter()) if share.link else Meter()

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of the reader out."""
        for meter in self._links.values():
            meter.paused(late_s, now)

    def take(self, now: float) -> list[Sample]:
        """Return what can be told by now of each link, once."""
        parallel = sum(1 for meter in self._links.values() if meter.nbytes)
        taken = ((link, meter.take(now)) for link, meter in self._links.items())
        return [Sample(link, *sample, parallel) for link, sample in taken if sample is not None]
