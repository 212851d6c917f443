"""What this agent got over each link: the rates that it tells the planner with each demand. Pure.

What comes in a read is never more than the link gives, and often less: other readers and other links had their part. So
a sample above the estimate moves it far, and one below it less, and the less the more links the read used besides. All
the same an estimate follows a link that has become slow, within some reads.

Always true: there is at most one row for each link, and `RATES_MAX` in all; the one that was not used for longest goes
first. A restarted agent begins anew: a rate is soon measured, and an old one may be of another machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.rates.encoding_choice import RATE_GUESSED
from tensorhub_agent.rates.link_rates import Link, Sample
from tensorhub_common.protocol.plans import RATES_MAX, LinkRate

RISE: Final = 0.5
"""A sample above the estimate counts for this part of the new one."""

FALL: Final = 0.25
"""A sample below it counts for this part, divided by the links that its read used."""

SLOW_SAMPLES_MIN: Final = 4
"""So many samples make a link a slow one: of a machine that paused one or two do."""

SAMPLES_MAX: Final = 1_000_000
"""More are not counted."""


@dataclass(slots=True)
class _Row:
    bps: float
    samples: int
    at: float


class Measured:
    """What one agent has measured, in all its jobs."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: dict[Link, _Row] = {}

    def note(self, samples: Iterable[Sample], now: float) -> None:
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

    def rate(self, link: Link) -> float | None:
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
