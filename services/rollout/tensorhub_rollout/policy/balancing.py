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
from heapq import heapify, heappop, heappush
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
LOOKED_AT_MAX: Final = 4096
"""Limit of the waiting requests that one look looks at, the first."""
PLACED_MAX: Final = 1024
"""Limit of the requests that one look places, so that it is short in a fleet of any size."""


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
    shortest = _ShortestQueue(view)
    actions: list[PlaceAction] = []
    is_full = False
    for request in view.first_waiting(LOOKED_AT_MAX):
        version = view.pinned.get(request)
        if len(actions) >= PLACED_MAX:
            break
        if is_full and version is None:
            continue
        count, runner = shortest.of(version)
        if runner is None or count >= limits.pending_max:
            # Those that are for another version alone may run elsewhere.
            is_full = is_full or version is None
            if is_full and not view.pinned:
                break
            continue
        if request in view.alone:
            if not count:
                actions.append(PlaceAction(request, runner, "nothing is pending there, and it is tried alone"))
            # Nothing else is placed there, so that it is free for this one soon.
            shortest.set(runner, limits.pending_max)
            continue
        reason = f"it has the fewest pending: {count} of at most {limits.pending_max}"
        actions.append(PlaceAction(request, runner, reason))
        shortest.set(runner, count + 1)
    return tuple(actions)


class _ShortestQueue:
    """Which instance has the fewest pending, as requests are placed."""

    def __init__(self, view: FleetView) -> None:
        self._takers = {each.runner: each for each in view.instances if each.takes_more}
        self._pending = {runner: len(each.pending) for runner, each in self._takers.items()}
        self._kept_back = view.kept_back()
        self._heaps: dict[int | None, list[tuple[int, str]]] = {}
        """By the version that requests are for alone, or None: where they may go. Some numbers have changed since."""

    def of(self, version: int | None) -> tuple[int, str | None]:
        """Return the fewest pending of where requests for this version alone, or for any, may go; and where that is."""
        if version not in self._heaps:
            found = [(self._pending[name], name) for name, each in self._takers.items() if self._fits(version, each)]
            heapify(found)
            self._heaps[version] = found
        heap = self._heaps[version]
        while heap:
            count, runner = heap[0]
            if count == self._pending[runner]:
                return count, runner
            heappop(heap)
        return 0, None

    def set(self, runner: str, count: int) -> None:
        """Take how many are pending on an instance now."""
        self._pending[runner] = count
        for version in {None, self._takers[runner].version} & self._heaps.keys():
            if self._fits(version, self._takers[runner]):
                heappush(self._heaps[version], (count, runner))

    def _fits(self, version: int | None, instance: InstanceView) -> bool:
        return instance.runner not in self._kept_back if version is None else instance.version == version


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
        for request in [*fullest.executing][len(fullest.executing) - count :]
        if view.fits(request, idle)
    )
