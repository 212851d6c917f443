"""Planted bugs of patience: a read that gives up though it need not, a drain and a queue that nothing brings back."""

# ruff: noqa: ANN401 (what stands in for a method takes what that takes)

from typing import TYPE_CHECKING, Any

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.plan_queue import PlanQueue
from tensorhub_agent.core.shard_state import Memory
from tensorhub_agent.transfer.plan_requests import Asking
from tensorhub_common.errors import ReplicaConflict

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.mutants.planting import Replacement


def gives_up_early() -> list["Replacement"]:
    """A read whose sources stand still gives up though the log counts a holder."""
    refused = Asking.refused

    def refuse(self: Any, refusal: Any, *rest: Any) -> bool:
        return refused(self, refusal, *rest) and not refusal.is_held

    return [(Asking, "refused", refuse)]


def drains_for_ever() -> list["Replacement"]:
    """Memory that a reader had mapped at the bound of an update is never read into again."""
    start = ReadOperation.start

    def begin(self: Any, now: float) -> None:
        if self.core.held.memory is Memory.DRAINING:
            self.core.fail(ReplicaConflict, "the memory drains: wait until that has ended")
        else:
            start(self, now)

    return [(ReadOperation, "start", begin)]


def place_kept() -> list["Replacement"]:
    """A question for a plan that was answered keeps its place, so that those that wait never go out."""

    def answered(self: PlanQueue, *_: Any) -> None:
        """Forget nothing."""

    def ended(self: PlanQueue, *_: Any) -> None:
        """Forget nothing."""

    return [(PlanQueue, "answered", answered), (PlanQueue, "ended", ended)]
