"""Which instance has which version in memory: an older one is loaded, or kept, while requests are for it alone. Pure.

Each version that requests are for alone has instances in proportion to their number, at least one, and no more than
there are requests; all others follow the newest version. Where there are more versions than instances, those take turns
of `turn_s`. A version that the hub does not keep is not given up while requests are for it alone: it might never be had
again.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from tensorhub_rollout.policy.view import FleetView, InstanceView, WantAction

Wish = int | Literal["newest"]
"""What an instance is to have in memory: one version, or the newest one."""


class ActivationLimits(msgspec.Struct, frozen=True):
    """The settings of activation; times in seconds."""

    turn_s: float = 30.0
    """So long a version has its instances where there are fewer of these than versions."""


class Turns(msgspec.Struct, frozen=True):
    """When the present turn of each wish began, or its last one; what never had one is not here."""

    began_at: Mapping[Wish, float] = {}


def decide(
    view: FleetView, turns: Turns, limits: ActivationLimits, now: float, stays: Mapping[str, int] | None = None
) -> tuple[tuple[WantAction, ...], Turns]:
    """Return what instances are to have from now on, where that changes, and the turns after it.

    `stays`: what instances keep for now that would else follow the newest version (`rolling.py`).
    """
    stays = stays or {}
    able = [each for each in view.instances if each.keeps_versions and not each.is_leaving]
    wishes = _wishes(view, able)
    holding: set[Wish | None] = {each.version_wanted for each in able}
    # One that stays follows the newest version in the end; one that is on its way to another version does not.
    if any(each.version_wanted in {None, "newest", stays.get(each.runner)} for each in able if each.runner in stays):
        holding.add("newest")
    chosen = _chosen(wishes, holding, turns, limits, now, len(able), view.kept)
    assigned = _assigned(view, able, _seats(view, chosen, len(able)))
    began_at = {wish: at for wish, at in turns.began_at.items() if wish in wishes}
    for wish in chosen:
        is_over = now - began_at.get(wish, now) >= limits.turn_s
        if wish not in holding or wish not in began_at or is_over:
            began_at[wish] = now
    actions = []
    for each in able:
        runner = each.runner
        # The others follow the newest version.
        wanted: Wish = assigned[runner] if runner in assigned else stays.get(runner, "newest")
        if wanted != each.version_wanted:
            actions.append(WantAction(runner, wanted, _reason(view, wanted)))
    return tuple(actions), Turns(began_at)


def _wishes(view: FleetView, able: list[InstanceView]) -> list[Wish]:
    """Return what is to be had: versions that can be, the oldest first, and the newest where others don't serve it."""
    pinned = sorted(version for version in view.demand if version is not None)
    wishes: list[Wish] = []
    if pinned:
        had = {each.version for each in able} | {each.version_wanted for each in able if each.version is None}
        wishes += [each for each in pinned if each in had or each in view.available]
    is_served = view.newest in wishes or any(each.takes_more and not each.keeps_versions for each in view.instances)
    if view.demand.get(None) and not is_served:
        wishes.append("newest")
    return wishes


def _chosen(
    wishes: list[Wish],
    holding: Iterable[Wish | None],
    turns: Turns,
    limits: ActivationLimits,
    now: float,
    count: int,
    kept: frozenset[int],
) -> list[Wish]:
    """Return the wishes that have instances now, at most `count`: those in their turn, then who waits the longest."""

    def order(wish: Wish) -> tuple[bool, float]:
        began_at = turns.began_at.get(wish, float("-inf"))
        in_turn = wish in holding and (now - began_at < limits.turn_s or _may_be_lost(wish, kept))
        return not in_turn, began_at

    return sorted(wishes, key=order)[:count]


def _may_be_lost(wish: Wish, kept: frozenset[int]) -> bool:
    """Tell whether a version may never be had again once its instances go on from it."""
    return wish != "newest" and wish not in kept


def _seats(view: FleetView, chosen: list[Wish], count: int) -> dict[int, int]:
    """Return how many instances each version has that requests are for alone; the others follow the newest."""
    total = sum(view.demand.values())
    seats: dict[int, int] = {}
    for wish in chosen:
        if wish != "newest":
            share = count * view.demand[wish] // total
            seats[wish] = max(1, min(share, view.demand[wish]))
    room = count - ("newest" in chosen)
    while sum(seats.values()) > room:
        most = max(seats, key=lambda version: (seats[version], version))
        seats[most] -= 1
    return seats


def _assigned(view: FleetView, able: list[InstanceView], seats: Mapping[int, int]) -> dict[str, Wish]:
    """Return the instances of each version. One goes on with what it has; else those change that have least to do."""
    wanted: dict[str, Wish] = {}
    free = list(able)
    for version, count in sorted(seats.items()):
        free.sort(key=lambda each: _cost(each, version))
        taken = [each for each in free if each.version == version or version in view.available][:count]
        for each in taken:
            wanted[each.runner] = version
            free.remove(each)
    return wanted


def _cost(instance: InstanceView, version: int) -> tuple[bool, bool, int, str]:
    at_work = len(instance.pending) + len(instance.executing)
    return instance.version != version, instance.version_wanted != version, at_work, instance.runner


def _reason(view: FleetView, wish: Wish) -> str:
    if wish == "newest":
        return "no requests are for an older version alone, as far as they need this instance"
    if not view.demand.get(wish):
        return f"requests may begin on version {wish}, and what runs on it would be computed again"
    return f"{view.demand[wish]} requests are for version {wish} alone"
