"""The one source of a reader that maps: a ready holder of equal bytes on the reader's own host. Pure.

A mapping is of one segment, so nothing is striped, nothing half-filled is mapped, and another host's memory can't be.
"""

from collections.abc import Sequence

from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import Demand, Refusal
from tensorhub_planner.catalog_view.holders import Holder, Holders, Seat
from tensorhub_planner.planning.explain import absentees
from tensorhub_planner.planning.selection import Offer


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
