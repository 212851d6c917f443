"""What a reader may be given where sources' edges cut through blocks of fp8. Pure.

There are two ways to a fold: from those who have it quantised, or by the partials of all who have a part of its blocks.
The first moves less and needs nobody else, so it is taken for every fold that can be had so; where no plan comes of
that, all folds are asked for by their partials.

Always true: what a way wants gives all that the demand names, if the plan gives what the way wants (`prove_folds`).
"""

from collections.abc import Iterator, Sequence

import msgspec

from tensorhub_common.programs.amax_reductions import folds_of
from tensorhub_common.programs.numbered_program import Execution
from tensorhub_common.protocol.plans import Demand, Plan, SourceId, precedes
from tensorhub_common.protocol.ranges import NOTHING, Ranges, common, normal, told, without
from tensorhub_planner.catalog_view.holders import Holder, Holders
from tensorhub_planner.planning.verifier import PlanError


def made_of(execution: Execution, holders: Sequence[Holder]) -> Ranges:
    """Return the scales that follow of partials which stand in ready shards."""
    ready = normal(run for holder in holders if holder.turn is None for run in holder.pieces or ())
    partials = ((0, execution.partials),)
    if common(ready, partials) == partials:
        return normal([(execution.partials, execution.scales - execution.partials)])
    folds = folds_of(execution)
    lacking = {folds.of[unit] for unit in _units(without(partials, ready))}
    return normal((unit, 1) for unit in range(execution.partials, execution.scales) if folds.of[unit] not in lacking)


def ways(execution: Execution, demand: Demand, me: SourceId, holders: Holders) -> Iterator[tuple[Demand, Holders]]:
    """Yield what to plan instead of a demand, the best first, and with which holders."""
    wanted = normal([(0, len(execution))] if demand.pieces is None else demand.pieces)
    partials = common(wanted, ((0, execution.partials),))
    if not partials:
        yield demand, holders
        return
    usable = [each for each in holders.able if _is_usable(each, demand, me)]
    computed = normal(run for holder in usable for run in _computed(execution, holder))
    spared = _spared(execution, wanted, partials, computed)
    if spared:
        kept = without(wanted, spared)
        if spared != partials:
            kept = without(kept, _following(execution, without(partials, spared)))
        yield _asking(demand, kept), _without_parts(execution, holders, spared)
    yield _asking(demand, without(wanted, _following(execution, partials))), holders


def prove_folds(plan: Plan, demand: Demand, execution: Execution) -> None:
    """Raise `PlanError` unless whatever of a demand is not in its plan follows of what is, or is not needed."""
    wanted = normal([(0, len(execution))] if demand.pieces is None else demand.pieces)
    given = normal(run for share in plan.shares for run in share.pieces)
    partials = common(wanted, ((0, execution.partials),))
    absent = without(partials, given)
    left = without(without(wanted, given), partials)
    follows = _following(execution, partials)
    if without(left, follows):
        raise PlanError(f"units {told(without(left, follows))} are wanted, and nobody gives or computes them")
    if not absent:
        return
    folds = folds_of(execution)
    wished = {folds.of[unit] for unit in _units(common(wanted, _rest(execution)))}
    alone = [(unit, 1) for unit in _units(absent) if folds.of[unit] not in wished]
    needed = normal(alone) or common(left, _following(execution, absent))
    for share in plan.shares:
        parts = common(normal(execution.by_amax(share.layout or "")), share.pieces)
        needed = needed or common(parts, _following(execution, absent, values=True))
    if needed:
        raise PlanError(f"units {told(needed)} need partials that the plan leaves out")


def _is_usable(holder: Holder, demand: Demand, me: SourceId) -> bool:
    is_early = holder.turn is None or precedes(holder.turn, demand.turn)
    return holder.source != me and holder.source not in demand.avoid and is_early


def _computed(execution: Execution, holder: Holder) -> Ranges:
    """Return what of folds a holder has as it is wanted."""
    return without(common(holder.pieces or NOTHING, _rest(execution)), normal(execution.by_amax(holder.layout)))


def _spared(execution: Execution, wanted: Ranges, partials: Ranges, computed: Ranges) -> Ranges:
    """Return the partials of folds of which all that is wanted is computed already, and something is.

    Of others the reader waits for the partials themselves: it has given out the rest.
    """
    rest = common(wanted, _rest(execution))
    lacking = without(rest, computed)
    if not common(rest, computed):
        return NOTHING
    if rest == _rest(execution) and not lacking:
        return partials
    folds = folds_of(execution)
    needed = {folds.of[unit] for unit in _units(lacking)}
    wished = {folds.of[unit] for unit in _units(rest)}
    return normal((unit, 1) for unit in _units(partials) if folds.of[unit] in wished and folds.of[unit] not in needed)


def _following(execution: Execution, partials: Ranges, *, values: bool = False) -> Ranges:
    """Return the scales of these partials' folds, or their values."""
    begin, end = (execution.scales, execution.values) if values else (execution.partials, execution.scales)
    if partials == ((0, execution.partials),):
        return normal([(begin, end - begin)])
    folds = folds_of(execution)
    numbers = {folds.of[unit] for unit in _units(partials)}
    return normal((unit, 1) for number in numbers for unit in folds.rest_of(number) if begin <= unit < end)


def _without_parts(execution: Execution, holders: Holders, spared: Ranges) -> Holders:
    """Take from holders of parts of blocks the values that would need these partials."""
    values = _following(execution, spared, values=True)
    able = [
        msgspec.structs.replace(each, pieces=without(each.pieces, common(parts, values)))
        if each.pieces is not None and (parts := normal(execution.by_amax(each.layout)))
        else each
        for each in holders.able
    ]
    return msgspec.structs.replace(holders, able=tuple(able))


def _rest(execution: Execution) -> Ranges:
    """Return what follows of partials."""
    return ((execution.partials, execution.values - execution.partials),)


def _asking(demand: Demand, wanted: Ranges) -> Demand:
    return msgspec.structs.replace(demand, pieces=wanted)


def _units(ranges: Ranges) -> Iterator[int]:
    return (unit for first, count in ranges for unit in range(first, first + count))
