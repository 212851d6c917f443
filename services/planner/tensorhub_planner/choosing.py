"""Which of the usable sources give which pieces: nearest first, then who brings all soonest, striped where it pays.

What is nearest `nearness` says: by distance, unless a nearer source was measured to be far slower than a farther one.

Who brings all soonest is a model of two costs: a source shares what it gives among its readers, and each half-filled
replica on the way makes the end later by what `hop_bytes` take. So while a reader more on the one ready holder is
dearer than a hop, readers form a chain; where a model is small they all read from the holder; in between it is a tree.
A half-filled replica counts only where it brings all sooner than the nearest ready holder: never where that stands on
the reader's own host, since the reader's copying is the bound there. docs/adr/0006 has the figures.

Holders that have everything are the common case and form one group. Holders of parts divide what is wanted into groups
of pieces that the same holders have; those with the fewest holders are settled first, since they have the least choice.

Always true: a piece is chosen once or is missing; it is missing only if no offer has it, or every one that has it would
be one source more than a plan may have.
"""

from collections.abc import Iterator

import msgspec

from tensorhub_common.wire.transfer import LinkRate, SourceId
from tensorhub_planner.limits import Limits, Rates
from tensorhub_planner.nearness import Measure, Rank, ranks
from tensorhub_planner.ranges import Ranges, Sizes, cut, normal, without
from tensorhub_planner.striping import Candidate, stripe
from tensorhub_planner.topology import Distance


class Offer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one source has of what is wanted, and what speaks for and against it."""

    source: SourceId
    distance: Distance
    readers: int
    assigned: int
    depth: int
    """How many half-filled replicas its bytes come through, itself included; 0 for one that is ready."""
    lot: int
    """Settles between sources that are equal otherwise."""
    pieces: Ranges
    link: str = ""
    """What its bytes come by."""
    measured: LinkRate | None = None
    """What the reader measured of that, if it counts."""
    measured_bps: float | None = None
    """The same as a rate to choose by."""


class Part(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is read from one source. `place` is its place by load among those of its distance, from 1 on."""

    offer: Offer
    place: int
    pieces: Ranges


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How one group of pieces is read, and what the model says of it."""

    distance: Distance
    sources: int
    """Of so many at this distance that have (some of) the pieces."""
    parts: tuple[Part, ...]
    seconds: float
    seconds_alone: float
    stripes_pay: bool
    """Whether several sources can be faster than one at this distance at all."""
    is_behind: bool = False
    """It comes after farther ones, which were measured to be far faster."""


_Tier = list[tuple[int, Offer]]


def choose(
    wanted: Ranges, sizes: Sizes, offers: tuple[Offer, ...], limits: Limits
) -> tuple[tuple[Choice, ...], Ranges]:
    """Return how to read what is wanted, and the pieces that nobody can give."""
    choices: list[Choice] = []
    begun: dict[SourceId, int] = {}
    left = wanted
    nbytes = sizes.of(wanted)
    ranked = _worth_it(wanted, nbytes, _ranked(offers, limits), limits)

    times: dict[tuple[Distance, int, int, float | None], float] = {}

    def order(offer: Offer) -> tuple[float, int, int, int, SourceId]:
        alike = (offer.distance, offer.readers, offer.depth, offer.measured_bps)
        seconds = times.get(alike)
        if seconds is None:
            seconds = times[alike] = _seconds(offer, nbytes, limits)
        return (seconds, offer.readers, offer.assigned, offer.lot, offer.source)

    for rank in sorted({rank for rank, _ in ranked}):
        if not left:
            break
        tier = list(enumerate(sorted((offer for its, offer in ranked if its == rank), key=order), start=1))
        for pieces, able in _groups(left, tier, limits.stripes_max):
            choice = _choose_group(pieces, able, len(tier), sizes, nbytes, begun, limits, is_behind=rank.is_behind)
            if choice is None:
                continue
            choices.append(choice)
            left = without(left, pieces)
            for part in choice.parts:
                source = part.offer.source
                begun[source] = begun.get(source, 0) + sizes.of(part.pieces)
    return tuple(choices), left


def _ranked(offers: tuple[Offer, ...], limits: Limits) -> list[tuple[Rank, Offer]]:
    measures = [(offer.distance, None if offer.measured is None else offer.measured.bps) for offer in offers]
    # Equal sources stand alike, and most are equal.
    distinct = list(dict.fromkeys(measures))
    rank = dict(zip(distinct, ranks([Measure(*each) for each in distinct], limits), strict=True))
    return [(rank[measure], offer) for measure, offer in zip(measures, offers, strict=True)]


def _seconds(offer: Offer, nbytes: int, limits: Limits) -> float:
    """Return when a reader that takes everything from this source ends, as measured, or else by the model."""
    rates = _rates(offer, limits)
    source_bps = rates.source_bps and (offer.measured_bps or rates.source_bps)
    share = (offer.readers + 1) / source_bps if source_bps else 0.0
    hops_s = offer.depth * limits.hop_bytes / rates.ingest_bps
    return nbytes * max(1 / rates.ingest_bps, share) + rates.setup_s + hops_s


def _rates(first: Offer, limits: Limits) -> Rates:
    """Return the rates of a tier; where one source is read, and the way to it is the bound, of that way."""
    rates, measured = limits.rates(first.distance), first.measured_bps
    if rates.source_bps is None and measured:
        return msgspec.structs.replace(rates, ingest_bps=measured)
    return rates


def _worth_it(
    wanted: Ranges, nbytes: int, ranked: list[tuple[Rank, Offer]], limits: Limits
) -> list[tuple[Rank, Offer]]:
    """Leave out half-filled sources where a ready one that has everything is as near and brings it as soon."""
    ready = [(rank, offer) for rank, offer in ranked if not offer.depth and offer.pieces == wanted]
    if not ready:
        return ranked
    nearest = min(rank for rank, _ in ready)
    best = min(_seconds(offer, nbytes, limits) for rank, offer in ready if rank == nearest)
    return [
        (rank, offer)
        for rank, offer in ranked
        if not offer.depth or (rank <= nearest and _seconds(offer, nbytes, limits) < best)
    ]


def _groups(wanted: Ranges, tier: _Tier, stripes_max: int) -> list[tuple[Ranges, _Tier]]:
    """Divide what is wanted by who has it; what nobody in the tier has is left out."""
    # So many have everything and are less loaded: a look at one more costs time, and wins hardly any.
    whole = [each for each in tier if each[1].pieces == wanted][:stripes_max]
    partial = [each for each in tier if each[1].pieces != wanted]
    if not partial:
        return [(wanted, whole)] if whole else []
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    everywhere = tuple(place for place, _ in whole)
    for first, count, places in _stretches(wanted, partial):
        groups.setdefault((*everywhere, *places), []).append((first, count))
    able = dict(whole + partial)
    divided = [
        (normal(ranges), [(place, able[place]) for place in sorted(places)])
        for places, ranges in groups.items()
        if places
    ]
    return sorted(divided, key=lambda group: (len(group[1]), group[0]))


def _stretches(wanted: Ranges, partial: _Tier) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield consecutive runs of what is wanted that the same ones of the tier have: (first, count, their places)."""
    edges: list[tuple[int, int, int]] = []
    for place, offer in [(0, None), *partial]:
        for first, count in wanted if offer is None else offer.pieces:
            edges += ((first, 1, place), (first + count, -1, place))
    edges.sort()
    open_now: dict[int, None] = {}
    begin = 0
    for at, step, place in edges:
        if at > begin and 0 in open_now:
            yield begin, at - begin, tuple(sorted(each for each in open_now if each))
        begin = at
        if step > 0:
            open_now[place] = None
        else:
            del open_now[place]


def _choose_group(
    pieces: Ranges,
    able: _Tier,
    sources: int,
    sizes: Sizes,
    nbytes_all: int,
    begun: dict[SourceId, int],
    limits: Limits,
    *,
    is_behind: bool,
) -> Choice | None:
    rates = _rates(able[0][1], limits)
    known = [each for each in able if each[1].source in begun]
    fresh = [each for each in able if each[1].source not in begun][: max(0, limits.shares_max - len(begun))]
    candidates = sorted(known + fresh, key=lambda each: _preference(each[0], each[1], begun, rates))
    if not candidates:
        return None
    stripes = stripe(
        sizes.of(pieces),
        [Candidate(offer.readers, begun.get(offer.source, 0), offer.measured_bps) for _, offer in candidates],
        rates,
        limits.stripes_max,
        limits.slack,
        nbytes_all / rates.ingest_bps,
    )
    runs = cut(pieces, sizes, stripes.nbytes)
    return Choice(
        distance=able[0][1].distance,
        sources=sources,
        parts=tuple(
            Part(offer=offer, place=place, pieces=run)
            for (place, offer), run in zip(candidates, runs, strict=False)
            if run
        ),
        seconds=stripes.seconds,
        seconds_alone=stripes.seconds_alone,
        stripes_pay=rates.source_bps is not None,
        is_behind=is_behind,
    )


def _preference(place: int, offer: Offer, begun: dict[SourceId, int], rates: Rates) -> tuple[float, int]:
    """Order those that may give a group: where the reader is the bound, whom it reads already; else who ends first."""
    already = begun.get(offer.source, 0)
    if rates.source_bps is None:
        return (0 if already else 1, place)
    return (already * (offer.readers + 1) / (offer.measured_bps or rates.source_bps), place)
