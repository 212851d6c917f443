"""The strategies for fp8 blocks that the edges of sources' boxes cut. Pure.

A reader gets such blocks in one of two ways: from holders that have them quantised, or by the partials of all holders
that have a part of them. The first way moves less and needs no other holder, so it is used for every block for which it
is possible. Where that leads to no plan, all blocks are requested by their partials.

Invariant: a plan that gives what a strategy wants gives all that the request names (`prove_folds`).
"""

from collections.abc import Iterator, Sequence

import msgspec

from tensorhub_common.programs.amax_reductions import amax_reductions_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, PlanRequest, SourceId, has_priority
from tensorhub_common.protocol.ranges import (
    NOTHING,
    Ranges,
    describe_ranges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
)
from tensorhub_planner.catalog_view.holders import Holder, HolderSet
from tensorhub_planner.planning.verifier import PlanError


def derivable_scales(execution: NumberedProgram, holders: Sequence[Holder]) -> Ranges:
    """Return the scales that follow of partials which stand in ready shards."""
    ready = merge_ranges(run for holder in holders if holder.turn is None for run in holder.pieces or ())
    partials = ((0, execution.partials),)
    if intersect_ranges(ready, partials) == partials:
        return merge_ranges([(execution.partials, execution.scales - execution.partials)])
    folds = amax_reductions_of(execution)
    lacking = {folds.of[unit] for unit in _units(subtract_ranges(partials, ready))}
    return merge_ranges(
        (unit, 1) for unit in range(execution.partials, execution.scales) if folds.of[unit] not in lacking
    )


def fp8_strategies(
    execution: NumberedProgram, demand: PlanRequest, me: SourceId, holders: HolderSet
) -> Iterator[tuple[PlanRequest, HolderSet]]:
    """Yield what to plan instead of a demand, the best first, and with which holders."""
    wanted = merge_ranges([(0, len(execution))] if demand.pieces is None else demand.pieces)
    partials = intersect_ranges(wanted, ((0, execution.partials),))
    if not partials:
        yield demand, holders
        return
    usable = [each for each in holders.able if _is_usable(each, demand, me)]
    computed = merge_ranges(run for holder in usable for run in _computed(execution, holder))
    spared = _spared(execution, wanted, partials, computed)
    if spared:
        kept = subtract_ranges(wanted, spared)
        if spared != partials:
            kept = subtract_ranges(kept, _following(execution, subtract_ranges(partials, spared)))
        yield _asking(demand, kept), _without_parts(execution, holders, spared)
    yield _asking(demand, subtract_ranges(wanted, _following(execution, partials))), holders


def prove_folds(plan: Plan, demand: PlanRequest, execution: NumberedProgram) -> None:
    """Raise `PlanError` unless whatever of a demand is not in its plan follows of what is, or is not needed."""
    wanted = merge_ranges([(0, len(execution))] if demand.pieces is None else demand.pieces)
    given = merge_ranges(run for share in plan.shares for run in share.pieces)
    partials = intersect_ranges(wanted, ((0, execution.partials),))
    absent = subtract_ranges(partials, given)
    left = subtract_ranges(subtract_ranges(wanted, given), partials)
    follows = _following(execution, partials)
    if subtract_ranges(left, follows):
        raise PlanError(
            f"units {describe_ranges(subtract_ranges(left, follows))} are wanted, and no share gives or computes them"
        )
    if not absent:
        return
    folds = amax_reductions_of(execution)
    wished = {folds.of[unit] for unit in _units(intersect_ranges(wanted, _rest(execution)))}
    alone = [(unit, 1) for unit in _units(absent) if folds.of[unit] not in wished]
    needed = merge_ranges(alone) or intersect_ranges(left, _following(execution, absent))
    for share in plan.shares:
        parts = intersect_ranges(merge_ranges(execution.by_amax(share.layout or "")), share.pieces)
        needed = needed or intersect_ranges(parts, _following(execution, absent, values=True))
    if needed:
        raise PlanError(f"units {describe_ranges(needed)} need partials that the plan leaves out")


def _is_usable(holder: Holder, demand: PlanRequest, me: SourceId) -> bool:
    is_early = holder.turn is None or has_priority(holder.turn, demand.turn)
    return holder.source != me and holder.source not in demand.avoid and is_early


def _computed(execution: NumberedProgram, holder: Holder) -> Ranges:
    """Return what of folds a holder has as it is wanted."""
    return subtract_ranges(
        intersect_ranges(holder.pieces or NOTHING, _rest(execution)), merge_ranges(execution.by_amax(holder.layout))
    )


def _spared(execution: NumberedProgram, wanted: Ranges, partials: Ranges, computed: Ranges) -> Ranges:
    """Return the partials of folds of which all that is wanted is computed already, and something is.

    Of others the reader waits for the partials themselves: it has given out the rest.
    """
    rest = intersect_ranges(wanted, _rest(execution))
    lacking = subtract_ranges(rest, computed)
    if not intersect_ranges(rest, computed):
        return NOTHING
    if rest == _rest(execution) and not lacking:
        return partials
    folds = amax_reductions_of(execution)
    needed = {folds.of[unit] for unit in _units(lacking)}
    wished = {folds.of[unit] for unit in _units(rest)}
    return merge_ranges(
        (unit, 1) for unit in _units(partials) if folds.of[unit] in wished and folds.of[unit] not in needed
    )


def _following(execution: NumberedProgram, partials: Ranges, *, values: bool = False) -> Ranges:
    """Return the scales of these partials' folds, or their values."""
    begin, end = (execution.scales, execution.values) if values else (execution.partials, execution.scales)
    if partials == ((0, execution.partials),):
        return merge_ranges([(begin, end - begin)])
    folds = amax_reductions_of(execution)
    numbers = {folds.of[unit] for unit in _units(partials)}
    return merge_ranges((unit, 1) for number in numbers for unit in folds.rest_of(number) if begin <= unit < end)


def _without_parts(execution: NumberedProgram, holders: HolderSet, spared: Ranges) -> HolderSet:
    """Take from holders of parts of blocks the values that would need these partials."""
    values = _following(execution, spared, values=True)
    able = [
        msgspec.structs.replace(each, pieces=subtract_ranges(each.pieces, intersect_ranges(parts, values)))
        if each.pieces is not None and (parts := merge_ranges(execution.by_amax(each.layout)))
        else each
        for each in holders.able
    ]
    return msgspec.structs.replace(holders, able=tuple(able))


def _rest(execution: NumberedProgram) -> Ranges:
    """Return what follows of partials."""
    return ((execution.partials, execution.values - execution.partials),)


def _asking(demand: PlanRequest, wanted: Ranges) -> PlanRequest:
    return msgspec.structs.replace(demand, pieces=wanted)


def _units(ranges: Ranges) -> Iterator[int]:
    return (unit for first, count in ranges for unit in range(first, first + count))
