"""The decision: in goes a demand and what the log and the ledger know, out comes a plan with its reasons, or a refusal.

Nearest first (same agent, host, rack, site, any other; `nearness` has the exception); among equals the one that brings
all soonest by what the reader measured, which of ready ones that are as fast is the one with the fewest readers, then
the fewest bytes assigned; among those still equal a lot that is fixed for each pair of reader and source and differs
from reader to reader, so that planners which don't know of each other spread their readers all the same. Farther
sources serve only what no nearer one has. `striping` decides how many equal ones to use. A mapped reader has one
source, whole and on its own host (`mapping`).
What has to come from another site is shared out over the readers that one command has decided there (`crossing`).

All pieces are numbered as in the reader's layout; where the demand names a transfer program, as its units. Which of
them a holder has to offer is decided in one place (`_offered`): a holder of an equal key numbers them alike, and what
one of another layout has of a program's units `resharding` has found out before.

Always true: equal arguments give equal plans; a plan has passed `coverage.prove`; there is a refusal only when some
wanted piece has no source left, and it says who was left out, and why.

The one source of a reader that maps: a ready holder of equal bytes on the reader's own host. Pure.

A mapping is of one segment, so nothing is striped, nothing half-filled is mapped, and another host's memory can't be.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

import msgspec
import xxhash

from tensorhub_common.errors import BadCommand, VersionUnavailable
from tensorhub_common.protocol.plans import Demand, Plan, Refusal, Share, SourceId, precedes
from tensorhub_common.protocol.ranges import Ranges, common, normal, told
from tensorhub_planner.catalog_view.holders import Holder, Holders, Seat, named
from tensorhub_planner.load.ledger import Load
from tensorhub_planner.load.load import IDLE, Busy
from tensorhub_planner.planning.cost_model import believed, link_of, measured_limits, stepped
from tensorhub_planner.planning.explain import absentees, why_mapped, why_plan, why_refusal, why_share
from tensorhub_planner.planning.selection import Choice, Offer, Part, choose
from tensorhub_planner.planning.verifier import chain_ends, grounded, prove
from tensorhub_planner.planning.wan_fanout import groups_of, shares_of
from tensorhub_planner.primitives.limits import Limits
from tensorhub_planner.primitives.piece_sizes import Sizes
from tensorhub_planner.primitives.topology import TRANSPORTS, WORDS, Distance, Topology, between


def the_one(offers: Sequence[Offer]) -> Offer | None:
    """Return the nearest, and of those the one with the fewest readers; mapping costs its holder nothing."""
    return min(offers, key=lambda offer: (offer.distance, offer.readers, offer.assigned, offer.lot), default=None)


def not_here(
    demand: Demand, seat: Seat, left_out: Sequence[str], strangers: Sequence[Holder], holders: Holders
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
"""A demand names so many ranges at most, so that its plan fits into a NATS message."""


LOTS: Final = 2**64
LOTS_KEPT_MAX: Final = 16_384
"""The numbers of so many sources are kept."""


class LayoutsDiffer(msgspec.Struct, frozen=True):
    """Every holder has another layout. `mismatch.explain` makes a refusal of it, given the layouts of these two."""

    seat: Seat
    holder: Holder
    holders: int


Answer = Plan | Refusal | LayoutsDiffer


class _Sorted(msgspec.Struct, frozen=True):
    """The holders by their use: what they offer, in words who was left out and why, who has another layout."""

    offers: tuple[Offer, ...]
    left_out: tuple[str, ...]
    strangers: tuple[Holder, ...]
    ends: Ranges
    """At these pieces a chain of half-filled ones ends."""


def plan(
    demand: Demand, seat: Seat, sizes: Sizes, holders: Holders, topology: Topology, load: Load, limits: Limits
) -> Answer:
    """Decide what the reader at `seat`, whose pieces have these `sizes`, reads from which holder."""
    wanted = _wanted(demand, sizes)
    if isinstance(wanted, str):
        return Refusal(error=BadCommand.__name__, reason=wanted)
    limits = measured_limits(believed(demand.rates, limits), limits)
    for group in groups_of(demand, seat, wanted, holders, topology, sizes, limits):
        found = _sort_out(demand, seat, wanted, group.besides(holders), topology, load, limits)
        choices, missing = choose(group.left_by_others(seat.me, wanted), sizes, found.offers, limits)
        if not missing:
            break
    if found.strangers and not found.offers and not found.left_out and not demand.mapped:
        return LayoutsDiffer(seat, found.strangers[0], len(found.strangers))
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
    prove(
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


def _wanted(demand: Demand, sizes: Sizes) -> Ranges | str:
    """Return the pieces that the demand names, or in words what is wrong with them."""
    if demand.pieces is None:
        return sizes.all()
    if len(demand.pieces) > RANGES_MAX:
        return f"the demand names {len(demand.pieces)} ranges of pieces: ask for at most {RANGES_MAX} at a time"
    for first, count in demand.pieces:
        if first < 0 or count < 1 or first + count > len(sizes):
            return f"the demand names {count} pieces from {first} on, and its layout has {len(sizes)}, counted from 0"
    return normal(demand.pieces)


def _sort_out(
    demand: Demand, seat: Seat, wanted: Ranges, holders: Holders, topology: Topology, load: Load, limits: Limits
) -> _Sorted:
    offers: list[Offer] = []
    left_out: list[str] = []
    strangers: list[Holder] = []
    rates = believed(demand.rates, limits)
    ends = chain_ends(holders.able, seat.key, wanted, draining=holders.draining, made=holders.made)
    seed = xxhash.xxh3_64_intdigest(f"{demand.model}/{seat.me.replica}/{seat.me.shard}".encode()) | 1
    places, me = topology.places, seat.me
    here = places.get(me.agent)
    # An agent may have hundreds of holders: how busy it is is worked out of all that it said of its readers.
    loads: dict[str, Busy] = {}
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
                f"{named(source)} stands on {WORDS[distance] if distance is Distance.WAN else 'another host'}"
            )
            continue
        transport = TRANSPORTS[distance]
        busy = loads.get(source.agent)
        if busy is None:
            busy = loads[source.agent] = load.get((source.agent, transport), IDLE)
        rate = rates.get((link_of(distance, there), transport)) if rates else None
        offers.append(
            Offer(
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
    return _Sorted(tuple(offers), tuple(left_out), tuple(strangers), ends)


@lru_cache(maxsize=LOTS_KEPT_MAX)
def _lot(agent: str, replica: str) -> int:
    """Return a number of a source; an odd one of a reader times that is its lot, so that no two readers order alike."""
    return xxhash.xxh3_64_intdigest(f"{agent}/{replica}".encode())


def _offered(
    demand: Demand,
    seat: Seat,
    holder: Holder,
    wanted: Ranges,
    ends: Ranges,
    limits: Limits,
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
        if not precedes(holder.turn, demand.turn):
            return "is being filled, and its turn is not earlier"
        if holder.depth > limits.chain_max:
            return f"is being filled through {holder.depth} others"
        pieces = grounded(holder, wanted, demand.turn, ends)
    else:
        pieces = wanted if holder.pieces is None else common(wanted, holder.pieces)
    return "has none of the wanted pieces" if wanted and not pieces else pieces


def _whole(demand: Demand, offer: Offer, wanted: Ranges, sizes: Sizes) -> Plan:
    """Return the plan to map all of one holder's memory."""
    why = why_mapped(offer)
    transport = TRANSPORTS[offer.distance]
    share = Share(source=offer.source, transport=transport, pieces=wanted, nbytes=sizes.of(wanted), why=why)
    return Plan(version=demand.version, shares=(share,), why=why)


def _shares(
    choices: Sequence[Choice],
    holders: Mapping[SourceId, Holder],
    topology: Topology,
    streams: Callable[[int], int],
    *,
    foreign: bool,
) -> tuple[Share, ...]:
    """Join what each source gives, in the order in which the sources were chosen; from afar in so many streams.

    Of `foreign` ones, which may have another layout than the reader, it is said which, and the root of that.
    """
    given: dict[SourceId, list[tuple[Choice, Part]]] = {}
    for choice in choices:
        for part in choice.parts:
            given.setdefault(part.offer.source, []).append((choice, part))
    shares = []
    for source, parts in given.items():
        choice, part = parts[0]
        pieces = part.pieces if len(parts) == 1 else normal(run for _, each in parts for run in each.pieces)
        is_far = choice.distance is Distance.WAN
        shares.append(
            Share(
                source=source,
                transport=TRANSPORTS[choice.distance],
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
    demand: Demand, missing: Ranges, wanted: Ranges, holders: Holders, found: _Sorted, limits: Limits
) -> Refusal:
    what = f"version {demand.version} of {demand.model!r}"
    left_out = list(found.left_out)
    if any(common(offer.pieces, missing) for offer in found.offers):
        left_out.append(f"a plan has at most {limits.shares_max} sources")
    if missing and missing != wanted:
        what = f"pieces {told(missing)} of {what}"
    return Refusal(
        error=VersionUnavailable.__name__,
        reason=why_refusal(what, left_out, found.strangers, holders),
    )
