"""What one read knows of its mates: those of its site that bring parts of a version over for each other. Pure.

Always true: what a mate does not bring over is loose, or with somebody else who does.
"""

from collections.abc import Sequence

from tensorhub_agent.primitives.ranges import mark, split
from tensorhub_agent.transfer.balancing import share_out
from tensorhub_agent.transfer.role_index import CROSSING, LIVE, Roster, in_order
from tensorhub_agent.transfer.source import Reading
from tensorhub_common.protocol.plans import Range, SourceId


class Mates:
    """The mates of a read whose shard has so many pieces; what is `loose` is the read's own list."""

    def __init__(self, loose: list[Range], roster: Roster, pieces: int) -> None:
        """Know nobody yet."""
        self.uncrossed: dict[SourceId, None] = {}
        """Who does not bring over to the site what would be its part."""
        self.crossers: tuple[SourceId, ...] = ()
        """Those of the site, this reader among them, over whom the first plan has shared out what crosses."""
        self.asks_for_inherited = False
        """The question that is out is for what a mate has ceded: that is this reader's part, whoever's it was."""
        self._inherited = bytearray(pieces)
        """Marks of what a mate has ceded to this reader, and no source here could bring."""
        self._loose, self._roster = loose, roster

    def doubted(self, source: Reading, given_up: Sequence[Range]) -> None:
        """Have others bring over what a source does not: it is good for what it has."""
        if given_up:
            self.uncrossed[source.share.source] = None
            self._loose.extend(given_up)

    def inherit(self, source: Reading, pieces: Sequence[Range]) -> None:
        """Bring over what a mate has ceded to this reader, from where it can be had, or once that is planned."""
        mine = source.retracts(pieces)
        self._roster.settle()
        share_out(mine, [each for each in in_order(self._roster.of(LIVE)) if each.share.far])
        mark(self._inherited, mine)
        self._loose.extend(mine)

    def await_heir(self, source: Reading, pieces: Sequence[Range], heir: SourceId) -> None:
        """Wait at the heir for what a mate has ceded to it."""
        given_up = source.retracts(pieces)
        self._roster.settle()
        crossing = in_order(self._roster.of(CROSSING))
        waits_at = next((each for each in crossing if each.share.source == heir), None)
        if waits_at is not None:
            waits_at.give(given_up)
        else:
            # The mate itself finds out that the heir is gone, or brings what it gets from there.
            self._loose.extend(given_up)

    def inherited(self, loose: Sequence[Range]) -> tuple[Range, ...]:
        """Return what was inherited of what is loose: a plan is asked for by itself for that."""
        mine = tuple(split(self._inherited, loose)[0])
        self.asks_for_inherited = bool(mine)
        return mine
