"""Which policy places a model's requests: the name that its trainer gave decides. Pure."""

from collections.abc import Mapping
from typing import Final, assert_never, get_args

import msgspec

from tensorhub_common.protocol.rollout.entries import PolicyName
from tensorhub_rollout.policy.arrival import Arrival, ArrivalLimits
from tensorhub_rollout.policy.balancing import BalancingLimits, balance
from tensorhub_rollout.policy.dispatch import Pools, dispatch
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.view import Action, FleetView

ARRIVAL: Final = "arrival"
FALLBACK_POLICY: Final = "rlboost"
"""Places where another policy has failed, or is not known here; it needs to know the least."""
_POLICIES: Final[Mapping[str, PolicyName]] = {name: name for name in get_args(PolicyName)}


def known_policy(name: str) -> PolicyName:
    """Return the policy of this name, or, where a trainer of another release names it, the one in its place."""
    return _POLICIES.get(name, FALLBACK_POLICY)


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
        self, policy: PolicyName, view: FleetView, facts: Facts, plateaus: Mapping[str, int], now: float
    ) -> tuple[Action, ...]:
        """Return what to place and what to move. `plateaus`: of batch sizes, by runner where it is known."""
        match policy:
            case "arrival":
                return self.arrival.look(view, facts, now)
            case "streamrl":
                placed, self._pools = dispatch(view, facts, self._pools, self._limits.balancing, now)
                return placed
            case "rlboost":
                return balance(view, self._limits.balancing, plateaus)
            case _:
                assert_never(policy)
