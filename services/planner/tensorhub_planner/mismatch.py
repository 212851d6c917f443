"""The refusal when a version stands only in layouts that are not the reader's: it names the tensors that differ."""

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout import Layout, difference
from tensorhub_common.wire.transfer import Demand, Refusal
from tensorhub_planner.plan import LayoutsDiffer
from tensorhub_planner.reasons import counted
from tensorhub_planner.sources import named


def explain(demand: Demand, differ: LayoutsDiffer, mine: Layout | None, theirs: Layout | None) -> Refusal:
    """Compare the reader's layout with a holder's. A layout that can't be had (None) is told by its digest."""
    seat, holder = differ.seat, differ.holder
    cut = (
        f"{named(holder.source)} is shard {holder.source.shard} of {holder.shards}, "
        f"and this one shard {demand.shard} of {seat.shards}"
    )
    if seat.layout == holder.layout:
        tensors = "their tensors are described alike"
    elif mine is None or theirs is None:
        tensors = f"its layout is {holder.layout[:12]}, and this one's {seat.layout[:12]}"
    else:
        tensors = f"they differ in {difference(theirs, mine)}"
    more = f" ({counted(differ.holders - 1, 'more holder')})" if differ.holders > 1 else ""
    return Refusal(
        error=LayoutMismatch.__name__,
        reason=(
            f"version {demand.version} of {demand.model!r} stands in other layouts only: {cut}; {tensors}{more}. "
            "Register the replica with the tensors of a holder"
        ),
    )
