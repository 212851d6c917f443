"""The policy `arrival`: each request where all is done soonest, with regard to when versions arrive. Pure.

Requests are placed the longest first (longest processing time first, LPT), each on the instance that is done soonest
with it (`finish_times`). Requests that were submitted before the trainer's step began are *due*: the trainer may wait
for them now, and does not for those that it has submitted ahead. They come first. Two terms can be switched off, each
by itself:

- Admission. An instance that has no version yet on which a request may run counts from when it will have one. What is
  best there waits for it; what is best elsewhere, or has waited for `hold_s_max`, begins now. Off: only instances that
  may run it count.
- Migration. A request moves from the instance that is done last to the one that is done first, where both are done
  sooner for it, by more than what it costs to compute its context there. Off: what runs stays until its instance goes.

A look assesses what a few instances have to do, those first of which that is known longest, and orders a few of the
requests that have come to wait. So it takes about as long with any number of open requests. What is placed counts at
once. An instance whose machine goes away gives its requests back, those with the most tokens first: they are the
dearest to lose.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.finish_times import Load, Work
from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.ranking import Rank
from tensorhub_rollout.policy.view import Action, FleetView, InstanceView, MoveAction, PlaceAction, ReleaseAction

UNMEASURED: Final = StepModel(1.0, 0.1, 0.0)
"""Of engines whose steps are not known: only which of two instances has more to do is told by it."""


CANDIDATES: Final = 8
"""In a larger fleet a request is compared on this number of instances of two kinds, chosen anew as often."""


class ArrivalLimits(msgspec.Struct, frozen=True):
    """The settings of the policy; times in seconds."""

    admits_by_arrival: bool = True
    """Whether the term of admission is on."""
    migrates: bool = True
    """Whether the term of migration is on."""
    hold_s_max: float = 30.0
    """So long a request waits for a version to arrive, where an instance could run it now."""
    pending_max: int = 16
    """Limit of the requests that are pending on an instance."""
    assessed_s: float = 1.0
    """How often it is looked at anew what an instance has to do."""
    assessed_max: int = 64
    """Limit of the requests on instances that are looked at anew at one look, but for one instance whole."""
    ranked_max: int = 256
    """Limit of the requests that are put in order at one look; others wait behind them."""
    held_max: int = 256
    """Limit of the requests that wait for versions; where there are more, they begin where they can."""
    moves_s: float = 0.1
    """How often it is looked whether a request is to move."""
    moves_max: int = 2
    """Limit of the requests that move at one look."""
    settled_s: float = 10.0
    """A request that has moved stays for so long: lengths are guesses, and each guess might move it again."""
    gap_s_min: float = 1.0
    """A request moves only from an instance that is done so much later than another one."""
    price_factor: float = 2.0
    """And only where both are done sooner for it by this multiple of what its context takes to be computed again."""


class Held(msgspec.Struct, frozen=True):
    """A request that was not placed, and what it waits for. Times of `place_by_arrival` in seconds."""

    since: float
    """When it was first not placed."""
    runner: str | None
    """The instance that would be done soonest with it; None: none could take it."""
    ready_s: float
    """In how many seconds that has a version on which the request may run; 0: it has."""


class Ordered(msgspec.Struct, frozen=True):
    """What waits, in the order in which it is to be placed, and the rank of each."""

    order: tuple[Rank, ...] = ()
    ranks: Mapping[RequestId, Rank] = {}


class ArrivalState(msgspec.Struct, frozen=True):
    """What was found, and has been placed since."""

    loads: Mapping[str, Load] = {}
    """What each instance has to do, the one whose assessment is the oldest first."""
    waiting: Ordered = Ordered()
    held: Mapping[RequestId, Held] = {}
    """Requests that were not placed at the last look, though an instance had room."""
    moves_looked_at: float = -math.inf
    moved_at: Mapping[RequestId, float] = {}
    """Requests that have moved within the last `settled_s`."""


class ArrivalFacts(msgspec.Struct, frozen=True):
    """What is known beside the view."""

    steps: Mapping[str, StepModel]
    """How long a step takes, by runner where that is known."""
    estimate: Callable[[RequestId], LengthEstimate]
    """How long a response will be."""
    context: Callable[[RequestId], int]
    """How many tokens a request has, its prompt among them."""
    priority: Callable[[RequestId], int]
    is_due: Callable[[RequestId], bool]
    """Whether a request was submitted before the trainer's step began, so that the trainer may wait for it now."""


class _Fleet:
    """The instances of one look, with how long their steps take and what they have to do."""

    def __init__(self, view: FleetView, facts: ArrivalFacts, loads: Mapping[str, Load]) -> None:
        self.view, self.facts = view, facts
        self.by_name = {each.runner: each for each in view.instances if not each.is_leaving}
        known = sorted(
            (facts.steps[name].seconds(each.slots, 0.0), name)
            for name, each in self.by_name.items()
            if name in facts.steps
        )
        self.is_measured = bool(known)
        middle = facts.steps[known[len(known) // 2][1]] if known else UNMEASURED
        self.steps = {name: facts.steps.get(name, middle) for name in self.by_name}
        self.loads = {name: copy(loads[name]) for name in loads if name in self.by_name}
        """What each has, with what was placed on it; the oldest assessment first."""
        fresh = {name: Load() for name in self.by_name if name not in loads}
        self.loads = {**fresh, **self.loads}
        self.with_held: dict[str, Load] = {}
        """The same with what waits for it."""
        self._candidates: list[str] = []
        self._uses = 0
        placed = sum(len(each.executing) + len(each.pending) for each in self.by_name.values())
        self.beside = (placed + len(view.waiting)) // max(1, len(self.by_name))
        """How many requests an instance has on average, once all are placed."""

    def assess(self, limits: ArrivalLimits, now: float) -> None:
        """Look at what instances have to do, the oldest assessment first."""
        left = limits.assessed_max
        for name in [*self.loads]:
            each = self.by_name[name]
            size = len(each.executing) + len(each.pending)
            is_first = left == limits.assessed_max
            if now - self.loads[name].assessed_at < limits.assessed_s or not (is_first or size <= left):
                break
            left -= size
            del self.loads[name]
            self.loads[name] = self._assessed(each, now)

    def _assessed(self, instance: InstanceView, now: float) -> Load:
        facts, steps, load = self.facts, self.steps[instance.runner], Load(assessed_at=now)
        longest = {False: 0.0, True: 0.0}
        for requests, is_new in ((instance.executing, False), (instance.pending, True)):
            for of in requests:
                is_due = facts.is_due(of)
                work = Work.of(facts.estimate(of), facts.context(of), self.beside, longest[is_due])
                longest[is_due] = max(longest[is_due], work.left)
                load.add(work, steps, is_new=is_new, is_due=is_due)
        return load

    def work(self, of: RequestId) -> Work:
        """Return what is to be made of a request's response."""
        return Work.of(self.facts.estimate(of), self.facts.context(of), self.beside)

    @property
    def has_due(self) -> bool:
        """Whether some of what instances have is due before the rest."""
        return any(each.due_longest for each in self.loads.values())

    def candidates(self, room: Mapping[str, int]) -> list[str]:
        """Return where a request may be done soonest: of those with room or that have a version soon, a few.

        They are those with the least to do, with and without their longest response, as of some placements ago.
        """
        if len(self.by_name) <= 2 * CANDIDATES:
            return [*self.by_name]
        if self._uses <= 0 or not any(room[name] > 0 for name in self._candidates):
            open_ = [name for name, each in self.by_name.items() if room[name] > 0 or each.arrives_in_s is not None]
            loads, steps = self.with_held, self.steps
            first = nsmallest(CANDIDATES, open_, key=lambda name: (loads[name].finish_s(steps[name]), name))
            least = nsmallest(CANDIDATES, open_, key=lambda name: (loads[name].busy_s, name))
            self._candidates, self._uses = [*dict.fromkeys((*first, *least))], CANDIDATES
        self._uses -= 1
        return self._candidates

    def done_with_s(self, instance: InstanceView, work: Work, *, only_due: bool) -> float:
        """Return when an instance is done with one more request, or with those alone that are due."""
        load, steps = self.loads[instance.runner], self.steps[instance.runner]
        return load.due_with_s(work, steps) if only_due else load.finish_with_s(work, steps)

    def add(self, name: str, work: Work, *, is_due: bool) -> None:
        """Have an instance make a response from its context on."""
        self.loads[name].add(work, self.steps[name], is_new=True, is_due=is_due)

    def hold(self, name: str, work: Work, *, is_due: bool) -> None:
        """Count a request where it is to go."""
        self.with_held[name].add(work, self.steps[name], is_new=True, is_due=is_due)


def place_by_arrival(
    view: FleetView, facts: ArrivalFacts, state: ArrivalState, limits: ArrivalLimits, now: float
) -> tuple[tuple[Action, ...], ArrivalState]:
    """Return what to place and what to move, and the state of the policy after it."""
    fleet = _Fleet(view, facts, state.loads)
    fleet.assess(limits, now)
    room = {name: _room(each, limits) for name, each in fleet.by_name.items()}
    waiting = _ordered(view, facts, state.waiting, limits.ranked_max) if view.waiting else Ordered()
    placed, held = _placed(fleet, waiting.order, room, state.held, limits, now)
    moved, moves_looked_at = list[MoveAction](), state.moves_looked_at
    moved_at = {of: at for of, at in state.moved_at.items() if now - at < limits.settled_s}
    if limits.migrates and fleet.is_measured and not placed and now - moves_looked_at >= limits.moves_s:
        moved, moves_looked_at = _moved(fleet, limits, moved_at.keys()), now
        moved_at |= {each.request: now for each in moved}
    return (*_released(view, facts), *placed, *moved), ArrivalState(
        fleet.loads, waiting, held, moves_looked_at, moved_at
    )


def _ordered(view: FleetView, facts: ArrivalFacts, before: Ordered, count_max: int) -> Ordered:
    """Return what waits in its order, with some of what has come to wait."""
    waiting = frozenset(view.waiting)
    order, ranks = [*before.order], dict(before.ranks)
    # Sets are compared by hashes that they have; to hash thousands of requests anew takes longer than all else.
    for of in before.ranks.keys() - waiting:
        del order[bisect_left(order, ranks.pop(of))]
    fresh = waiting - ranks.keys()
    if len(fresh) > count_max:
        fresh = frozenset(islice((of for of in view.waiting if of in fresh), count_max))
    for of in fresh:
        length = facts.estimate(of)
        ranks[of] = rank = -facts.priority(of), not length.made and not facts.is_due(of), -length.median, of
        insort(order, rank)
    return Ordered(tuple(order), ranks)


def _released(view: FleetView, facts: ArrivalFacts) -> list[ReleaseAction]:
    """Take all from instances that go away, what is the dearest to lose first."""
    return [
        ReleaseAction(of, each.runner, f"its machine goes away soon, and it has {facts.context(of)} tokens")
        for each in view.instances
        if each.is_leaving
        for of in sorted((*each.executing, *each.pending), key=facts.context, reverse=True)
    ]


# ---------------------------------------------------------------------------------------------- placing


def _placed(
    fleet: _Fleet,
    order: tuple[Rank, ...],
    room: dict[str, int],
    held_before: Mapping[RequestId, Held],
    limits: ArrivalLimits,
    now: float,
) -> tuple[list[PlaceAction], dict[RequestId, Held]]:
    """Return what to place, and what the others wait for while an instance has room."""
    actions: list[PlaceAction] = []
    held: dict[RequestId, Held] = {}
    if not order or all(left <= 0 for left in room.values()):
        return actions, held
    fleet.with_held = {name: copy(load) for name, load in fleet.loads.items()}
    view = fleet.view
    for_any = [name for name, each in fleet.by_name.items() if _ready_s(view, None, each) == 0]
    has_room = any(room[name] > 0 for name in for_any)
    for *_, of in order:
        if of in view.pinned:
            if not any(room[name] > 0 for name, each in fleet.by_name.items() if each.version == view.pinned[of]):
                continue
        elif not has_room and of not in view.alone:
            # What waits is not counted where nothing is placed: it would take as long as there are requests.
            if not (view.pinned or view.alone):
                break
            continue
        before = held_before.get(of)
        since = now if before is None else before.since
        may_hold = len(held) < limits.held_max and now - since < limits.hold_s_max
        found = _place_one(fleet, of, room, limits, since, may_hold=may_hold)
        if isinstance(found, PlaceAction):
            actions.append(found)
        else:
            held[of] = found
        has_room = any(room[name] > 0 for name in for_any)
    return actions, held


def _room(instance: InstanceView, limits: ArrivalLimits) -> int:
    """Return how many requests an instance takes now."""
    if not instance.takes_more:
        return 0
    return min(limits.pending_max - len(instance.pending), instance.free_slots)


def _place_one(
    fleet: _Fleet, of: RequestId, room: dict[str, int], limits: ArrivalLimits, since: float, *, may_hold: bool
) -> PlaceAction | Held:
    """Place a request that waits `since` then, or have it wait for an instance that is done sooner: it counts there."""
    view, work, is_alone = fleet.view, fleet.work(of), of in fleet.view.alone
    is_due = fleet.facts.is_due(of)
    by_arrival = limits.admits_by_arrival and fleet.is_measured and not is_alone and of not in view.pinned
    best: tuple[float, str] | None = None
    best_ready_s = 0.0
    best_now: tuple[float, str] | None = None
    for name in fleet.by_name if of in view.pinned or is_alone else fleet.candidates(room):
        each = fleet.by_name[name]
        ready_s = _ready_s(view, of, each)
        if ready_s is None or (ready_s > 0 and not by_arrival):
            continue
        has_room = room[name] > 0 and not (is_alone and (each.pending or room[name] < _room(each, limits)))
        if not ready_s and not has_room and not is_alone:
            continue
        load, steps = fleet.with_held[name], fleet.steps[name]
        finish_s = load.due_with_s(work, steps) if is_due else load.finish_with_s(work, steps)
        found = (ready_s + finish_s, name)
        if best is None or found < best:
            best, best_ready_s = found, ready_s
        if not ready_s and has_room:
            best_now = found if best_now is None else min(best_now, found)
    if best is None:
        return Held(since, None, 0.0)
    if best_now is None or (best != best_now and may_hold):
        fleet.hold(best[1], work, is_due=is_due)
        if is_alone:
            # Nothing else is placed there, so that nothing is pending there soon.
            room[best[1]] = 0
        return Held(since, best[1], best_ready_s)
    finish_s, name = best_now
    fleet.add(name, work, is_due=is_due)
    fleet.hold(name, work, is_due=is_due)
    # Nothing else is placed beside one that may kill its instance.
    room[name] = 0 if is_alone else room[name] - 1
    when = (
        f"is done soonest with it, in {finish_s:.1f} s"
        if fleet.is_measured
        else "has the least to do (no steps are measured yet)"
    )
    return PlaceAction(of, name, f"about {work.left:.0f} tokens: of the instances with room {name} {when}")


def _ready_s(view: FleetView, of: RequestId | None, instance: InstanceView) -> float | None:
    """Return when an instance could begin with a request, from now on; None: it is not known, or never.

    `of`: None for one that is for no version alone.
    """
    if instance.free_slots <= 0:
        return None
    if of is not None and of in view.pinned:
        return 0.0 if instance.takes_more and view.fits(of, instance) else None
    if instance.takes_more and instance.may_start and not view.is_kept_back(instance):
        return 0.0
    return instance.arrives_in_s


# ---------------------------------------------------------------------------------------------- moving


def _moved(fleet: _Fleet, limits: ArrivalLimits, settling: AbstractSet[RequestId]) -> list[MoveAction]:
    """Return what moves from the instance that is done last to the one that is done first, but for `settling`.

    Where some requests are due before the rest, only these count, and move: the rest is evened out by what comes yet.
    """
    takers = [each for each in fleet.by_name.values() if each.takes_more and each.may_start and each.free_slots > 0]
    takers = [each for each in takers if not fleet.view.is_kept_back(each)]
    actions: list[MoveAction] = []
    only_due = fleet.has_due
    done_s = {
        name: load.due_s(fleet.steps[name]) if only_due else load.finish_s(fleet.steps[name])
        for name, load in fleet.loads.items()
    }
    while len(actions) < limits.moves_max and takers:
        source = max(fleet.by_name.values(), key=lambda each: (done_s[each.runner], each.runner))
        longest = _longest(fleet, source, only_due=only_due)
        target = min(takers, key=lambda each: (fleet.done_with_s(each, longest, only_due=only_due), each.runner))
        if source is target or done_s[source.runner] - done_s[target.runner] < limits.gap_s_min:
            break
        gone = settling | {each.request for each in actions}
        move = _best_move(fleet, source, target, limits, gone, only_due=only_due)
        if move is None:
            break
        before_s = done_s[source.runner]
        fleet.loads[source.runner] = move.rest
        done_s[source.runner], done_s[target.runner] = move.source_s, move.target_s
        fleet.add(target.runner, move.work, is_due=only_due)
        reason = (
            f"{source.runner} is done in {before_s:.0f} s, {before_s - move.after_s:.1f} s sooner without it; "
            f"its context takes {move.price_s:.2f} s there"
        )
        actions.append(MoveAction(move.request, source.runner, target.runner, reason))
    return actions


def _longest(fleet: _Fleet, source: InstanceView, *, only_due: bool) -> Work:
    """Return the longest response of an instance, by which another one is chosen; its context is left out."""
    load = fleet.loads[source.runner]
    most = load.due_longest if only_due else load.longest
    return Work(most, most * most, most, 0.0)


class _Move(NamedTuple):
    """One request that may move, and when both instances are done after it."""

    after_s: float
    price_s: float
    request: RequestId
    work: Work
    rest: Load
    """What the source has then."""
    source_s: float
    target_s: float


def _best_move(
    fleet: _Fleet,
    source: InstanceView,
    target: InstanceView,
    limits: ArrivalLimits,
    gone: AbstractSet[RequestId],
    *,
    only_due: bool,
) -> _Move | None:
    """Return the move after which both instances are done soonest; None: none is worth its price."""
    from_steps, to_steps = fleet.steps[source.runner], fleet.steps[target.runner]
    load = fleet.loads[source.runner]
    before_s = load.due_s(from_steps) if only_due else load.finish_s(from_steps)
    there = [
        (of, fleet.work(of))
        for of in (*source.executing, *source.pending)
        if of not in gone and (not only_due or fleet.facts.is_due(of))
    ]
    there.sort(key=lambda each: (-each[1].most, each[0]))
    best: _Move | None = None
    for at, (of, work) in enumerate(there):
        if not fleet.view.fits(of, target):
            continue
        longest = (there[0] if at else there[min(1, len(there) - 1)])[1].most if len(there) > 1 else 0.0
        rest = _without(load, work, longest, from_steps, only_due=only_due)
        source_s = rest.due_s(from_steps) if only_due else rest.finish_s(from_steps)
        target_s = fleet.done_with_s(target, work, only_due=only_due)
        after_s, price_s = max(source_s, target_s), work.prefill_s(to_steps)
        if after_s >= before_s or before_s - after_s < limits.price_factor * price_s:
            continue
        if best is None or (after_s, price_s) < best[:2]:
            best = _Move(after_s, price_s, of, work, rest, source_s, target_s)
    return best


def _without(load: Load, work: Work, longest: float, steps: StepModel, *, only_due: bool) -> Load:
    """Return a load without a request; `longest`: of the others."""
    rest = copy(load)
    rest.busy_s = max(0.0, load.busy_s - work.busy_s(steps))
    rest.prefill_s = max(0.0, load.prefill_s - work.prefill_s(steps))
    if only_due:
        rest.due_longest, rest.due_busy_s = longest, max(0.0, load.due_busy_s - work.busy_s(steps))
    else:
        rest.longest, rest.rest_step_s = longest, max(0.0, load.rest_step_s - work.step_s(steps))
    return rest
