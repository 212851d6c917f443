"""Holders of any layout in the units of a transfer program, so that a plan treats them as equals. Pure.

A reader uses a program where no shard of its own layout has had the version yet, or none of them is left. Then every
shard that has the version counts, whichever replica it belongs to, with the units that its layout gives.
"""

import msgspec

from tensorhub_common.errors import LayoutMismatch, VersionUnavailable
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import PlanAnswer, PlanRequest, Refusal
from tensorhub_planner.catalog_view.holders import Candidates, HolderSet
from tensorhub_planner.planning.explain import absentees, why_refusal
from tensorhub_planner.planning.fp8_strategies import derivable_scales
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome
from tensorhub_planner.planning.wan_fanout import joins_fanout
from tensorhub_planner.primitives.source_set import LayoutSet


def reads_by_program(demand: PlanRequest) -> bool:
    """Tell of a demand by itself whether it goes by a program: it does already, or the log knows no root of its own."""
    return demand.program is not None or (demand.root is None and not demand.mapped)


def turns_to_program(demand: PlanRequest, answer: PlanOutcome, *, whole: bool) -> bool:
    """Tell whether the answer by holders of the reader's layout is not enough, so that other layouts are needed.

    A read that has some pieces already goes on with those; it begins again where no holder is left for the rest.
    """
    if isinstance(answer, OnlyOtherLayouts):
        return True
    unavailable = isinstance(answer, Refusal) and answer.error == VersionUnavailable.__name__
    return unavailable and whole and not demand.mapped


def program_sources(demand: PlanRequest, found: Candidates) -> LayoutSet:
    """Return the layouts of which the reader's program is to be compiled.

    Readers that divide the transfer to their site exchange units, so they must have one program, at whatever time each
    of them asks and whichever shards hold the version by then: it is made of the layouts in which the version was
    published. For all other readers every holder counts.
    """
    published = found.of_replica.original_set
    if published is not None and joins_fanout(demand, found.seat, found.holders, found.topology):
        return published
    return found.of_replica.source_set


def in_units(found: Candidates, execution: NumberedProgram) -> Candidates:
    """Return for each holder the units of the program that it has; one that has none is left out.

    The reader's own layout has all of them, whatever the program was compiled of.
    """
    by_layout, key = found.of_replica.by_layout, found.seat.key
    replace = msgspec.structs.replace
    able = [
        replace(holder, key=key, pieces=units)
        for layout, units in execution.given()
        if units
        for holder in by_layout.get(layout, ())
    ]
    made = derivable_scales(execution, able) if execution.partials else ()
    return msgspec.structs.replace(found, holders=msgspec.structs.replace(found.holders, able=tuple(able), made=made))


def no_holder_refusal(demand: PlanRequest, holders: HolderSet) -> Refusal:
    """Refuse a version that no shard of any layout has."""
    what = f"version {demand.version} of {demand.model!r}"
    return Refusal(error=VersionUnavailable.__name__, reason=why_refusal(what, (), (), holders))


def cannot_be_filled(demand: PlanRequest, why: LayoutMismatch, absent: HolderSet, *, could_be: bool) -> PlanAnswer:
    """Refuse what no holder has; `could_be`: with the shards that are absent now it would be complete."""
    what = f"version {demand.version} of {demand.model!r} can't fill shard {demand.shard} of {demand.replica!r}"
    if could_be:
        reason = f"{what} just now: {why} ({absentees((), (), absent)}): wait for another holder, and ask again"
        return Refusal(error=VersionUnavailable.__name__, reason=reason)
    reason = f"{what}: {why}. Register it with tensors of the same names, global shapes and dtypes, or with a mapping"
    return Refusal(error=LayoutMismatch.__name__, reason=reason)
