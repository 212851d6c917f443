"""The plan decision: from a demand, the log's state and the ledger's load to a plan with reasons, or a refusal. Pure.

Sources are used in this order:
1. The nearest first: same agent, host, rack, site, any other (`selection.py` has the exception).
2. Among equally near sources, the one that brings all soonest by the reader's measurements. Among ready sources that
   are equally fast, this is the one with the fewest readers, then the one with the fewest bytes assigned.
3. Among sources that are still equal, a lot. It is fixed for each pair of reader and source and differs from reader to
   reader. Planners that don't know of each other therefore spread their readers as well.

Farther sources serve only pieces that no nearer source has. `cost_model.py` decides how many equal sources to use. The
readers that one command has decided in a site share out the pieces that come from another site (`wan_fanout.py`).

A mapped reader has exactly one source: a ready holder of equal bytes on the reader's own host (`the_one`). A mapping
is of one segment, so it is not striped. A half-filled holder and a holder on another host can't be mapped.

Pieces are numbered as in the reader's layout, or as units of the transfer program if the demand names one. `_offered`
alone decides which of them a holder can offer. A holder of an equal key numbers them alike. For a holder of another
layout, `resharding.py` has found its units of the program before.

Invariants:
- Equal arguments give equal plans.
- A plan has passed `verify_plan`.
- A refusal occurs only if some wanted piece has no source left. It names the sources that were left out, and why.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

import msgspec
import xxhash

from tensorhub_common.errors import BadCommand, VersionUnavailable
from tensorhub_common.protocol.plans import Plan, PlanRequest, Refusal, Share, SourceId, has_priority
from tensorhub_common.protocol.ranges import Ranges, describe_ranges, intersect_ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet, ReaderShard, named
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import IDLE, Load
from tensorhub_planner.planning.cost_model import link_of, measured_limits, stepped, trusted_rates
from tensorhub_planner.planning.explain import absentees, why_mapped, why_plan, why_refusal, why_share
from tensorhub_planner.planning.selection import Assignment, Selection, SourceOffer, select_sources
from tensorhub_planner.planning.verifier import chain_ends, servable_pieces, verify_plan
from tensorhub_planner.planning.wan_fanout import fanout_groups, shares_of
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import DISTANCE_WORDS, TRANSPORT_BY_DISTANCE, Distance, Topology, between


def the_one(offers: Sequence[SourceOffer]) -> SourceOffer | None:
    """Return the nearest, and of those the one with the fewest readers; mapping costs its holder nothing."""
    return min(offers, key=lambda offer: (offer.distance, offer.readers, offer.assigned, offer.lot), default=None)


def not_here(
    demand: PlanRequest, seat: ReaderShard, left_out: Sequence[str], strangers: Sequence[Holder], holders: HolderSet
) -> Refusal:
    """Say that nothing can be mapped here, why, and what to do."""
    return Refusal(
        error=VersionUnavailable.__name__,
        reason=(
            f"no holder of version {demand.version} of {demand.model!r} stands ready on the host of agent "
            f"{seat.me.agent!r} with this layout, and install='mapped' maps the memory of one "
            f"({absentees(left_out, strangers, holders)}): hold it there, or register with install='staged'"
        ),
    )


RANGES_MAX: Final = 32_768
"""A demand names at most this many ranges, so that its plan fits into a NATS message."""


LOTS: Final = 2**64
LOTS_KEPT_MAX: Final = 16_384
"""The numbers of at most this many sources are kept."""


class OnlyOtherLayouts(msgspec.Struct, frozen=True):
    """Every holder has another layout. `turns_to_program` (`resharding.py`) then has the reader go by a program."""

    seat: ReaderShard
    holder: Holder
    holders: int


PlanOutcome = Plan | Refusal | OnlyOtherLayouts


class _Candidates(msgspec.Struct, frozen=True):
    """The holders by their use: what they offer, in words who was left out and why, who has another layout."""

    offers: tuple[SourceOffer, ...]
    left_out: tuple[str, ...]
    strangers: tuple[Holder, ...]
    ends: Ranges
    """At these pieces a chain of half-filled ones ends."""


def make_plan(
    demand: PlanRequest,
    seat: ReaderShard,
    sizes: PieceSizes,
    holders: HolderSet,
    topology: Topology,
    load: LoadView,
    limits: PlanLimits,
) -> PlanOutcome:
    """Decide what the reader at `seat`, whose pieces have these `sizes`, reads from which holder."""
    wanted = _wanted(demand, sizes)
    if isinstance(wanted, str):
        return Refusal(error=BadCommand.__name__, reason=wanted)
    limits = measured_limits(trusted_rates(demand.rates, limits), limits)
    for group in fanout_groups(demand, seat, wanted, holders, topology, sizes, limits):
        found = _sort_out(demand, seat, wanted, group.besides(holders), topology, load, limits)
        choices, missing = select_sources(group.left_by_others(seat.me, wanted), sizes, found.offers, limits)
        if not missing:
            break
    if found.strangers and not found.offers and not found.left_out and not demand.mapped:
        return OnlyOtherLayouts(seat, found.strangers[0], len(found.strangers))
    if demand.mapped:
        source = the_one(found.offers)
        if source is None:
            return not_here(demand, seat, found.left_out, found.strangers, holders)
        return _whole(demand, source, wanted, sizes)
    if missing or not (found.offers or group.crossers):
        return _refuse(demand, missing, wanted, holders, found, limits)
    able = {holder.source: holder for holder in holders.able}
    answer = Plan(
        version=demand.version,
        shares=(
            *_shares(choices, able, topology, partial(group.streams, limits), foreign=demand.program is not None),
            *shares_of(group, seat, topology, sizes, by_program=demand.program is not None),
        ),
        crossers=group.crossers,
        program=demand.program,
        why=why_plan(choices, wanted, sizes, found.left_out, len(group.crossers)),
    )
    verify_plan(
        answer,
        wanted=wanted,
        sizes=sizes,
        holders=able,
        reader=seat.me,
        avoid=frozenset(demand.avoid),
        turn=demand.turn,
        ends=found.ends,
        crossing=group.parts,
    )
    return answer


def _wanted(demand: PlanRequest, sizes: PieceSizes) -> Ranges | str:
    """Return the pieces that the demand names, or in words what is wrong with them."""
    if demand.pieces is None:
        return sizes.all()
    if len(demand.pieces) > RANGES_MAX:
        return f"the demand names {len(demand.pieces)} ranges of pieces: ask for at most {RANGES_MAX} at a time"
    for first, count in demand.pieces:
        if first < 0 or count < 1 or first + count > len(sizes):
            return f"the demand names {count} pieces from {first} on, and its layout has {len(sizes)}, counted from 0"
    return merge_ranges(demand.pieces)


def _sort_out(
    demand: PlanRequest,
    seat: ReaderShard,
    wanted: Ranges,
    holders: HolderSet,
    topology: Topology,
    load: LoadView,
    limits: PlanLimits,
) -> _Candidates:
    offers: list[SourceOffer] = []
    left_out: list[str] = []
    strangers: list[Holder] = []
    rates = trusted_rates(demand.rates, limits)
    ends = chain_ends(holders.able, seat.key, wanted, draining=holders.draining, made=holders.made)
    seed = xxhash.xxh3_64_intdigest(f"{demand.model}/{seat.me.replica}/{seat.me.shard}".encode()) | 1
    places, me = topology.places, seat.me
    here = places.get(me.agent)
    # An agent may have hundreds of holders: how busy it is is worked out of all that it said of its readers.
    loads: dict[str, Load] = {}
    for holder in holders.able:
        source = holder.source
        if holder.key != seat.key:
            strangers.append(holder)
            continue
        pieces = _offered(demand, seat, holder, wanted, ends, limits)
        if isinstance(pieces, str):
            left_out.append(f"{named(source)} {pieces}")
            continue
        there = places.get(source.agent)
        distance = Distance.AGENT if source.agent == me.agent else between(here, there)
        if demand.mapped and distance > Distance.HOST:
            left_out.append(
                f"{named(source)} stands on {DISTANCE_WORDS[distance] if distance is Distance.WAN else 'another host'}"
            )
            continue
        transport = TRANSPORT_BY_DISTANCE[distance]
        busy = loads.get(source.agent)
        if busy is None:
            busy = loads[source.agent] = load.get((source.agent, transport), IDLE)
        rate = rates.get((link_of(distance, there), transport)) if rates else None
        offers.append(
            SourceOffer(
                source,
                distance,
                busy.readers,
                busy.nbytes,
                0 if holder.turn is None else holder.depth,
                _lot(source.agent, source.replica) * seed % LOTS,
                pieces,
                rate,
                None if rate is None else stepped(rate.bps),
            )
        )
    return _Candidates(tuple(offers), tuple(left_out), tuple(strangers), ends)


@lru_cache(maxsize=LOTS_KEPT_MAX)
def _lot(agent: str, replica: str) -> int:
    """Return a number of a source; an odd one of a reader times that is its lot, so that no two readers order alike."""
    return xxhash.xxh3_64_intdigest(f"{agent}/{replica}".encode())


def _offered(
    demand: PlanRequest,
    seat: ReaderShard,
    holder: Holder,
    wanted: Ranges,
    ends: Ranges,
    limits: PlanLimits,
) -> Ranges | str:
    """Return which wanted pieces a holder of the reader's own layout can give, or in words why none."""
    if holder.source in demand.avoid:
        return "failed this read"
    if holder.source == seat.me:
        return "is the reader itself"
    if demand.program is None and demand.root is not None and holder.root != demand.root:
        return f"holds root {holder.root}, not {demand.root}"
    if holder.turn is not None:
        if demand.mapped:
            return "is still being filled"
        if not has_priority(holder.turn, demand.turn):
            return "is being filled, and its turn is not earlier"
        if holder.depth > limits.chain_max:
            return f"is being filled through {holder.depth} others"
        pieces = servable_pieces(holder, wanted, demand.turn, ends)
    else:
        pieces = wanted if holder.pieces is None else intersect_ranges(wanted, holder.pieces)
    return "has none of the wanted pieces" if wanted and not pieces else pieces


def _whole(demand: PlanRequest, offer: SourceOffer, wanted: Ranges, sizes: PieceSizes) -> Plan:
    """Return the plan to map all of one holder's memory."""
    why = why_mapped(offer)
    transport = TRANSPORT_BY_DISTANCE[offer.distance]
    share = Share(source=offer.source, transport=transport, pieces=wanted, nbytes=sizes.of(wanted), why=why)
    return Plan(version=demand.version, shares=(share,), why=why)


def _shares(
    choices: Sequence[Selection],
    holders: Mapping[SourceId, Holder],
    topology: Topology,
    streams: Callable[[int], int],
    *,
    foreign: bool,
) -> tuple[Share, ...]:
    """Join what each source gives, in the order in which the sources were chosen; from afar in `streams` streams.

    Of `foreign` ones, which may have another layout than the reader, it is said which, and the root of that.
    """
    given: dict[SourceId, list[tuple[Selection, Assignment]]] = {}
    for choice in choices:
        for part in choice.parts:
            given.setdefault(part.offer.source, []).append((choice, part))
    shares = []
    for source, parts in given.items():
        choice, part = parts[0]
        pieces = part.pieces if len(parts) == 1 else merge_ranges(run for _, each in parts for run in each.pieces)
        is_far = choice.distance is Distance.WAN
        shares.append(
            Share(
                source=source,
                transport=TRANSPORT_BY_DISTANCE[choice.distance],
                pieces=pieces,
                nbytes=sum([each.nbytes for _, each in parts]),
                why=why_share(choice, part),
                layout=holders[source].layout if foreign else None,
                root=holders[source].root if foreign else None,
                link=link_of(choice.distance, topology.places.get(source.agent)),
                far=is_far,
                streams=streams(part.offer.readers) if is_far else 1,
            )
        )
    return tuple(shares)


def _refuse(
    demand: PlanRequest, missing: Ranges, wanted: Ranges, holders: HolderSet, found: _Candidates, limits: PlanLimits
) -> Refusal:
    what = f"version {demand.version} of {demand.model!r}"
    left_out = list(found.left_out)
    if any(intersect_ranges(offer.pieces, missing) for offer in found.offers):
        left_out.append(f"a plan has at most {limits.shares_max} sources")
    if missing and missing != wanted:
        what = f"pieces {describe_ranges(missing)} of {what}"
    return Refusal(
        error=VersionUnavailable.__name__,
        reason=why_refusal(what, left_out, found.strangers, holders),
    )
