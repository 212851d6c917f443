"""Which policy places a model's requests: the name that its trainer gave decides. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from tensorhub_rollout.policy.arrival import Arrival, ArrivalLimits
from tensorhub_rollout.policy.balancing import BalancingLimits, balance
from tensorhub_rollout.policy.dispatch import Pools, dispatch
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.view import Action, FleetView

ARRIVAL: Final = "arrival"
STREAMRL: Final = "streamrl"
FALLBACK_POLICY: Final = "rlboost"
"""Places where another policy has failed; it needs to know the least."""


class PlacingLimits(msgspec.Struct, frozen=True):
    """The settings of all policies of placement."""

    balancing: BalancingLimits = BalancingLimits()
    arrival: ArrivalLimits = ArrivalLimits()


class Placing:
    """The policies of placement for one model, with what they remember."""

    def __init__(self, limits: PlacingLimits) -> None:
        """Know of nothing yet."""
        self._limits = limits
        self._pools = Pools()
        self.arrival = Arrival(limits.arrival)

    def look(
        self, policy: str, view: FleetView, facts: Facts, plateaus: Mapping[str, int], now: float
    ) -> tuple[Action, ...]:
        """Return what to place and what to move. `plateaus`: of batch sizes, by runner where it is known."""
        if policy == ARRIVAL:
            return self.arrival.look(view, facts, now)
        if policy == STREAMRL:
            placed, self._pools = dispatch(view, facts, self._pools, self._limits.balancing, now)
            return placed
        return balance(view, self._limits.balancing, plateaus)
