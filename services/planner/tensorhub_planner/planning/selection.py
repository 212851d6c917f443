"""The selection of sources for the wanted pieces: by distance, then by time to bring all, striped where it pays. Pure.

`ranks` orders the distances: near before far, unless measurements clearly contradict it. Reading from near is not only
for the speed of one reader, since it leaves the network to readers that have no near source. A nearer source is
therefore placed behind a farther one only if both are measured and it brings less than one part in `nearer_times` of
the farther one's rate. It is not left out, and still serves the pieces that no source before it has. Another site is
always last, however fast, because all readers of a site share the link to it.

A model of two costs tells which source brings all soonest. A source divides its rate among its readers. Each
half-filled replica on the way delays the end by the time for `hop_bytes`. Readers form a chain while one more reader
on the one ready holder costs more than a hop. Readers of a small model all read from the holder. Between the two cases
they form a tree. A half-filled replica counts only if it brings all sooner than the nearest ready holder. It never
counts if that holder is on the reader's own host, since the reader's copying is the bound there. docs/design/adr/0006
has the figures.

Holders that have everything are the common case and form one group. Holders of parts divide the wanted pieces into
groups of pieces with the same holders. The groups with the fewest holders are settled first, since they have the least
choice.

Invariants:
- A piece is chosen once or is missing.
- A piece is missing only if no offer has it, or if every offer that has it would be one source more than a plan may
  have.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

import msgspec

from tensorhub_common.protocol.plans import LinkRate, SourceId
from tensorhub_common.protocol.ranges import Range, Ranges, merge_ranges, subtract_ranges
from tensorhub_planner.planning.cost_model import StripeCandidate, stripe
from tensorhub_planner.primitives.limits import PlanLimits, Rates
from tensorhub_planner.primitives.piece_sizes import PieceSizes, cut
from tensorhub_planner.primitives.topology import Distance


class MeasuredDistance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far away a source is, and what was measured of the link to it, if anything."""

    distance: Distance
    bps: int | None


class DistanceRank(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Where a source stands: a lower place is read from first. Sources of one place are equally far."""

    place: int
    is_behind: bool
    """It comes after farther ones, which are far faster."""


class _Group(msgspec.Struct):
    """Sources at one distance that stand together, by their numbers."""

    is_behind: bool
    bps: int
    """The best that was measured of them; 0: nothing was, or it does not count."""
    sources: list[int]


def ranks(sources: Sequence[MeasuredDistance], limits: PlanLimits) -> list[DistanceRank]:
    """Return the rank of each source: farthest first each is put before all, or else after the last far faster one."""
    order: list[_Group] = []
    by_distance: dict[Distance, list[int]] = {}
    for number, source in enumerate(sources):
        by_distance.setdefault(source.distance, []).append(number)
    for distance in sorted(by_distance, reverse=True):
        at: dict[int, list[int]] = {}
        for number in by_distance[distance]:
            at.setdefault(_place(sources[number], order, limits), []).append(number)
        for place in sorted(at, reverse=True):
            best = 0 if distance is Distance.WAN else max(sources[number].bps or 0 for number in at[place])
            order.insert(place, _Group(is_behind=place > 0, bps=best, sources=at[place]))
    found = {
        number: DistanceRank(place, group.is_behind) for place, group in enumerate(order) for number in group.sources
    }
    return [found[number] for number in range(len(sources))]


def _place(source: MeasuredDistance, farther: Sequence[_Group], limits: PlanLimits) -> int:
    if source.bps is None:
        return 0
    faster = (place for place, group in enumerate(farther, start=1) if source.bps * limits.nearer_times < group.bps)
    return max(faster, default=0)


class SourceOffer(msgspec.Struct, frozen=True, gc=False):
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
    measured: LinkRate | None = None
    """What the reader measured of the link to it, if that counts."""
    measured_bps: float | None = None
    """The same as a rate to choose by."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """What is read from one source. `place` is its place by load among those of its distance, from 1 on."""

    offer: SourceOffer
    place: int
    pieces: Ranges
    nbytes: int


class Selection(msgspec.Struct, frozen=True, gc=False):
    """How one group of pieces is read, and what the model says of it."""

    distance: Distance
    sources: int
    """The number of candidates at this distance that have some of the pieces."""
    parts: tuple[Assignment, ...]
    seconds: float
    seconds_alone: float
    stripes_pay: bool
    """Whether several sources can be faster than one at this distance at all."""
    is_behind: bool = False
    """It comes after farther ones, which were measured to be far faster."""


class _Seen(StripeCandidate, kw_only=True, gc=False):
    """A source among those that are equally far, while groups of pieces are chosen for one after another."""

    place: int
    """Its place by load, from 1 on."""
    offer: SourceOffer
    is_taken: bool = False
    """The plan reads something from it."""


_Tier = list[_Seen]


def select_sources(
    wanted: Ranges, sizes: PieceSizes, offers: tuple[SourceOffer, ...], limits: PlanLimits
) -> tuple[tuple[Selection, ...], Ranges]:
    """Return how to read the wanted pieces, and the pieces that no source can give."""
    choices: list[Selection] = []
    taken, left = 0, wanted
    nbytes = sizes.of(wanted)
    for rank, its in _drop_slower_half_filled(wanted, nbytes, _tiers(offers, limits), limits):
        if not left:
            break
        tier = _in_order(its, nbytes, limits)
        chosen: list[Range] = []
        for pieces, able in _groups(left, tier, limits.stripes_max):
            rates = _rates(able[0].offer, limits)
            candidates = _candidates(able, rates, limits.shares_max - taken)
            if not candidates:
                continue
            floor_s = nbytes / rates.ingest_bps
            choice = _choice(pieces, candidates, len(tier), sizes, rates, limits, floor_s, is_behind=rank.is_behind)
            choices.append(choice)
            chosen += pieces
            for part in choice.parts:
                seen = tier[part.place - 1]
                taken += not seen.is_taken
                seen.is_taken = True
                seen.begun += part.nbytes
        left = subtract_ranges(left, merge_ranges(chosen))
    return tuple(choices), left


def _tiers(offers: tuple[SourceOffer, ...], limits: PlanLimits) -> list[tuple[DistanceRank, list[SourceOffer]]]:
    """Put those that are equally far together, the nearest first."""
    alike: dict[tuple[Distance, LinkRate | None], list[SourceOffer]] = {}
    for offer in offers:
        alike.setdefault((offer.distance, offer.measured), []).append(offer)
    found: dict[DistanceRank, list[SourceOffer]] = {}
    measures = [MeasuredDistance(distance, None if rate is None else rate.bps) for distance, rate in alike]
    for rank, some in zip(ranks(measures, limits), alike.values(), strict=True):
        found.setdefault(rank, []).extend(some)
    return sorted(found.items())


def _drop_slower_half_filled(
    wanted: Ranges, nbytes: int, tiers: list[tuple[DistanceRank, list[SourceOffer]]], limits: PlanLimits
) -> list[tuple[DistanceRank, list[SourceOffer]]]:
    """Leave out half-filled sources where a ready one that has everything is as near and brings it as soon."""
    if not any(offer.depth for _, its in tiers for offer in its):
        return tiers
    ready = ([each for each in its if not each.depth and each.pieces == wanted] for _, its in tiers)
    nearest = next((some for some in ready if some), None)
    if nearest is None:
        return tiers
    # Nothing is left for sources that are farther than these.
    best = min(_seconds(offer, nbytes, limits) for offer in nearest)
    return [
        (rank, [each for each in its if not each.depth or _seconds(each, nbytes, limits) < best]) for rank, its in tiers
    ]


def _in_order(offers: list[SourceOffer], nbytes: int, limits: PlanLimits) -> _Tier:
    """Sort those that are equally far: who brings all soonest by itself, then who has the least to do."""
    times: dict[tuple[Distance, int, int, float | None], float] = {}
    order: list[tuple[float, int, int, int, SourceId, SourceOffer]] = []
    for offer in offers:
        alike = (offer.distance, offer.readers, offer.depth, offer.measured_bps)
        seconds = times.get(alike)
        if seconds is None:
            seconds = times[alike] = _seconds(offer, nbytes, limits)
        order.append((seconds, offer.readers, offer.assigned, offer.lot, offer.source, offer))
    order.sort()
    in_order = [each[-1] for each in order]
    return [
        _Seen(each.readers, 0, each.measured_bps, place=place, offer=each)
        for place, each in enumerate(in_order, start=1)
    ]


def _seconds(offer: SourceOffer, nbytes: int, limits: PlanLimits) -> float:
    """Return when a reader that takes everything from this source ends, as measured, or else by the model."""
    rates = _rates(offer, limits)
    source_bps = rates.source_bps and (offer.measured_bps or rates.source_bps)
    share = (offer.readers + 1) / source_bps if source_bps else 0.0
    hops_s = offer.depth * limits.hop_bytes / rates.ingest_bps
    return nbytes * max(1 / rates.ingest_bps, share) + rates.setup_s + hops_s


def _rates(first: SourceOffer, limits: PlanLimits) -> Rates:
    """Return the rates of a tier; where one source is read, and the way to it is the bound, of that way."""
    rates, measured = limits.rates(first.distance), first.measured_bps
    if rates.source_bps is None and measured:
        return msgspec.structs.replace(rates, ingest_bps=measured)
    return rates


def _groups(wanted: Ranges, tier: _Tier, stripes_max: int) -> list[tuple[Ranges, _Tier]]:
    """Divide the wanted pieces by their holders; pieces that no holder of the tier has are left out."""
    whole: _Tier = []
    partial: _Tier = []
    for each in tier:
        (whole if each.offer.pieces == wanted else partial).append(each)
    # This many have everything and are less loaded: a look at one more costs time, and wins hardly any.
    del whole[stripes_max:]
    if not partial:
        return [(wanted, whole)] if whole else []
    divided: list[tuple[Ranges, _Tier]] = []
    for holders, ranges in _pieces_by_holders(wanted, partial).items():
        able = [*whole, *_members(holders, partial)]
        if whole:
            able.sort(key=attrgetter("place"))
        if able:
            divided.append((tuple(ranges), able))
    return sorted(divided, key=lambda group: (len(group[1]), group[0]))


def _pieces_by_holders(wanted: Ranges, partial: _Tier) -> dict[int, list[Range]]:
    """Return by who has them the pieces that are wanted; number i of these is bit i of a number."""
    turns: dict[int, int] = {}
    for number, ranges in enumerate((wanted, *(each.offer.pieces for each in partial))):
        bit = 1 << number
        for first, pieces in ranges:
            turns[first] = turns.get(first, 0) ^ bit
            turns[first + pieces] = turns.get(first + pieces, 0) ^ bit
    found: dict[int, list[Range]] = {}
    begin = here = 0
    for at, turn in sorted(turns.items()):
        # Where one set of pieces ends at which another one of the same holders begins nothing changes.
        if turn:
            if here & 1:
                found.setdefault(here >> 1, []).append((begin, at - begin))
            begin, here = at, here ^ turn
    return found


def _members(holders: int, tier: _Tier) -> Iterator[_Seen]:
    """Yield those of a tier whose bits are set."""
    while holders:
        lowest = holders & -holders
        yield tier[lowest.bit_length() - 1]
        holders ^= lowest


def _candidates(able: _Tier, rates: Rates, room: int) -> _Tier:
    """Return those that may give a group of pieces, the best first; at most `room` from which nothing is read yet.

    Where the reader is the bound whom it reads already comes first; else who ends first.
    """
    known = [each for each in able if each.is_taken]
    if not known:
        return able[: max(0, room)]
    fresh = [each for each in able if not each.is_taken]
    bps = rates.source_bps

    def preference(seen: _Seen) -> tuple[float, int]:
        offer = seen.offer
        if bps is None:
            return (0 if seen.begun else 1, seen.place)
        return (seen.begun * (offer.readers + 1) / (offer.measured_bps or bps), seen.place)

    return sorted(known + fresh[: max(0, room)], key=preference)


def _choice(
    pieces: Ranges,
    candidates: _Tier,
    sources: int,
    sizes: PieceSizes,
    rates: Rates,
    limits: PlanLimits,
    floor_s: float,
    *,
    is_behind: bool,
) -> Selection:
    """Share a group of pieces out over the best of the candidates."""
    nbytes = sizes.of(pieces)
    stripes = stripe(
        nbytes,
        candidates,
        rates,
        limits.stripes_max,
        limits.slack,
        floor_s,
    )
    if len(stripes.nbytes) == 1:
        first = candidates[0]
        parts: tuple[Assignment, ...] = (Assignment(first.offer, first.place, pieces, nbytes),)
    else:
        runs = zip(candidates, cut(pieces, sizes, stripes.nbytes), strict=False)
        parts = tuple([Assignment(each.offer, each.place, run, sizes.of(run)) for each, run in runs if run])
    return Selection(
        candidates[0].offer.distance,
        sources,
        parts,
        stripes.seconds,
        stripes.seconds_alone,
        rates.source_bps is not None,
        is_behind,
    )
