"""Placing for comparison: as Seer (2025) does, one response of each group first. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, PlaceAction


@dataclass(slots=True)
class ProbesFirst:
    """Seer's order: one response of each group first, then those that are expected to be the longest.

    Requests wait for a slot in one queue, so that what the first ones tell counts for all that have not begun. Its
    pool of KV, its speculation and its division of a response into parts that move are not here.
    """

    group_size: int
    left_of: Callable[[RequestId], float]
    """How many tokens a request is expected to have still."""
    probed: set[tuple[int, int]] = field(default_factory=set)
    """Groups of which a response was placed: submission, and number within it."""

    def actions(self, view: FleetView) -> list[Action]:
        """Return where waiting requests go, as far as there are free slots."""
        free = {each.runner: each.free_slots for each in view.instances if each.takes_more}
        actions: list[Action] = [*released(view)]
        rest: list[RequestId] = []
        for of in view.waiting:
            group = of.submission, of.index // self.group_size
            if group in self.probed:
                rest.append(of)
            elif (placed := self._placed(of, free, "nothing is known of its group")) is not None:
                self.probed.add(group)
                actions.append(placed)
        for _, of in sorted((-self.left_of(of), of) for of in rest):
            if (placed := self._placed(of, free, "it is the longest that waits")) is None:
                break
            actions.append(placed)
        return actions

    def _placed(self, of: RequestId, free: dict[str, int], reason: str) -> PlaceAction | None:
        runner = max(free, key=lambda each: (free[each], each), default=None)
        if runner is None or free[runner] <= 0:
            return None
        free[runner] -= 1
        return PlaceAction(of, runner, reason)
