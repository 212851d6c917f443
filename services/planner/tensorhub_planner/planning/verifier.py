"""The proof that a plan must pass before a byte moves. Pure.

Every wanted piece comes from exactly one source, which has it or will have it. No source is the reader itself, or one
that the request avoids. From each source the chain of sources ends, without a cycle, at a ready shard. A plan that
fails the proof is a bug, so it raises and no answer is given.

There is no cycle although no planner sees the other readers' plans. Turns have one order, and a half-filled source is
used only where its turn is earlier than the reader's (`servable_pieces`). The same holds for the source's own plan, so
turns only fall along a chain. There are finitely many, and the reader of the earliest turn reads from ready shards
alone. The source's agent checks the same for each lease by its own knowledge, so a planner that is behind the log makes
no cycle either.

Pieces that cross to the reader's site for its group (`wan_fanout.py`) come from members of any turn, and each of them
gets its own part from a ready holder or an earlier turn. No plan can see that the other plans agree. A reader therefore
waits for such a piece only while its source promises it, and no source promises what it waits for itself
(docs/adr/0012).
"""

from collections.abc import Mapping, Sequence

from tensorhub_common.protocol.plans import Plan, ReadPriority, Share, SourceId, has_priority
from tensorhub_common.protocol.ranges import (
    NOTHING,
    Ranges,
    describe_ranges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
)
from tensorhub_planner.catalog_view.holders import Holder, named
from tensorhub_planner.primitives.piece_sizes import PieceSizes


class PlanError(AssertionError):
    """A plan does not do what it must: a bug, never a user's fault."""


def verify_plan(
    plan: Plan,
    *,
    wanted: Ranges,
    sizes: PieceSizes,
    holders: Mapping[SourceId, Holder],
    reader: SourceId,
    avoid: frozenset[SourceId],
    turn: ReadPriority | None,
    ends: Ranges,
    crossing: Mapping[SourceId, Ranges] | None = None,
) -> None:
    """Raise `PlanError` that names the first thing which is wrong with the plan. `turn` is the reader's.

    `crossing` says which pieces each of the reader's group brings over to their site.
    """
    seen: set[SourceId] = set()
    left = wanted
    for share in plan.shares:
        source, pieces = share.source, share.pieces
        if source in avoid or source == reader:
            raise PlanError(f"{named(source)} must not be read by {named(reader)}, and the plan does")
        if source in seen:
            raise PlanError(f"{named(source)} stands in the plan twice")
        seen.add(source)
        if not pieces or pieces != merge_ranges(pieces):
            raise PlanError(f"the share of {named(source)} is empty or not in order: {describe_ranges(pieces)}")
        if intersect_ranges(left, pieces) != pieces:
            twice = describe_ranges(subtract_ranges(pieces, left))
            raise PlanError(f"pieces {twice} of {named(source)} are read twice or not wanted")
        if share.nbytes != sizes.of(pieces):
            raise PlanError(f"the share of {named(source)} says {share.nbytes} bytes and has {sizes.of(pieces)}")
        _prove_end(share, holders.get(source), turn, ends, crossing or {})
        left = subtract_ranges(left, pieces)
    if left:
        raise PlanError(f"pieces {describe_ranges(left)} are wanted, and no share gives them")


def _prove_end(
    share: Share, holder: Holder | None, turn: ReadPriority | None, ends: Ranges, crossing: Mapping[SourceId, Ranges]
) -> None:
    """Raise `PlanError` unless the chains of a share end at shards that are ready."""
    source, pieces = share.source, share.pieces
    if holder is None or not (share.crosses or servable_pieces(holder, pieces, turn, ends) == pieces):
        raise PlanError(f"the chain of {named(source)} ends at no shard that is ready")
    if share.crosses and intersect_ranges(intersect_ranges(crossing.get(source, NOTHING), ends), pieces) != pieces:
        raise PlanError(f"pieces {describe_ranges(pieces)} are not those that {named(source)} brings over to the site")


def verify_reused_plan(
    plan: Plan, proven: Plan, holders: Sequence[Holder], *, reader: SourceId, avoid: frozenset[SourceId]
) -> None:
    """Raise `PlanError` unless what was proven of a plan is true of the same one for another version.

    The same units of the same program from the same layouts cover the destination now as they did then. What may have
    changed is proved anew: that each source (`holders`, one for each share) is ready, is the one that the plan names,
    has that layout and the root that the plan names, and may be read.
    """
    if plan.program is None or plan.program != proven.program:
        raise PlanError("a plan can be made again only for the same transfer program")
    if not len(plan.shares) == len(proven.shares) == len(holders):
        raise PlanError("the plan has other shares than the one that was proven")
    for share, before, holder in zip(plan.shares, proven.shares, holders, strict=True):
        source = share.source
        if source in avoid or source == reader:
            raise PlanError(f"{named(source)} must not be read by {named(reader)}, and the plan does")
        if source != before.source or share.nbytes != before.nbytes or share.pieces != before.pieces:
            raise PlanError(f"the share of {named(source)} is not the one that was proven")
        if holder.source != source or holder.turn is not None:
            raise PlanError(f"{named(source)} does not stand ready")
        if not holder.layout == share.layout == before.layout:
            raise PlanError(f"{named(source)} has another layout than when the plan was proven")
        if holder.root != share.root:
            raise PlanError(f"{named(source)} holds root {holder.root}, and the plan says {share.root}")


def servable_pieces(holder: Holder, pieces: Ranges, turn: ReadPriority | None, ends: Ranges) -> Ranges:
    """Return those of the pieces that a holder has, or gets by a chain that ends at a shard which is ready.

    `turn` is the reader's; `ends` are the pieces at which a chain can end (`chain_ends`).
    """
    has = pieces if holder.pieces is None else intersect_ranges(pieces, holder.pieces)
    if holder.turn is None:
        return has
    return intersect_ranges(has, ends) if has_priority(holder.turn, turn) else NOTHING


def chain_ends(
    holders: Sequence[Holder], key: str, pieces: Ranges, *, draining: bool, made: Ranges = NOTHING
) -> Ranges:
    """Return those of the pieces that stand in a ready shard, or in a draining one which still serves its readers.

    `made` are those that follow of what stands in ready shards.
    """
    # Without half-filled holders no chain needs an end.
    if draining or all(holder.turn is None for holder in holders):
        return pieces
    ready = [holder.pieces for holder in holders if holder.turn is None and holder.key == key]
    if None in ready:
        return pieces
    return intersect_ranges(pieces, merge_ranges(each for part in (made, *ready) if part is not None for each in part))
