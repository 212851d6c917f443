"""What a half-filled source tells a reader of its pieces, on its way.

Always true: it comes in order, over a path that is cut not before that is whole again, and nothing is lost of what was
told before the reader saw that the source was open.
"""

from collections import deque
from typing import TYPE_CHECKING

from tensorhub_agent.core.effects import Available
from tensorhub_agent.primitives.lease_messages import Have, Stock
from tensorhub_agent.primitives.program_units import Availability
from tensorhub_simulator.faultsim.transfers.byte_stream import STUCK_S

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.transfers.source_session import Link


class Telling:
    """The words of one source to one reader."""

    def __init__(self, link: "Link") -> None:
        """Begin with nothing told."""
        self._link = link
        self.availability: Availability | None = None
        """Which units stand at a source whose pieces are of another layout."""
        self._early: list[Stock] = []
        """What has come before the reader saw that it was open."""
        self._untold: deque[Stock] = deque()
        """What the source has said and the reader has not heard: a connection keeps the order."""

    def show(self, news: Stock) -> None:
        """The source tells of its pieces."""
        self._untold.append(news)
        if len(self._untold) == 1:
            self._link.at_reader(self._link.clock.lag(), self._hear)

    def _hear(self) -> None:
        if self._link.is_cut and self._link.source_lives:
            self._link.at_reader(STUCK_S, self._hear)
            return
        while self._untold:
            self.heard(self._untold.popleft())

    def opened(self) -> None:
        """The reader hears what came early."""
        for later in self._early:
            self.heard(later)

    def heard(self, news: Stock) -> None:
        """The reader hears of pieces."""
        link = self._link
        if not link.is_open:
            self._early.append(news)
        elif link.closing:
            return
        elif isinstance(news, Have):
            if self.availability is not None:
                news = Have(self.availability.units(news.pieces))
            link.tell(Available(link.key, link.number, news))
        else:
            # These come in order, over a connection: an older one does not come again.
            link.reader.news(Available(link.key, link.number, news))
