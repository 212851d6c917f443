"""Which holds of a job have not been stated again in time, so that its leader ends them. Pure.

The fold decides, by JetStream's time of the command. A registry decides by its own clock when to send the command. It
therefore waits a little longer, and repeats the command only after a while.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.catalog.state import Catalog

MARGIN_S: Final = 5.0
"""A registry waits this much longer than the fold, since clocks differ."""
AGAIN_S: Final = 30.0
"""The same command is repeated after this, in case the log did not take it or the fold refused it."""


class OverdueHold(msgspec.Struct, frozen=True):
    """A hold whose time is over."""

    model: str
    holder: str


@dataclass(slots=True)
class HoldEnding:
    """One job's holds, as its leader looks at them every few seconds."""

    _said: dict[OverdueHold, float] = field(default_factory=dict)

    def due(self, catalog: Catalog, now: float) -> list[OverdueHold]:
        """Return the holds to end, at `now` in seconds since the epoch."""
        self._said = {each: at for each, at in self._said.items() if now - at < AGAIN_S}
        due = [
            overdue
            for name in catalog.tended
            for holder, hold in catalog.models[name].holds.items()
            if now >= hold.until + MARGIN_S and (overdue := OverdueHold(name, holder)) not in self._said
        ]
        self._said |= dict.fromkeys(due, now)
        return due
