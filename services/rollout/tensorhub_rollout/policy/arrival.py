"""The policy `arrival`: each request where all is done soonest, with regard to when versions arrive. Pure.

Requests are placed the longest first (longest processing time first, LPT), each on the instance that is done soonest
with it (`finish_times`). Requests that were submitted before the trainer's step began are *due*: the trainer may wait
for them now, and does not for those that it has submitted ahead. They come first. Two terms can be switched off, each
by itself:

- Admission. An instance that has no version yet on which a request may run counts from when it will have one. What is
  best there waits for it; what is best elsewhere, or has waited for `hold_s_max`, begins now. Off: only instances that
  may run it count.
- Migration (`moving`). A request moves from the instance that is done last to the one that is done first. Off: what
  runs stays until its instance goes.

Where more requests wait than the fleet has slots, the first of each group goes before all others as long as nothing of
the group is known (Seer's order, 2025): what it comes to tells how long its siblings will be, which are put in order
once more while they wait.

A look assesses a few of the requests that instances have (`fleet_loads`), and puts a few of those that have come to
wait in their order (`waiting_order`). So it takes about as long with any number of open requests. An instance whose
machine goes away gives its requests back, those with the most tokens first: they are the dearest to lose.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.finish_times import Load, with_it_s
from tensorhub_rollout.policy.fleet_loads import AssessmentLimits, FleetLoads
from tensorhub_rollout.policy.lengths import Knowledge
from tensorhub_rollout.policy.moving import MoveLimits, moves
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.rank_order import Rank
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.view import Action, FleetView, InstanceView, MoveAction, PlaceAction, ReleaseAction
from tensorhub_rollout.policy.waiting_order import WaitingOrder

CANDIDATES: Final = 8
"""In a larger fleet a request is compared on this number of instances of two kinds, chosen anew as often."""
COMPARED_MAX: Final = 1024
"""Limit of the instances that one look compares; in a larger fleet the next ones at the next look."""

UNTOLD: Final = frozenset({Knowledge.ALIKE, Knowledge.JOB})
"""What is expected of a response is from others' prompts: the first of its group would tell more."""


class ArrivalLimits(msgspec.Struct, frozen=True):
    """The settings of the policy; times in seconds."""

    admits_by_arrival: bool = True
    """Whether the term of admission is on."""
    migrates: bool = True
    """Whether the term of migration is on."""
    hold_s_max: float = 30.0
    """So long a request waits for a version to arrive, where an instance could run it now."""
    held_max: int = 256
    """Limit of the requests that wait for versions; where there are more, they begin where they can."""
    held_look_s: float = 0.1
    """Where nothing has come and no instance has room that had none, what is held is looked at so often."""
    pending_max: int = 16
    """Limit of the requests that are pending on an instance."""
    ranked_max: int = 256
    """Limit of the requests that are put in order at one look; others wait behind them."""
    ranked_again_max: int = 16
    """Limit of those that are put in order once more at one look, where more wait than the fleet has slots."""
    assessments: AssessmentLimits = AssessmentLimits()
    moves: MoveLimits = MoveLimits()


class Held(msgspec.Struct, frozen=True):
    """A request that was not placed, and what it waits for; times in seconds."""

    since: float
    """When it was first not placed."""
    runner: str | None
    """The instance that would be done soonest with it; None: none could take it."""
    ready_s: float
    """In how many seconds that has a version on which the request may run; 0: it has."""


class Arrival:
    """The policy for one model: what it remembers from look to look."""

    def __init__(self, limits: ArrivalLimits) -> None:
        """Know of nothing yet."""
        self._limits = limits
        self._fleet = FleetLoads(limits.assessments)
        self._order = WaitingOrder()
        self._held: dict[RequestId, Held] = {}
        self._open: frozenset[str] = frozenset()
        """Instances on which something could begin at the last look that placed or held."""
        self._placed_at = self._moved_at = -math.inf
        """When it was last looked what to place, and what to move."""
        self._first = 0
        """Which instance a look compares first, where it does not compare all."""
        self._settling: dict[RequestId, float] = {}
        """When requests have moved, of late."""

    @property
    def held(self) -> Mapping[RequestId, Held]:
        """Requests that were not placed at the last look, though an instance had room."""
        return self._held

    def loads(self) -> Mapping[str, Load]:
        """Return what each instance has to do."""
        return self._fleet.loads()

    def contexts(self) -> Mapping[str, float]:
        """Return how many tokens each instance would compute again for other weights."""
        return self._fleet.contexts()

    def look(self, view: FleetView, facts: Facts, now: float) -> tuple[Action, ...]:
        """Return what to place, to move and to take back."""
        limits, fleet = self._limits, self._fleet
        fleet.look(view, facts, now)
        is_scarce = len(view.waiting) > fleet.slots
        rank = partial(_rank, facts, is_scarce=is_scarce)
        has_come = self._order.update(view, rank, limits.ranked_max)
        placed = self._place(view, facts, rank, now, has_come=has_come, is_scarce=is_scarce)
        moved: list[MoveAction] = []
        if limits.migrates and fleet.is_measured and not placed and now - self._moved_at >= limits.moves.looked_at_s:
            self._moved_at = now
            self._settling = {of: at for of, at in self._settling.items() if now - at < limits.moves.settled_s}
            moved = moves(view, fleet, facts, self._settling.keys(), limits.moves)
            self._settling |= {each.request: now for each in moved}
        return (*_released(fleet.leaving, facts), *placed, *moved)

    def _place(
        self,
        view: FleetView,
        facts: Facts,
        rank: Callable[[RequestId], Rank],
        now: float,
        *,
        has_come: bool,
        is_scarce: bool,
    ) -> list[PlaceAction]:
        limits = self._limits
        placing = _Placing(view, facts, self._fleet, limits, self._first)
        if not placing.has_all:
            self._first += COMPARED_MAX
        open_ = placing.open
        is_same = open_ <= self._open and not has_come and now - self._placed_at < limits.held_look_s
        if not view.waiting or (placing.has_all and not placing.has_room):
            self._held = {}
        elif placing.has_room and not is_same:
            self._placed_at = now
            if is_scarce:
                self._order.rank_anew(view, rank, limits.ranked_again_max)
            self._held = placing.place(self._order, self._held, now)
        self._open = open_
        return placing.actions


def _rank(facts: Facts, of: RequestId, *, is_scarce: bool) -> Rank:
    known = facts.of(of)
    length = known.length
    is_probe = is_scarce and length.knowledge in UNTOLD and known.is_first
    tokens = math.inf if is_probe else length.median
    return -known.priority, not length.made and not known.is_due, -tokens, of


def _released(leaving: Iterable[InstanceView], facts: Facts) -> list[ReleaseAction]:
    """Take all from instances that go away, what is the dearest to lose first."""

    def context(of: RequestId) -> int:
        return facts.of(of).context

    return [
        ReleaseAction(of, each.runner, f"its machine goes away soon, and it has {context(of)} tokens")
        for each in leaving
        for of in sorted((*each.executing, *each.pending), key=context, reverse=True)
    ]


class _Placing:
    """What is placed in one look."""

    def __init__(self, view: FleetView, facts: Facts, fleet: FleetLoads, limits: ArrivalLimits, first: int) -> None:
        self._view, self._facts, self._fleet, self._limits = view, facts, fleet, limits
        self._admits = limits.admits_by_arrival and fleet.is_measured
        self._room: dict[str, int] = {}
        """How many requests each instance takes now."""
        self._ready_s: dict[str, float | None] = {}
        """When each could begin with a request that is for no version alone; None: not known, or never."""
        open_ = []
        self.has_room = False
        pending_max, rooms, readies, kept_back = limits.pending_max, self._room, self._ready_s, view.kept_back()
        # What is for one version, or is tried alone, may go anywhere.
        self.has_all = len(fleet.instances) <= COMPARED_MAX or bool(view.pinned or view.alone)
        """Whether this look compares all instances."""
        compared = fleet.staying if self.has_all else fleet.some(first, COMPARED_MAX)
        for each in compared:
            name = each.runner
            pending = len(each.pending)
            # `free_slots` without a call, for thousands of instances.
            free = each.slots - pending - len(each.executing)
            takes_more = each.takes_more
            rooms[name] = room = min(pending_max - pending, free) if takes_more else 0
            if free <= 0:
                readies[name] = None
            elif takes_more and each.may_start and name not in kept_back:
                readies[name] = 0.0
                if room > 0:
                    open_.append(name)
            else:
                readies[name] = each.arrives_in_s
            if room > 0:
                self.has_room = True
        self.open = frozenset(open_)
        """Instances on which a request for no version alone could begin now."""
        self.actions: list[PlaceAction] = []
        self._loads: dict[str, Load] = {}
        """What instances have and what waits for them, of those that were asked for."""
        self._candidates = _Compared([], [], [])
        self._uses = 0
        self._by_finish: _Least | None = None
        self._by_busy: _Least | None = None
        """All that may be candidates, once some were asked for."""
        self._still_open: set[str] = set()

    def place(self, order: WaitingOrder, held_before: Mapping[RequestId, Held], now: float) -> dict[RequestId, Held]:
        """Place what waits, and return what the others wait for while an instance has room."""
        view, limits = self._view, self._limits
        held: dict[RequestId, Held] = {}
        self._still_open = {*self.open}
        for of in order.of(view):
            if of in view.pinned:
                if not any(self._room[each.runner] > 0 for each in self._of_version(view.pinned[of])):
                    continue
            elif not self._still_open and of not in view.alone:
                # What waits is not counted where nothing is placed: it would take as long as there are requests.
                if not (view.pinned or view.alone):
                    break
                continue
            before = held_before.get(of)
            since = now if before is None else before.since
            may_hold = len(held) < limits.held_max and now - since < limits.hold_s_max
            waits_for = self._place_one(of, since, may_hold=may_hold)
            if waits_for is not None:
                held[of] = waits_for
        return held

    def _of_version(self, version: int) -> list[InstanceView]:
        return [each for each in self._fleet.instances.values() if each.takes_more and each.version == version]

    def _place_one(self, of: RequestId, since: float, *, may_hold: bool) -> Held | None:
        """Place a request that waits `since` then, or return what it waits for: it counts there."""
        view, fleet, room = self._view, self._fleet, self._room
        known = self._facts.of(of)
        work, is_due = fleet.work(known), known.is_due
        is_alone, is_pinned = of in view.alone, of in view.pinned
        if is_pinned:
            compared = self._compared(fleet.instances, partial(self._ready_for, of), admits=False)
        elif is_alone:
            compared = self._compared(fleet.instances, self._ready_s.__getitem__, admits=False)
        else:
            compared = self._first()
        best: tuple[float, str] | None = None
        best_ready_s = 0.0
        best_now: tuple[float, str] | None = None
        takes = with_it_s(work, compared.there, is_due=is_due)
        for name, ready_s, takes_s in zip(compared.names, compared.ready_s, takes, strict=True):
            has_room = room[name] > 0 and not (is_alone and self._has_pending(name))
            if not (ready_s or has_room or is_alone):
                continue
            finish = (ready_s + takes_s, name)
            if best is None or finish < best:
                best, best_ready_s = finish, ready_s
            if not ready_s and has_room and (best_now is None or finish < best_now):
                best_now = finish
        if best is None:
            return Held(since, None, 0.0)
        is_held = best_now is None or (best != best_now and may_hold)
        finish_s, name = best if best_now is None or is_held else best_now
        self._load(name).add(work, fleet.steps[name], is_new=True, is_due=is_due)
        self._note_load(name)
        if is_held:
            if is_alone:
                # Nothing else is placed there, so that nothing is pending there soon.
                self._take_room(name, room[name])
            return Held(since, name, best_ready_s)
        fleet.add(name, work, is_due=is_due)
        # Nothing else is placed beside one that may kill its instance.
        self._take_room(name, room[name] if is_alone else 1)
        when = (
            f"is done soonest with it, in {finish_s:.1f} s"
            if fleet.is_measured
            else "has the least to do (no steps are measured yet)"
        )
        reason = f"about {work.left:.0f} tokens: of the instances with room {name} {when}"
        self.actions.append(PlaceAction(of, name, reason))
        return None

    def _take_room(self, name: str, count: int) -> None:
        self._room[name] -= count
        if self._room[name] <= 0:
            self._still_open.discard(name)

    def _ready_for(self, of: RequestId, name: str) -> float | None:
        """Return when an instance could begin with a request that is for one version alone: now, or it is not known."""
        each = self._fleet.instances[name]
        return 0.0 if each.free_slots > 0 and each.takes_more and self._view.fits(of, each) else None

    def _has_pending(self, name: str) -> bool:
        each = self._fleet.instances[name]
        return bool(each.pending) or self._room[name] < min(self._limits.pending_max, each.free_slots)

    def _load(self, name: str) -> Load:
        if name not in self._loads:
            self._loads[name] = self._fleet.load(name)
        return self._loads[name]

    def _note_load(self, name: str) -> None:
        if self._by_finish is not None and self._by_busy is not None:
            load = self._loads[name]
            self._by_finish.put(name, load.finish_s(self._fleet.steps[name]))
            self._by_busy.put(name, load.busy_s)

    def _compared(self, names: Iterable[str], ready_s: Callable[[str], float | None], *, admits: bool) -> "_Compared":
        """Return those of these instances that could begin now, or later where the policy `admits` by that."""
        found = [(name, at) for name in names if (at := ready_s(name)) is not None and (admits or not at)]
        there = [(self._load(name), self._fleet.steps[name]) for name, _ in found]
        return _Compared([name for name, _ in found], [at for _, at in found], there)

    def _first(self) -> "_Compared":
        """Return where a request may be done soonest, as of some placements ago; of a large fleet, a few instances."""
        room = self._room
        if self._uses <= 0 or not any(room[name] > 0 for name in self._candidates.names):
            names = self._with_least() if len(self._fleet.instances) > 2 * CANDIDATES else self._fleet.instances
            self._candidates = self._compared(names, self._ready_s.__getitem__, admits=self._admits)
            self._uses = CANDIDATES
        self._uses -= 1
        return self._candidates

    def _with_least(self) -> Iterable[str]:
        """Return those with the least to do, with or without their longest response, of those that have room soon."""
        if self._by_finish is None or self._by_busy is None:
            finish, busy = self._fleet.finish_and_busy_s(filter(self._is_candidate, self._room))
            self._by_finish, self._by_busy = _Least(finish), _Least(busy)
            for name in self._loads:
                self._note_load(name)
        first = self._by_finish.first(CANDIDATES, self._is_candidate)
        return dict.fromkeys((*first, *self._by_busy.first(CANDIDATES, self._is_candidate)))

    def _is_candidate(self, name: str) -> bool:
        return self._room[name] > 0 or self._fleet.instances[name].arrives_in_s is not None


class _Compared(NamedTuple):
    """Instances on which a request is compared: when each could begin, in seconds, and what it has with its steps."""

    names: list[str]
    ready_s: list[float]
    there: list[tuple[Load, StepModel]]


class _Least:
    """Instances by a number that changes: which have the least. To sort thousands again and again takes too long."""

    def __init__(self, numbers: list[tuple[float, str]]) -> None:
        self._order = sorted(numbers)
        """Some have other numbers by now."""
        self._changed: dict[str, float] = {}

    def put(self, name: str, number: float) -> None:
        """Take another number of an instance that has one."""
        if self._changed.get(name) != number:
            self._changed[name] = number
            insort(self._order, (number, name))

    def first(self, count: int, is_meant: Callable[[str], bool]) -> list[str]:
        """Return those with the least of these that are meant; one that is not never is again."""
        order, changed = self._order, self._changed
        found: list[str] = []
        while len(found) < min(count, len(order)):
            number, name = order[len(found)]
            if changed.get(name, number) == number and is_meant(name) and name not in found:
                found.append(name)
            else:
                del order[len(found)]
        return found
