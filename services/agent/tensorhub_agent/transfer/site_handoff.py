"""The peers of one read and the handoff of pieces between them: peers of a site bring parts over for each other. Pure.

`SitePeers` stores what one read knows of its peers. `hand_off` decides when a crosser, which brings a part over for its
site, hands some of that part over to a peer, and to which peer.

A waiting reader knows that a crosser lives: the crosser says so, its connection is up, and the log has not lost it.
Only the crosser knows how long it will still take, so the crosser decides. It gives up the end of what it has not asked
for yet, to peers that have shown all of their own parts, and tells all readers at once which peer has it now. So each
byte still crosses to the site once.

Invariants:
- A piece that a peer does not bring over is loose, or with another source that brings it over.
- A piece that is under way is never ceded.
- A new owner is open here, and has shown by its own part how fast it is.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorhub_agent.primitives.ranges import set_marks, split_by_marks, total_count
from tensorhub_agent.transfer.balancing import distribute
from tensorhub_agent.transfer.role_index import CROSSING, LIVE, RoleIndex, by_number
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.ranges import Range


class SitePeers:
    """The peers of a read whose shard has `pieces` pieces; what is `loose` is the read's own list."""

    def __init__(self, loose: list[Range], index: RoleIndex, pieces: int) -> None:
        """Begin with no peer."""
        self.not_bringing: dict[SourceId, None] = {}
        """Peers that do not bring over to the site what would be their part."""
        self.crossers: tuple[SourceId, ...] = ()
        """Those of the site, this reader among them, over whom the first plan has shared out what crosses."""
        self.asks_for_handoff = False
        """The question that is out is for what a peer has ceded: that is this reader's part now."""
        self._inherited = bytearray(pieces)
        """Marks of what a peer has ceded to this reader, and no source here could bring."""
        self._loose, self._index = loose, index

    def doubted(self, source: Source, given_up: Sequence[Range]) -> None:
        """Have others bring over what a source does not: it is good for what it has."""
        if given_up:
            self.not_bringing[source.share.source] = None
            self._loose.extend(given_up)

    def accept_handoff(self, source: Source, pieces: Sequence[Range]) -> None:
        """Bring over what a peer has ceded to this reader, from where it can be had, or once that is planned."""
        mine = source.retracts(pieces)
        self._index.settle()
        distribute(mine, [each for each in by_number(self._index.of(LIVE)) if each.share.far])
        set_marks(self._inherited, mine)
        self._loose.extend(mine)

    def await_new_owner(self, source: Source, pieces: Sequence[Range], new_owner: SourceId) -> None:
        """Wait at the new owner for what a peer has ceded to it."""
        given_up = source.retracts(pieces)
        self._index.settle()
        crossing = by_number(self._index.of(CROSSING))
        waits_at = next((each for each in crossing if each.share.source == new_owner), None)
        if waits_at is not None:
            waits_at.give(given_up)
        else:
            # The peer itself finds out that the new owner is gone, or brings what it gets from there.
            self._loose.extend(given_up)

    def inherited(self, loose: Sequence[Range]) -> tuple[Range, ...]:
        """Return what was inherited of what is loose: a plan is asked for by itself for that."""
        mine = tuple(split_by_marks(self._inherited, loose)[0])
        self.asks_for_handoff = bool(mine)
        return mine


class Handoff(NamedTuple):
    """These pieces are another one's to bring over to the site from now on."""

    new_owner: SourceId
    pieces: tuple[Range, ...]


def hand_off(sources: Sequence[Source], sizes: Sequence[int], began: float, now: float) -> list[Handoff]:
    """Take pieces from the slowest far source and give them to free peers; nothing where that gains too little.

    All end at about the same time, as far as their rates tell. `began` is when the read did.
    """
    slow = max(_far(sources), key=lambda source: source.left_s(sizes, now), default=None)
    new_owners = _free(sources)
    if slow is None or not new_owners:
        return []
    waiting_bytes, left_s = slow.queued_bytes(sizes), slow.left_s(sizes, now)
    rates = [_rate(new_owner, began) for new_owner in new_owners]
    # Of what it has yet to ask for it brings so much while the new owners bring the rest.
    part = sum(rates) * left_s / (sum(rates) * left_s + waiting_bytes)
    if left_s * part <= slow.limits.handoff_gain_s:
        return []
    ceded = []
    for new_owner, rate in zip(new_owners, rates, strict=True):
        pieces = slow.take_back(_last(slow, sizes, waiting_bytes * part * rate / sum(rates)), None)
        new_owner.give(pieces)
        ceded += [Handoff(new_owner.share.source, tuple(pieces))] if pieces else []
    return ceded


def _far(sources: Iterable[Source]) -> list[Source]:
    """Return the sources in other sites that have brought something, and of which more is to be asked for."""
    return [each for each in sources if each.share.far and each.is_ready and each.queue and each.pace.rate]


def _free(sources: Iterable[Source]) -> list[Source]:
    """Return the peers, still being filled, that have shown all that is theirs to bring over."""
    open_ = (each for each in sources if each.phase is SourcePhase.OPEN and each.share.crosses)
    return [each for each in open_ if each.shown_at is not None and not each.awaiting_source and not each.is_suspect]


def _rate(peer: Source, began: float) -> float:
    """Return how many bytes of its own part a peer has shown in a second."""
    assert peer.shown_at is not None
    return peer.share.nbytes / max(peer.shown_at - began, 1e-3)


def _last(source: Source, sizes: Sequence[int], nbytes: float) -> int:
    """Return how many of the pieces at the end of a source's queue have at most `nbytes`."""
    left, number = nbytes, 0
    for first, count in reversed(source.queue):
        for piece in reversed(range(first, first + count)):
            left -= sizes[piece]
            if left < 0:
                return number
            number += 1
    return min(number, total_count(source.queue))
