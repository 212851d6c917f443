"""Which source brings which piece: loose pieces, what a busy source has queued, what a slow one has in flight. Pure.

Invariants:
- A piece in flight is not taken from its source. A slow source is only named; its pieces are free once it is closed.
- A half-filled source takes over only pieces that it has. Otherwise the read would wait for it in place of a source
  that has the piece, or is nearer to one that has.
- A source in another site takes nothing over from the crossers of the reader's site.
"""

from collections.abc import Iterable, Iterator, Sequence

from tensorhub_agent.primitives.ranges import ranges_of_marks, set_marks, split_by_marks, take_first, total_count
from tensorhub_agent.rates.source_rate import BATCHES_MIN
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.role_index import CROSSING, GIVING, IDLE, SLOWABLE, RoleIndex, by_number
from tensorhub_agent.transfer.source import Source
from tensorhub_common.protocol.plans import Plan, Share
from tensorhub_common.protocol.ranges import Range

Batch = tuple[tuple[Range, ...], int]
"""Pieces, and their bytes."""


def distribute(loose: list[Range], sources: Sequence[Source]) -> None:
    """Give loose pieces to these sources in equal parts, all of them; what only some can give, to one of these.

    What a source could be asked for only once a fold is known stays loose: a plan may know better.
    """
    for source in sorted(sources, key=lambda each: each.share.crosses):
        if source.covered is not None and loose:
            there, loose[:] = split_by_marks(source.covered, loose)
            waiting, there = source.apart(there)
            loose.extend(waiting)
            source.give(there)
    able = [source for source in sources if source.covered is None]
    for number, source in enumerate(able):
        source.give(take_first(loose, -(-total_count(loose) // (len(able) - number))))


def assign_plan(plan: Plan, loose: list[Range], pieces: int) -> tuple[list[tuple[Share, list[Range]]], list[Range]]:
    """Say which of the loose pieces each share of a plan brings, and what stays loose."""
    marks = bytearray(pieces)
    set_marks(marks, loose)
    given = []
    for share in plan.shares:
        ranges = [run for first, count in share.pieces for run in ranges_of_marks(marks, first, first + count)]
        for first, count in ranges:
            marks[first : first + count] = bytes(count)
        if ranges:
            given.append((share, ranges))
    return given, ranges_of_marks(marks, 0, pieces)


def feed_idle_sources(index: RoleIndex, loose: list[Range]) -> None:
    """Give idle sources what is loose, or else what others have waiting; and those that cross what they have.

    The index has settled. Only those are looked at that something has happened to: what the others could take they
    have taken.
    """
    if loose:
        _give_loose(index, loose)
        return
    if index.offered:
        # As long as anything was loose no source was relieved, whatever happened.
        index.offered = []
        kinds = list(index.idle_kinds())
    elif index.count(IDLE) and index.count(GIVING):
        kinds = _contested(index)
    else:
        return
    for kind in kinds:
        _relieve(index, kind)


def _give_loose(index: RoleIndex, loose: list[Range]) -> None:
    """Give idle sources what is loose. What somebody nearby has need not cross again, however busy it is."""
    crossing = index.count(CROSSING)
    if (index.offered_crossing, index.offered) == (crossing, loose):
        able = by_number(index.fresh)
    else:
        able = by_number({**index.of(IDLE), **index.of(CROSSING)})
    distribute(
        loose, [each for each in able if each.is_idle and each.has is None and not (each.share.far and crossing)]
    )
    for source in able:
        if source.has is not None and loose and (source.is_idle or (source.is_ready and source.share.crosses)):
            there, loose[:] = split_by_marks(source.has, loose)
            source.give(there)
    index.offered_crossing, index.offered = crossing, list(loose)


def _contested(index: RoleIndex) -> list[str | None]:
    """Return the kinds of which somebody may take over pieces since the last time: idle, or from whom there is more."""
    kinds: dict[str | None, None] = {}
    for source in index.fresh.values():
        if source.roles & IDLE:
            kinds[source.takeover_group] = None
        if source.roles & GIVING:
            kinds[source.layout] = kinds[None] = None
    return list(kinds)


def _relieve(index: RoleIndex, kind: str | None) -> None:
    """Let the idle ones of a kind take over what others have waiting."""
    for taker in by_number(index.idle_of(kind)):
        givers = index.of_layout(GIVING, kind)
        if not givers:
            return
        steal_from_busiest(taker, givers.values())
        index.settle()


def fill_window(
    source: Source, sizes: Sequence[int], share_bytes: int, room_bytes: int, *, relayed: bool
) -> Iterator[Batch]:
    """Cut batches for a source until it has under way what it may: its part, if there is room, or its least.

    `room_bytes` is what all sources together may ask for yet; `relayed`: others wait for what comes.
    """
    own, began = source.in_flight_bytes, source.in_flight_bytes
    while source.queue:
        if source.queue[0][0] < source.partials and source.partials_outstanding:
            return
        room = own - began < room_bytes and own < source.pace.in_flight_limit(share_bytes)
        if not room and len(source.in_flight) >= BATCHES_MIN:
            return
        ranges, nbytes = source.cut_batch(sizes, share_bytes, relayed=relayed)
        own += nbytes
        yield ranges, nbytes


def steal_from_busiest(taker: Source, others: Iterable[Source]) -> None:
    """Take of what the busiest other has not asked for yet the later part, so that both end at about the same time."""
    if taker.takeover_group is not None:
        others = [other for other in others if other.layout == taker.takeover_group]
    able = (other for other in others if other is not taker and not (taker.share.far and other.share.crosses))
    busiest = max(able, key=lambda other: (other.waiting, -other.number), default=None)
    if busiest is None or not busiest.waiting:
        return
    wanted = _part(busiest.waiting, taker.pace.rate, busiest.pace.rate)
    taker.give(busiest.take_back(wanted, taker.covered if taker.has is None else taker.has))


def _part(waiting: int, taker: float | None, giver: float | None) -> int:
    """Return how many of the waiting pieces the taker takes: by the rates, or half; at least one."""
    if not taker or not giver:
        return -(-waiting // 2)
    return min(max(round(waiting * taker / (taker + giver)), 1), waiting)


def slowest_replaceable(index: RoleIndex, now: float) -> Source | None:
    """Name the source whose pieces under way an idle one would bring much sooner; None where there is none."""
    index.settle()
    # What crosses for a site is shared out: an idle source has brought its part, and has nothing of another one's.
    if index.count(CROSSING):
        return None
    for kind in index.idle_kinds():
        late = index.of_layout(SLOWABLE, kind)
        if late and (worst := _worst(index.idle_of(kind).values(), late.values(), index.limits, now)) is not None:
            return worst
    return None


def _worst(idle: Iterable[Source], late: Iterable[Source], limits: TransferLimits, now: float) -> Source | None:
    """Return the slowest late one, if the fastest idle one would bring what it has under way much sooner."""
    rate = max(source.pace.rate or 0.0 for source in idle)
    if not rate:
        return None
    worst = max(late, key=lambda source: (source.remaining_s(now), -source.number))
    elsewhere_s = limits.switch_s + (worst.in_flight_bytes + worst.unconfirmed_bytes) / rate
    return worst if worst.remaining_s(now) > max(limits.slow_min_s, limits.slow_times * elsewhere_s) else None


def check(
    done: bytearray, loose: Iterable[Range], sources: Iterable[Source], elsewhere: Iterable[Iterable[Range]] = ()
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
