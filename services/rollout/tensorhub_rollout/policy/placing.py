"""Which policy places a model's requests: the name that its trainer gave decides. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import BalancingLimits, balance
from tensorhub_rollout.policy.dispatch import Pools, dispatch
from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.view import Action, FleetView

STREAMRL: Final = "streamrl"


class PlacingFacts(msgspec.Struct, frozen=True):
    """What is known beside the view. By runner: the plateau of its batch size, and how long its steps take."""

    plateaus: Mapping[str, int]
    steps: Mapping[str, StepModel]
    estimate: Callable[[RequestId], LengthEstimate]
    """How long a response will be."""
    priority: Callable[[RequestId], int]


def place(
    policy: str, view: FleetView, known: PlacingFacts, pools: Pools, limits: BalancingLimits, now: float
) -> tuple[tuple[Action, ...], Pools]:
    """Return what to place and what to move, and the state of the policy after it."""
    if policy == STREAMRL:
        return dispatch(view, known.estimate, known.steps, pools, limits, known.priority, now)
    return balance(view, limits, known.plateaus), pools
