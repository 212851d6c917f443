"""When one that crosses for its site hands a part of that over to a mate, and to whom. Pure.

Whoever waits knows that a crosser lives: it says so, its connection stands, and the log has not lost it. How long it
will take yet only the crosser knows, so it is the one that decides: it gives up the end of what it has not asked for
yet, to mates that have shown all of their own parts, and tells everybody at once whose that is now. So each byte
crosses once still.

Always true: what is under way is ceded by nobody; an heir is open here, and has shown by its own part how fast it is.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tensorhub_agent.primitives.ranges import count_of
from tensorhub_agent.transfer.source import Reading, SourcePhase
from tensorhub_common.protocol.plans import Range, SourceId

CEDE_GAIN_S: Final = 1.0
"""A crosser hands a part over where all of it comes by more than this sooner."""

CEDE_PAUSE_S: Final = 1.0
"""One that has inherited keeps that for so long at least: by then all have heard that it is its own, and wait there."""


class Ceded(NamedTuple):
    """These pieces are another one's to bring over to the site from now on."""

    heir: SourceId
    pieces: tuple[Range, ...]


def cede(sources: Sequence[Reading], sizes: Sequence[int], began: float, now: float) -> list[Ceded]:
    """Take pieces from the slowest far source and give them to free mates; nothing where that gains too little.

    All end at about the same time, as far as their rates tell. `began` is when the read did.
    """
    slow = max(_far(sources), key=lambda source: source.left_s(sizes, now), default=None)
    heirs = _free(sources)
    if slow is None or not heirs:
        return []
    waiting_bytes, left_s = slow.queued_bytes(sizes), slow.left_s(sizes, now)
    rates = [_rate(heir, began) for heir in heirs]
    # Of what it has yet to ask for it brings so much while the heirs bring the rest.
    part = sum(rates) * left_s / (sum(rates) * left_s + waiting_bytes)
    if left_s * part <= CEDE_GAIN_S:
        return []
    ceded = []
    for heir, rate in zip(heirs, rates, strict=True):
        pieces = slow.let_go(_last(slow, sizes, waiting_bytes * part * rate / sum(rates)), None)
        heir.give(pieces)
        ceded += [Ceded(heir.share.source, tuple(pieces))] if pieces else []
    return ceded


def _far(sources: Iterable[Reading]) -> list[Reading]:
    """Return the sources in other sites that have brought something, and of which more is to be asked for."""
    return [each for each in sources if each.share.far and each.is_ready and each.queue and each.pace.rate]


def _free(sources: Iterable[Reading]) -> list[Reading]:
    """Return the mates, still being filled, that have shown all that is theirs to bring over."""
    open_ = (each for each in sources if each.phase is SourcePhase.OPEN and each.share.crosses)
    return [each for each in open_ if each.shown_at is not None and not each.parked and not each.doubted]


def _rate(mate: Reading, began: float) -> float:
    """Return how many bytes of its own part a mate has shown in a second."""
    assert mate.shown_at is not None
    return mate.share.nbytes / max(mate.shown_at - began, 1e-3)


def _last(source: Reading, sizes: Sequence[int], nbytes: float) -> int:
    """Return how many of the pieces at the end of a source's queue have at most so many bytes."""
    left, number = nbytes, 0
    for first, count in reversed(source.queue):
        for piece in reversed(range(first, first + count)):
            left -= sizes[piece]
            if left < 0:
                return number
            number += 1
    return min(number, count_of(source.queue))
