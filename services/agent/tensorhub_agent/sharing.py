"""Who takes whose pieces: loose ones, what a busy source has queued, and what a slow one has under way. Pure.

Always true: what is under way is taken from nobody here. A slow source is only named; its pieces are free once it is
closed. A half-filled source takes from nobody what it does not have: it would be waited for in place of one that has
it, or is nearer to one that has. One in another site takes nothing over from those that cross for the whole site.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tensorhub_agent.pace import BATCHES_MIN
from tensorhub_agent.ranges import count_of, mark, marked, split, take_first
from tensorhub_agent.reading import Reading
from tensorhub_common.wire.transfer import Plan, Range, Share

Batch = tuple[tuple[Range, ...], int]
"""Pieces, and their bytes."""

SLOW_MIN_S: Final = 0.5
"""A source that is expected to end within this is not closed for being slow."""

SLOW_TIMES: Final = 2
"""Nor one that is expected to take less than so many times what an idle one would take."""

SWITCH_S: Final = 0.1
"""What closing a source and asking another one costs, generously."""


def share_out(loose: list[Range], sources: Sequence[Reading]) -> None:
    """Give loose pieces to these sources in equal parts, all of them; what only some can give, to one of these.

    What a source could be asked for only once a fold is known stays loose: a plan may know better.
    """
    for source in sorted(sources, key=lambda each: each.share.crosses):
        if source.able is not None and loose:
            there, loose[:] = split(source.able, loose)
            waiting, there = source.apart(there)
            loose.extend(waiting)
            source.give(there)
    able = [source for source in sources if source.able is None]
    for number, source in enumerate(able):
        source.give(take_first(loose, -(-count_of(loose) // (len(able) - number))))


def spread(plan: Plan, loose: list[Range], pieces: int) -> tuple[list[tuple[Share, list[Range]]], list[Range]]:
    """Say which loose pieces, out of so many, each share of a plan brings, and what stays loose."""
    marks = bytearray(pieces)
    mark(marks, loose)
    given = []
    for share in plan.shares:
        ranges = [run for first, count in share.pieces for run in marked(marks, first, first + count)]
        for first, count in ranges:
            marks[first : first + count] = bytes(count)
        if ranges:
            given.append((share, ranges))
    return given, marked(marks, 0, pieces)


def feed(sources: Sequence[Reading], loose: list[Range]) -> None:
    """Give idle sources what is loose, or else what others have waiting; and those that cross what they have."""
    idle = [source for source in sources if source.is_idle]
    if loose:
        share_out(loose, [source for source in idle if source.has is None and not _leaves_to_others(source, sources)])
        for source in sources:
            # What somebody nearby has need not cross again, however busy it is.
            if source.has is not None and loose and (source.is_idle or (source.is_ready and source.share.crosses)):
                there, loose[:] = split(source.has, loose)
                source.give(there)
        return
    # Mostly nobody has anything waiting, and a read of many sources must not compare each with each for that.
    givers = [source for source in sources if source.queue or source.parked]
    for source in idle if givers else ():
        if take_over(source, givers):
            givers = [each for each in sources if each.queue or each.parked]


def _leaves_to_others(source: Reading, sources: Iterable[Reading]) -> bool:
    """Tell whether others of the site may be bringing over what this one, in another site, could bring as well."""
    return source.share.far and any(other.is_live and other.share.crosses for other in sources)


def fill(
    source: Reading, sizes: Sequence[int], share_bytes: int, room_bytes: int, *, relayed: bool = False
) -> Iterator[Batch]:
    """Cut batches for a source until it has under way what it may: its part, if there is room, or its least.

    `room_bytes` is what all sources together may ask for yet; `relayed`: others wait for what comes.
    """
    own, began = source.flying_bytes, source.flying_bytes
    while source.queue:
        if source.queue[0][0] < source.partials and source.owed:
            return
        room = own - began < room_bytes and own < source.pace.ahead_bytes(share_bytes)
        if not room and len(source.flying) >= BATCHES_MIN:
            return
        ranges, nbytes = source.cut_batch(sizes, share_bytes, relayed=relayed)
        own += nbytes
        yield ranges, nbytes


def take_over(taker: Reading, others: Iterable[Reading]) -> bool:
    """Take of what the busiest other has not asked for yet the later part, so that both end at about the same time.

    Returns whether there was anything to take.
    """
    if taker.able is not None and not taker.share.crosses:
        # Most sources of other layouts have each their own, so only those of one layout are compared.
        others = [other for other in others if other.share.layout == taker.share.layout]
    able = (other for other in others if other is not taker and not (taker.share.far and other.share.crosses))
    busiest = max(able, key=lambda other: other.waiting, default=None)
    if busiest is None or not busiest.waiting:
        return False
    wanted = _part(busiest.waiting, taker.pace.rate, busiest.pace.rate)
    taker.give(busiest.let_go(wanted, taker.able if taker.has is None else taker.has))
    return True


def _part(waiting: int, taker: float | None, giver: float | None) -> int:
    """Return how many of the waiting pieces the taker takes: by the rates, or half; at least one."""
    if not taker or not giver:
        return -(-waiting // 2)
    return min(max(round(waiting * taker / (taker + giver)), 1), waiting)


def too_slow(sources: Sequence[Reading], now: float) -> Reading | None:
    """Name the source whose pieces under way an idle one would bring much sooner; None when nobody is idle or slow."""
    rate = max((source.pace.rate or 0.0 for source in sources if source.is_idle), default=0.0)
    # What crosses for a site is shared out: an idle source has brought its part, and has nothing of another one's.
    if not rate or any(source.is_live and source.share.crosses for source in sources):
        return None
    slow = [source for source in sources if source.is_ready and source.flying and source.share.transport != "local"]
    worst = max(slow, key=lambda source: source.remaining_s(now), default=None)
    if worst is None:
        return None
    elsewhere_s = SWITCH_S + (worst.flying_bytes + worst.unconfirmed_bytes) / rate
    return worst if worst.remaining_s(now) > max(SLOW_MIN_S, SLOW_TIMES * elsewhere_s) else None


def check(
    done: bytearray, loose: Iterable[Range], sources: Iterable[Reading], elsewhere: Iterable[Iterable[Range]] = ()
) -> None:
    """Raise AssertionError unless each piece that is not done is in exactly one place."""
    places = [0] * len(done)
    for ranges in (loose, *elsewhere, *(part for source in sources for part in source.places())):
        for first, count in ranges:
            for piece in range(first, first + count):
                places[piece] += 1
    for piece, count in enumerate(places):
        expected = 0 if done[piece] else 1
        assert count == expected, f"piece {piece} is in {count} places"
