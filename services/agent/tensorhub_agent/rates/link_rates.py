"""The rates of an agent's links: samples of what came over each link in one read, and estimates made of them. Pure.

`LinkMeters` takes the samples: the bytes that came over each link in one read, and the time that they took. A link is
the path that the planner names for a share's bytes. Several sources of one read may share one link. The time of a link
is the time in which something was under way on it, from any source. So parallel transfers count once, and a pause of
the reader itself counts for no link.

`LinkRates` makes estimates of the samples. The agent sends these rates to the planner with each demand. The bytes that
come in a read are never more than the link gives, and often less, because other readers and other links had their part.
So a sample above the estimate moves it far. A sample below it moves it less, and the less the more links the read used.
An estimate still follows a link that has become slow, within some reads.

Invariants:
- There is at most one row for each link, and at most `RATES_MAX` rows. The least recently used row is removed first.
- A restarted agent begins without rates: a rate is soon measured, and an old one may be of another machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_agent.rates.encoding_choice import RATE_GUESSED
from tensorhub_common.protocol.plans import RATES_MAX, LinkRate, Share, Transport

SAMPLE_BYTES_MIN: Final = 16 * 1024 * 1024
"""So much makes a sample, however soon it came: the time is that of bytes then, and not of round trips."""

SAMPLE_S_MIN: Final = 0.1
"""So long makes a sample of less: far more than a round trip."""

SAMPLE_BYTES_LEAST: Final = 1024 * 1024
"""Less tells of what thousands of tiny tensors cost, however long that took."""

LinkKey = tuple[str, Transport]
"""A link by the planner's name for it, and the transport that was used over it."""


class LinkSample(msgspec.Struct, frozen=True):
    """What one read got over one link: bytes, the seconds in which they were under way, and how many links it used."""

    link: LinkKey
    nbytes: int
    seconds: float
    parallel: int


@dataclass(slots=True)
class LinkMeter:
    """One link in one read."""

    nbytes: int = 0
    _busy_s: float = 0.0
    _sources: int = 0
    """The number of sources that have something under way."""
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
class LinkMeters:
    """All links of one read."""

    _links: dict[LinkKey, LinkMeter] = field(default_factory=dict)

    def of(self, share: Share) -> LinkMeter:
        """Return the meter of the link that a share's bytes come by; one without a name has none."""
        return self._links.setdefault((share.link, share.transport), LinkMeter()) if share.link else LinkMeter()

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of the reader out."""
        for meter in self._links.values():
            meter.paused(late_s, now)

    def take(self, now: float) -> list[LinkSample]:
        """Return what can be told by now of each link, once."""
        parallel = sum(1 for meter in self._links.values() if meter.nbytes)
        taken = ((link, meter.take(now)) for link, meter in self._links.items())
        return [LinkSample(link, *sample, parallel) for link, sample in taken if sample is not None]


RISE: Final = 0.5
"""A sample above the estimate counts for this part of the new one."""

FALL: Final = 0.25
"""A sample below it counts for this part, divided by the links that its read used."""

SLOW_SAMPLES_MIN: Final = 4
"""This many samples make a link a slow one: of a machine that paused one or two do."""

SAMPLES_MAX: Final = 1_000_000
"""More are not counted."""


@dataclass(slots=True)
class _Row:
    bps: float
    samples: int
    at: float


class LinkRates:
    """What one agent has measured, in all its jobs."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: dict[LinkKey, _Row] = {}

    def note(self, samples: Iterable[LinkSample], now: float) -> None:
        """Take samples of a read; their seconds must be above zero."""
        for sample in samples:
            bps = sample.nbytes / sample.seconds
            row = self._rows.pop(sample.link, None)
            if row is None:
                row = _Row(bps, 0, now)
            weight = RISE if bps > row.bps else FALL / max(sample.parallel, 1)
            row.bps += weight * (bps - row.bps)
            row.samples, row.at = min(row.samples + 1, SAMPLES_MAX), now
            self._rows[sample.link] = row
        while len(self._rows) > RATES_MAX:
            del self._rows[next(iter(self._rows))]

    def rate(self, link: LinkKey) -> float | None:
        """Return the bytes a second that came over a link, however long ago: better than a guess.

        None: nothing came, or too little to take the link for slower than one of which nothing is known.
        """
        row = self._rows.get(link)
        if row is None or (row.bps < RATE_GUESSED and row.samples < SLOW_SAMPLES_MIN):
            return None
        return row.bps

    def told(self, now: float) -> tuple[LinkRate, ...]:
        """Return what a demand tells, the latest last."""
        return tuple(
            LinkRate(link, transport, max(round(row.bps), 1), row.samples, max(round(now - row.at, 3), 0.0))
            for (link, transport), row in self._rows.items()
        )
