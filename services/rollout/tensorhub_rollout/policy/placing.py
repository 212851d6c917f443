"""Which policy places a model's requests: the name that its trainer gave decides. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.arrival import ArrivalFacts, ArrivalLimits, ArrivalState, place_by_arrival
from tensorhub_rollout.policy.balancing import BalancingLimits, balance
from tensorhub_rollout.policy.dispatch import Pools, dispatch
from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.view import Action, FleetView

ARRIVAL: Final = "arrival"
STREAMRL: Final = "streamrl"
FALLBACK_POLICY: Final = "rlboost"
"""Places where another policy has failed; it needs to know the least."""


class PlacingFacts(msgspec.Struct, frozen=True):
    """What is known beside the view. By runner: the plateau of its batch size, and how long its steps take."""

    plateaus: Mapping[str, int]
    steps: Mapping[str, StepModel]
    estimate: Callable[[RequestId], LengthEstimate]
    """How long a response will be."""
    context: Callable[[RequestId], int]
    """How many tokens a request has, those of its prompt among them."""
    priority: Callable[[RequestId], int]
    is_due: Callable[[RequestId], bool] = lambda _: False
    """Whether a request was submitted before the trainer's step began."""


class PlacingLimits(msgspec.Struct, frozen=True):
    """The settings of all policies of placement."""

    balancing: BalancingLimits = BalancingLimits()
    arrival: ArrivalLimits = ArrivalLimits()


class PlacingState(msgspec.Struct, frozen=True):
    """What the policies remember."""

    pools: Pools = Pools()
    arrival: ArrivalState = ArrivalState()


def place(
    policy: str, view: FleetView, known: PlacingFacts, state: PlacingState, limits: PlacingLimits, now: float
) -> tuple[tuple[Action, ...], PlacingState]:
    """Return what to place and what to move, and the state of the policies after it."""
    if policy == ARRIVAL:
        facts = ArrivalFacts(known.steps, known.estimate, known.context, known.priority, known.is_due)
        actions, arrival = place_by_arrival(view, facts, state.arrival, limits.arrival, now)
        return actions, PlacingState(state.pools, arrival)
    if policy == STREAMRL:
        placed, pools = dispatch(view, known.estimate, known.steps, state.pools, limits.balancing, known.priority, now)
        return placed, PlacingState(pools, state.arrival)
    return balance(view, limits.balancing, known.plateaus), state
