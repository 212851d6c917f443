"""Which readers of a site bring which pieces over from another site, so that each byte crosses once. Pure.

The shards of a site whose rounds were decided by one command, and which have equal pieces, are a *group*. The first
ones by turn are forwarders (on the wire: crossers). Each brings a run of the pieces of about equal bytes, and all
members read the rest from them. Each planner computes that from the log alone, independent of earlier requests and of
load. A forwarder that fails loses its own run only, which is divided in blocks among the others by rendezvous hashing.
Planners that leave out the same forwarders, at whatever time, therefore come to the same division.

Readers that use a transfer program divide its units in the same way. Where replicas of several layouts were decided
together, the layout of the first by turn crosses, and the others read in the site, after earlier turns.

Invariant: a piece has one forwarder, as long as any is left.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import xxhash

from tensorhub_common.protocol.plans import PlanRequest, Share, SourceId
from tensorhub_common.protocol.ranges import Ranges, intersect_ranges, merge_ranges, subtract_ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet, ReaderShard
from tensorhub_planner.planning.verifier import chain_ends
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes, cut
from tensorhub_planner.primitives.topology import TRANSPORT_BY_DISTANCE, Distance, Topology

BLOCKS: Final = 32
"""The run of one that does not cross is divided into this many blocks among the others."""


class FanoutGroup(msgspec.Struct, frozen=True):
    """The crossers of the reader's site, in the order of their turns, and what each of them is to bring over."""

    crossers: tuple[SourceId, ...]
    parts: Mapping[SourceId, Ranges]

    def others(self, me: SourceId) -> dict[SourceId, Ranges]:
        """Return what the reader reads from whom."""
        return {source: pieces for source, pieces in self.parts.items() if source != me and pieces}

    def besides(self, holders: HolderSet) -> HolderSet:
        """Return those that are no crossers: a reader asks a crosser for its part, and for nothing else."""
        if not self.crossers:
            return holders
        able = tuple(holder for holder in holders.able if holder.source not in self.crossers)
        return msgspec.structs.replace(holders, able=able)

    def left_by_others(self, me: SourceId, wanted: Ranges) -> Ranges:
        """Return what the reader has to get from elsewhere."""
        return subtract_ranges(wanted, merge_ranges(each for pieces in self.others(me).values() for each in pieces))

    def streams(self, limits: PlanLimits, readers: int) -> int:
        """Return how many streams one crosser, or a reader alone, has from a far source with `readers` readers.

        Those share its line: more streams would only make each of them slower.
        """
        return max(1, limits.wan_streams // max(len(self.crossers), readers + 1))


NO_GROUP: Final = FanoutGroup((), {})


def divide(crossers: Sequence[SourceId], out: Collection[SourceId], sizes: PieceSizes) -> dict[SourceId, Ranges]:
    """Return which pieces each crosser brings over, without those that are out."""
    able = [each for each in crossers if each not in out]
    if not able:
        return {}
    runs = cut(sizes.all(), sizes, [sizes.of(sizes.all()) / len(crossers)] * len(crossers))
    parts: dict[SourceId, list[tuple[int, int]]] = {each: [] for each in able}
    for number, (crosser, run) in enumerate(zip(crossers, runs, strict=True)):
        if crosser in parts:
            parts[crosser].extend(run)
            continue
        for block, pieces in enumerate(cut(run, sizes, [sizes.of(run) / BLOCKS] * BLOCKS)):
            parts[max(able, key=lambda each: _lot(each, number, block))].extend(pieces)
    return {crosser: merge_ranges(ranges) for crosser, ranges in parts.items()}


def _lot(crosser: SourceId, run: int, block: int) -> tuple[int, SourceId]:
    return xxhash.xxh3_64_intdigest(f"{crosser.agent}/{crosser.replica}/{run}/{block}".encode()), crosser


def fanout_groups(
    demand: PlanRequest,
    seat: ReaderShard,
    wanted: Ranges,
    holders: HolderSet,
    topology: Topology,
    sizes: PieceSizes,
    limits: PlanLimits,
) -> Iterator[FanoutGroup]:
    """Yield who crosses which of the wanted pieces for the reader's site: as it should be, then without the reader.

    Nothing is shared out, as in the last one, where the reader is alone, or another shard in the site has the pieces,
    will have them, or had them and is draining: then nothing comes from another site.
    """
    mates = _site_peers(demand, seat, holders, topology) if demand.promises else []
    if any(topology.distance(seat.me.agent, agent) <= Distance.SITE for agent in holders.draining_on):
        mates = []
    turns = {each.source: each.turn for each in mates} | {seat.me: demand.turn}
    crossers = list(demand.crossers) or sorted(turns, key=lambda each: (turns[each], each))[: limits.wan_streams]
    if mates and seat.me in crossers:
        ends = chain_ends(holders.able, seat.key, wanted, draining=holders.draining)
        left = subtract_ranges(ends, _nearby(demand, seat, wanted, holders, topology))
        out = {*demand.avoid, *demand.uncrossed, *(each for each in crossers if each not in turns)}
        for without_me in (False, True):
            divided = divide(crossers, out | {seat.me} if without_me else out - {seat.me}, sizes)
            parts = {each: intersect_ranges(pieces, left) for each, pieces in divided.items()}
            if any(parts.values()):
                yield FanoutGroup(tuple(crossers), parts)
    yield NO_GROUP


def joins_fanout(demand: PlanRequest, seat: ReaderShard, holders: HolderSet, topology: Topology) -> bool:
    """Tell whether a reader that may have to go by a program belongs to those who share out what crosses to their site.

    `holders` are of any layout. Not where a shard in the site has the version, or will have it by an earlier decision:
    such a one is read, whatever its layout.
    """
    if not demand.promises or demand.turn is None or not _site_peers(demand, seat, holders, topology):
        return False
    near = [each for each in holders.able if topology.distance(seat.me.agent, each.source.agent) <= Distance.SITE]
    if any(each.turn is None or each.turn.decided < demand.turn.decided for each in near):
        return False
    together = [each for each in near if each.turn is not None and each.turn.decided == demand.turn.decided]
    first = min(each.turn for each in together if each.turn is not None)
    return demand.turn < first or any(each.turn == first and _is_at_seat(each, seat) for each in together)


def _site_peers(demand: PlanRequest, seat: ReaderShard, holders: HolderSet, topology: Topology) -> list[Holder]:
    """Return those whose round the same command has decided as the reader's, in its site, for equal pieces."""
    turn, me = demand.turn, seat.me
    if turn is None or demand.mapped:
        return []
    return [
        each
        for each in holders.able
        if each.turn is not None
        and each.turn.decided == turn.decided
        and _is_at_seat(each, seat)
        and each.source != me
        and topology.distance(me.agent, each.source.agent) <= Distance.SITE
    ]


def _is_at_seat(holder: Holder, seat: ReaderShard) -> bool:
    """Tell whether a shard has the same bytes as the reader's at equal versions. Its key may be that of a program."""
    return (holder.layout, holder.shards, holder.source.shard) == (seat.layout, seat.shards, seat.me.shard)


def _nearby(demand: PlanRequest, seat: ReaderShard, wanted: Ranges, holders: HolderSet, topology: Topology) -> Ranges:
    """Return the pieces that a shard in the site has, or will have because of an earlier decision."""
    found: list[tuple[int, int]] = []
    for holder in holders.able:
        is_before = holder.turn is None or (demand.turn is not None and holder.turn.decided < demand.turn.decided)
        is_of_use = holder.key == seat.key and holder.source not in demand.avoid and holder.source != seat.me
        if not is_before or not is_of_use or (demand.program is None and demand.root not in (None, holder.root)):
            continue
        if topology.distance(seat.me.agent, holder.source.agent) <= Distance.SITE:
            found.extend(wanted if holder.pieces is None else intersect_ranges(wanted, holder.pieces))
    return merge_ranges(found)


def shares_of(
    group: FanoutGroup, seat: ReaderShard, topology: Topology, sizes: PieceSizes, *, by_program: bool
) -> list[Share]:
    """Return what the reader reads from the others of its group, which have its own layout."""
    me, layout = seat.me, seat.layout if by_program else None
    whole = len(group.crossers)
    return [
        Share(
            source=source,
            transport=TRANSPORT_BY_DISTANCE[topology.distance(me.agent, source.agent)],
            pieces=pieces,
            nbytes=sizes.of(pieces),
            why=f"it crosses this part for the site: number {group.crossers.index(source) + 1} of {whole}",
            layout=layout,
            crosses=True,
        )
        for source, pieces in group.others(me).items()
    ]
