"""What a policy of placement is told of requests beside the view of the fleet. Pure."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel


class RequestFacts(NamedTuple):
    """What is known of one open request."""

    length: LengthEstimate
    """How long its response will be."""
    context: int = 0
    """How many tokens it has, those of its prompt among them."""
    priority: int = 0
    """The higher, the sooner it begins."""
    is_due: bool = False
    """Whether it was submitted before the trainer's step began, so that the trainer may wait for it now."""
    is_first: bool = False
    """Whether it is the first of its group."""


class Facts(msgspec.Struct, frozen=True):
    """What is known of engines and of open requests."""

    steps: Mapping[str, StepModel]
    """How long a step takes, by runner where that is known."""
    of: Callable[[RequestId], RequestFacts]
    """Returns what is known of one request."""
