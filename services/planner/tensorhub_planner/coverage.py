"""The proof that a plan must pass before a byte moves.

Every piece that the demand wants comes from exactly one source, which has it; no source is one that the demand avoids
or the reader itself; and from each source the chain of "who gives it to whom" ends, without a cycle, at a shard that
has the piece now. A plan that fails the proof is a bug, so it raises and no answer is given.
"""

from collections.abc import Mapping

from tensorhub_common.wire.transfer import Plan, SourceId
from tensorhub_planner.ranges import Ranges, Sizes, common, normal, told, without
from tensorhub_planner.sources import Holder, named


class PlanError(AssertionError):
    """A plan does not do what it must: a bug, never a user's fault."""


def prove(
    plan: Plan,
    *,
    wanted: Ranges,
    sizes: Sizes,
    holders: Mapping[SourceId, Holder],
    reader: SourceId,
    avoid: frozenset[SourceId],
    chain_max: int,
) -> None:
    """Raise `PlanError` that names the first thing which is wrong with the plan."""
    seen: set[SourceId] = set()
    left = wanted
    for share in plan.shares:
        source, pieces = share.source, share.pieces
        if source in avoid or source == reader:
            raise PlanError(f"{named(source)} must not be read by {named(reader)}, and the plan does")
        if source in seen:
            raise PlanError(f"{named(source)} stands in the plan twice")
        seen.add(source)
        if not pieces or pieces != normal(pieces):
            raise PlanError(f"the share of {named(source)} is empty or not in order: {told(pieces)}")
        if common(left, pieces) != pieces:
            raise PlanError(f"pieces {told(without(pieces, left))} of {named(source)} are read twice or not wanted")
        if share.nbytes != sizes.of(pieces):
            raise PlanError(f"the share of {named(source)} says {share.nbytes} bytes and has {sizes.of(pieces)}")
        if grounded(source, pieces, holders, reader, chain_max) != pieces:
            raise PlanError(f"the chain of {named(source)} ends at no shard that is ready")
        left = without(left, pieces)
    if left:
        raise PlanError(f"pieces {told(left)} are wanted and nobody gives them")


def grounded(
    source: SourceId, pieces: Ranges, holders: Mapping[SourceId, Holder], reader: SourceId, chain_max: int
) -> Ranges:
    """Return those of the pieces that `source` has, or gets by a chain that ends at a shard which has them now.

    A chain that comes through `reader`, back to itself, or through more than `chain_max` holders counts as none.
    """
    found: list[Ranges] = []
    # Each entry: pieces still to be traced, the holder that is to give them, and those between it and the reader.
    open_ends: list[tuple[Ranges, SourceId, tuple[SourceId, ...]]] = [(pieces, source, (reader,))]
    while open_ends:
        part, at, below = open_ends.pop()
        holder = holders.get(at)
        if holder is None or at in below or len(below) > chain_max:
            continue
        part = part if holder.pieces is None else common(part, holder.pieces)
        for feed in holder.feeds:
            fed = common(part, feed.pieces)
            if fed:
                open_ends.append((fed, feed.source, (*below, at)))
                part = without(part, fed)
        if part:
            found.append(part)
    return found[0] if len(found) == 1 else normal(each for part in found for each in part)
