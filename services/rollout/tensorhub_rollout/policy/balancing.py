"""RLBoost's load balance (NSDI'26, Algorithm 2): delayed join of the shortest queue, and two kinds of migration. Pure.

Select: of the instances with fewer than `pending_max` pending requests (the paper's Theta) the one with the fewest gets
the next request. Where there is none, requests wait for a completion. Two things are not of the paper. A request that
is for one version alone goes where that is, and others don't wait for it. One that may kill its instance is placed
where nothing is pending.

Release: an instance whose machine goes away soon gives all of its requests back.

Migrate, continuously:
(a) where one instance has nothing pending and on another requests wait for a slot, one goes from the one where most
    wait. The target must have a free slot: without it the request would be pending there, and go back. One that has
    a slot stays, although it is pending until its first token: its prompt is being computed, and would be from the
    beginning on at every move.
(b) else, where nothing is pending anywhere and one instance executes nothing, `executing - B` requests go there from
    the one that executes most, B being its plateau (`plateau`). B is measured in the step before, so this begins with
    the trainer's second step.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from tensorhub_rollout.policy.view import (
    Action,
    FleetView,
    InstanceView,
    MoveAction,
    PlaceAction,
    ReleaseAction,
)

PLATEAU_STEP_MIN: Final = 2


class BalancingLimits(msgspec.Struct, frozen=True):
    """The settings of the load balance."""

    pending_max: int = 4
    """Limit of the requests that are pending on an instance (Theta)."""


def balance(view: FleetView, limits: BalancingLimits, plateaus: Mapping[str, int]) -> tuple[Action, ...]:
    """Return what to place, or else what to move; `plateaus`: B of each runner of which it is known.

    Nothing moves in a look that places: the view of the next one has the placements.
    """
    given_back = released(view)
    placed = _select(view, limits)
    return (*given_back, *placed) or _migrate(view, plateaus)


def released(view: FleetView) -> tuple[ReleaseAction, ...]:
    """Take all from instances that go away: what they have made so far goes on elsewhere (section 4.2)."""
    return tuple(
        ReleaseAction(request, each.runner, "its machine goes away soon")
        for each in view.instances
        if each.is_leaving
        for request in (*each.executing, *each.pending)
    )


def _select(view: FleetView, limits: BalancingLimits) -> tuple[PlaceAction, ...]:
    takers = {each.runner: each for each in view.instances if each.takes_more}
    pending = {runner: len(each.pending) for runner, each in takers.items()}
    any_version = [runner for runner, each in takers.items() if not view.is_kept_back(each)]
    actions: list[PlaceAction] = []
    is_full = False
    for request in view.waiting:
        is_pinned = request in view.pinned
        if is_full and not is_pinned:
            continue
        fitting = [name for name in pending if view.fits(request, takers[name])] if is_pinned else any_version
        runner = min(fitting, key=lambda name: (pending[name], name), default=None)
        if runner is None or pending[runner] >= limits.pending_max:
            # Those that are for another version alone may run elsewhere.
            is_full = is_full or not is_pinned
            if is_full and not view.pinned:
                break
            continue
        if request in view.alone:
            if not pending[runner]:
                actions.append(PlaceAction(request, runner, "nothing is pending there, and it is tried alone"))
            # Nothing else is placed there, so that it is free for this one soon.
            pending[runner] = limits.pending_max
            continue
        reason = f"it has the fewest pending: {pending[runner]} of at most {limits.pending_max}"
        actions.append(PlaceAction(request, runner, reason))
        pending[runner] += 1
    return tuple(actions)


def _migrate(view: FleetView, plateaus: Mapping[str, int]) -> tuple[MoveAction, ...]:
    takers = [each for each in view.instances if each.takes_more]
    busiest = max(view.instances, key=lambda each: (each.queued, each.runner), default=None)
    if busiest is None:
        return ()
    if busiest.queued:
        idle = [each for each in takers if not each.pending and each.free_slots > 0 and each.runner != busiest.runner]
        if not idle:
            return ()
        target = max(idle, key=lambda each: (each.free_slots, each.runner))
        movable = [each for each in busiest.pending if view.fits(each, target)]
        if not movable:
            return ()
        reason = f"on {busiest.runner} {busiest.queued} wait for a slot, and {target.runner} has a free one"
        return (MoveAction(movable[-1], busiest.runner, target.runner, reason),)
    if any(each.pending for each in view.instances):
        return ()
    return _spread(view, takers, plateaus)


def _spread(view: FleetView, takers: list[InstanceView], plateaus: Mapping[str, int]) -> tuple[MoveAction, ...]:
    idle = min((each for each in takers if not each.executing), key=lambda each: each.runner, default=None)
    if view.step < PLATEAU_STEP_MIN or idle is None:
        return ()
    fullest = max(view.instances, key=lambda each: (len(each.executing), each.runner))
    plateau = plateaus.get(fullest.runner)
    if plateau is None:
        return ()
    count = min(max(len(fullest.executing) - plateau, 0), idle.slots)
    reason = f"{fullest.runner} executes {len(fullest.executing)}, of which {plateau} are as fast; {idle.runner} none"
    return tuple(
        MoveAction(request, fullest.runner, idle.runner, reason)
        for request in fullest.executing[len(fullest.executing) - count :]
        if view.fits(request, idle)
    )
